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

MOST = 10_000
"""Maximum number of files recorded: a cell that reads more of them reads data."""


class _AuditHook:
    """The audit hook of this process: Python cannot remove it, so there is one."""

    def __init__(self) -> None:
        self._is_added = False
        self._files: dict[str, int] | None = None
        """File -> its modification time in ns; None while tracking is off."""

    @contextmanager
    def tracking(self) -> Iterator[dict[str, int]]:
        if not self._is_added:
            self._is_added = True
            sys.addaudithook(self._on_event)
        self._files = {}
        try:
            yield self._files
        finally:
            self._files = None

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._files is None or event != "open" or not isinstance(args[0], (str, bytes)):
            return
        if isinstance(args[2], int) and args[2] & os.O_ACCMODE == os.O_RDONLY:
            _note(self._files, os.path.abspath(os.fsdecode(args[0])))


_hook = _AuditHook()


@contextmanager
def noted() -> Iterator[dict[str, int]]:
    """Yield a dictionary that is filled with the regular files opened by this process meanwhile.

    The values are their modification times in ns. If there are more than :data:`MOST` files, the dictionary
    has one more than that.
    """
    with _hook.tracking() as files:
        yield files


def _note(files: dict[str, int], path: str) -> None:
    if path in files or len(files) > MOST or path.startswith(("/proc/", "/sys/", "/dev/")):
        return
    try:
        files[path] = os.stat(path).st_mtime_ns
    except OSError:
        return  # opening it will fail too
