"""How often a rank sends its events: the kernel handles all ranks, one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

TICK_S = 0.05
"""Tick of the reporter; 20 wake-ups a second cost nothing that can be measured."""
_SEND_S = 0.1
"""As often as a view redraws. Every message wakes agent and kernel, however small it is."""
_RANKS_PER_TICK = 64
"""This many ranks may send at every tick: a kernel handles 1,300 batches a second with little effort."""
_POINTS_PER_S = 60_000
"""Of a gang: a kernel on a busy laptop core decodes, records and draws 100,000 a second."""
_LATER_S = 0.5
_LATER_AFTER_S = 600.0
"""A gang of hours sends less often: each message takes memory and disk space until its end."""
_LONGEST_S = 1.0
"""Longest interval: a person does not perceive the view as frozen yet."""


class SendInterval:
    """Tells when a rank should send, and how much.

    It sends every 0.1 s in a gang of 128 ranks, every 0.8 s in one of 1,024. In the first ten minutes the
    interval grows to 0.5 s, if it is shorter.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = min(_LONGEST_S, max(_SEND_S, TICK_S * world_size / _RANKS_PER_TICK))
        self._points_per_s = _POINTS_PER_S / world_size
        self._clock = clock
        self._started_s = clock()
        # Ranks of a large gang start at the same time, and should not always send at the same time.
        self._due = self._started_s + self._first_s * (rank % _RANKS_PER_TICK) / _RANKS_PER_TICK

    @property
    def interval_s(self) -> float:
        """The current interval, in seconds."""
        age = (self._clock() - self._started_s) / _LATER_AFTER_S
        return max(self._first_s, _LATER_S * min(1.0, age))

    @property
    def max_points(self) -> int:
        """Points of curves that a rank may send at a time."""
        return math.ceil(self._points_per_s * self.interval_s)

    def is_due(self, *, is_urgent: bool) -> bool:
        """Return whether to send now; after True, the next time is an interval later."""
        now = self._clock()
        if not is_urgent and now < self._due:
            return False
        # Half a tick of tolerance: one that comes early is not missed.
        self._due = now + self.interval_s - TICK_S / 2
        return True
