"""Which files a cell reads while it sets up: where one has changed, the set-up is not what it was.

Seen by Python's audit hooks, so what C++ or Rust opens by itself is not; libraries that do so read
something beside it (a configuration, an index) that is rewritten with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["MOST", "noted"]

MOST = 10_000
"""Files that are noted at most: a cell that reads more of them reads data."""

_files: dict[str, int] | None = None
"""File -> its time in ns, None while nobody wants to know."""
_is_hooked = False


@contextmanager
def noted() -> Iterator[dict[str, int]]:
    """Yield a dictionary that is filled with the regular files opened by this process meanwhile.

    With them goes the time in ns at which each was last changed. There is one more than :data:`MOST`
    where there would be more.
    """
    global _files, _is_hooked
    if not _is_hooked:  # a hook cannot be taken away again
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
        return  # it will not be opened either
