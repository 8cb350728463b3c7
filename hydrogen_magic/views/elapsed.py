"""The run time of a gang, also between its events."""

from __future__ import annotations

import time
from collections.abc import Callable

from hydrogen_magic.driver.state.gang_state import GangState


class GangClock:
    """Seconds since a gang's launch, measured here. ``clock`` is a monotonic one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._launched_at: float | None = None

    def now_s(self, state: GangState) -> float:
        """Return the time since the launch; by events alone it would stand still if all ranks hang."""
        if state.is_terminal:
            return state.now_s
        now = self._clock()
        at_most = now - state.now_s
        known = self._launched_at
        self._launched_at = at_most if known is None else min(known, at_most)
        return now - self._launched_at
