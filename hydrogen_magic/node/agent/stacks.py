"""Stacks of a rank's threads, as ``faulthandler`` writes them to a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PACKAGE = f'File "{Path(__file__).parents[2]}{os.sep}'
_OUR_THREAD = _PACKAGE + "node/worker/reporting/event_sender.py"
_OUR_HOOKS = re.compile(re.escape(_PACKAGE) + r"(\w+/)*node/((worker/)?observe|rendezvous)/")
_BELOW_THE_CELL = tuple(
    _PACKAGE + file
    for file in (
        "node/worker/main.py",
        "node/worker/namespace.py",
        "node/worker/results/results.py",
        "node/worker/results/unsharding.py",
        "serialization/result_stream.py",
    )
)
"""They call the user's code, or a library about the user's results."""


class StackReader:
    """Reads the stacks that are appended to the file ``fd``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = os.fstat(fd).st_size

    def read(self) -> str:
        """Return the stacks written since the last call, without our own frames."""
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size - self._end, self._end)
        self._end = size
        return _without_our_frames(data.decode("utf-8", "replace"))


def _without_our_frames(stacks: str) -> str:
    """Remove frames below the user's code, and threads that are internal.

    ``faulthandler`` prints the innermost frame first, so everything after our first line is
    internal.
    """
    threads = [thread.splitlines() for thread in stacks.split("\n\n") if _OUR_THREAD not in thread]
    return "\n\n".join("\n".join(_users_part(lines)) for lines in threads)


def _users_part(lines: list[str]) -> list[str]:
    below = (n for n, line in enumerate(lines) if line.strip().startswith(_BELOW_THE_CELL))
    return [line for line in lines[: next(below, None)] if not _OUR_HOOKS.match(line.strip())]
