"""Files that a cell reads during its set-up: if one has changed, the set-up cannot be reused.

Python's audit hooks report them, except for files that C++ or Rust code opens by itself; libraries that do
so also read a file in Python (a configuration, an index) that is rewritten with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["MOST", "noted"]

MOST = 10_000
"""Maximum number of files recorded: a cell that reads more of them reads data."""

_files: dict[str, int] | None = None
"""File -> its modification time in ns; None while tracking is off."""
_is_hooked = False


@contextmanager
def noted() -> Iterator[dict[str, int]]:
    """Yield a dictionary that is filled with the regular files opened by this process meanwhile.

    The values are their modification times in ns. If there are more than :data:`MOST` files, the dictionary
    has one more than that.
    """
    global _files, _is_hooked
    if not _is_hooked:  # an audit hook cannot be removed
        _is_hooked = True
        sys.addaudithook(_on_event)
    _files = {}
    try:
        yield _files
    finally:
        _files = None


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if _files is None or event != "open" or not isinstance(args[0], (str, bytes)):
        return
    if isinstance(args[2], int) and args[2] & os.O_ACCMODE == os.O_RDONLY:
        _note(_files, os.path.abspath(os.fsdecode(args[0])))


def _note(files: dict[str, int], path: str) -> None:
    if path in files or len(files) > MOST or path.startswith(("/proc/", "/sys/", "/dev/")):
        return
    try:
        files[path] = os.stat(path).st_mtime_ns
    except OSError:
        return  # opening it will fail too
