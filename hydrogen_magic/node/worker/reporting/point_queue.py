"""The queue of a rank's logged points, bounded by their number."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.reporting import metric_points as points
from hydrogen_magic.node.worker.reporting.metric_points import Point
from hydrogen_magic.node.worker.reporting.send_interval import SendInterval

_MAX_POINTS = 1 << 16
"""Maximum number of points: more than half a second of 100 000 a second, and about 30 MB of memory."""


class PointQueue:
    """Points that wait to be sent: any thread may add, one takes.

    A full queue drops the oldest points. ``interval`` limits the number of points that are sent at a time.
    """

    def __init__(self, rank: int, interval: SendInterval) -> None:
        self._rank = rank
        self._interval = interval
        self._added: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._taken: deque[Point] = deque()
        """Taken from ``_added``, not yet sent: the value of the first one is still being computed."""
        self._n_dropped = 0
        self._auto_steps = itertools.count()

    def add(self, at_s: float, step: int | None, values: dict[str, Any]) -> None:
        """Add a point and take ownership of ``values``. ``step`` None numbers such points.

        Raises TypeError if a value is not a number or ``step`` is not an integer.
        """
        ready = points.as_numbers(values)
        step = next(self._auto_steps) if step is None else points.as_step(step)
        if len(self._added) == self._added.maxlen:
            self._n_dropped += 1
        self._added.append((at_s, step, values, ready))

    def take(self, at_s: float, wait_s: float, *, is_last: bool = False) -> Iterator[ev.Metrics]:
        """Yield points as columns, all of them if ``wait_s`` > 0.

        Waits up to ``wait_s`` for values that are being computed on a GPU; later points are kept, or counted
        as skipped if ``is_last``.
        """
        n_waiting = len(self._taken) + len(self._added)
        for _ in range(len(self._added)):
            self._taken.append(self._added.popleft())
        skipped, self._n_dropped = self._n_dropped, 0
        # A rank that logs more than it may send shows its newest points, not those from seconds ago.
        limit = self._interval.max_points
        n_kept = limit if n_waiting >= _MAX_POINTS else _MAX_POINTS
        while len(self._taken) > n_kept:
            self._taken.popleft()
            skipped += 1
        ready = self._pop_ready(_MAX_POINTS if wait_s else limit, time.monotonic() + wait_s)
        if is_last:
            skipped += len(self._taken)
            self._taken.clear()
        for chunk in points.chunks(ready):
            yield points.as_metrics(at_s, self._rank, chunk, skipped)
            skipped = 0
        if skipped:
            yield ev.Metrics(at_s, self._rank, (), (), {}, skipped)

    def _pop_ready(self, limit: int, deadline: float) -> list[Point]:
        """Return at most ``limit`` points from the front of the queue, whose values are computed."""
        popped: list[Point] = []
        while self._taken and len(popped) < limit:
            while not points.is_computed(self._taken[0][3]):
                if time.monotonic() > deadline:
                    return popped
                time.sleep(0.001)
            popped.append(self._taken.popleft())
        return popped
