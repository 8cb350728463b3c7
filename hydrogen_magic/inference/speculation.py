"""How long a rank may be silent before its rows are given to another rank as well.

A rank may be stopped from outside, wait for a lock that nobody leaves, or for a server that is gone. It
looks like one that has much to do, so nobody judges by silence alone: another rank must have nothing
else to do, and the chunk take many times what others took.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["SilenceLimit"]

FLOOR_S = 30.0
"""Nobody is thought to hang before: garbage is collected, disks and servers have bad moments."""
_TIMES = 10.0
"""What takes this many times the usual is waited for no longer."""
_UNKNOWN_S = 600.0
"""The same while nothing is known of what is usual: a chunk may take minutes on every rank."""
_MOST_REMEMBERED = 256
"""Chunks; the last ones, since a later part of the frame may be harder than the first."""


class SilenceLimit:
    """Learns from the chunks that were done, and from the ranks that were set up."""

    def __init__(self) -> None:
        self._rows_s: deque[float] = deque(maxlen=_MOST_REMEMBERED)
        """Seconds per row of the last chunks: they differ in size."""
        self._set_up_s = 0.0
        """What the slowest rank took that is set up."""

    def took(self, seconds: float, n_rows: int) -> None:
        """Take note of a chunk that was done."""
        self._rows_s.append(seconds / max(1, n_rows))

    def set_up(self, seconds: float) -> None:
        """Take note of a rank that was set up."""
        self._set_up_s = max(self._set_up_s, seconds)

    def chunk_s(self, n_rows: int) -> float:
        """Return how many seconds a chunk of ``n_rows`` is waited for."""
        if not self._rows_s:
            return _UNKNOWN_S
        return max(FLOOR_S, _TIMES * statistics.median(self._rows_s) * max(1, n_rows))

    def set_up_s(self) -> float:
        """Return how many seconds a rank may take until its cell has run, when others are done."""
        return max(FLOOR_S, _TIMES * self._set_up_s)
