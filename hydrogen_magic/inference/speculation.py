"""How long a rank may be silent before its chunks are also sent to another rank.

A rank may be stopped from outside, or wait for a lock or a server forever. It looks like a rank with
much work, so silence alone does not count: another rank must be idle, and the chunk must take many times
as long as others.
"""

from __future__ import annotations

import statistics
from collections import deque

FLOOR_S = 30.0
"""The shortest limit: garbage collection, disks and servers take time now and then."""
_FACTOR = 10.0
"""A rank hangs if a chunk takes this many times the usual time."""
_UNKNOWN_S = 600.0
"""The limit while the usual time is not known: each chunk may take minutes."""
_N_CHUNKS = 256
"""The usual time is that of the last chunks, since later rows may be harder."""


class SilenceLimit:
    """Learns from finished chunks and from ranks that have been set up."""

    def __init__(self) -> None:
        self._seconds_per_row: deque[float] = deque(maxlen=_N_CHUNKS)
        self._set_up_s = 0.0
        """Time of the slowest set-up."""

    def took(self, seconds: float, n_rows: int) -> None:
        """Take note of a finished chunk."""
        self._seconds_per_row.append(seconds / max(1, n_rows))

    def set_up(self, seconds: float) -> None:
        """Take note of a finished set-up."""
        self._set_up_s = max(self._set_up_s, seconds)

    def chunk_s(self, n_rows: int) -> float:
        """Return the limit for a chunk of ``n_rows`` rows."""
        if not self._seconds_per_row:
            return _UNKNOWN_S
        return max(FLOOR_S, _FACTOR * statistics.median(self._seconds_per_row) * max(1, n_rows))

    def set_up_s(self) -> float:
        """Return the limit for a set-up."""
        return max(FLOOR_S, _FACTOR * self._set_up_s)
