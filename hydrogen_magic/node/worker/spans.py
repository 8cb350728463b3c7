"""Stretches of time on a rank: how deep they nest, and how they leave it as columns."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.metric_points import DroppedCounter
from hydrogen_magic.node.worker.send_interval import TICK_S

__all__ = ["LONGEST_NAME", "SpanQueue", "depth"]

LONGEST_NAME = 200
"""Characters: more than anybody draws, and thousands of them still make a small message."""

_MOST = 1 << 15
"""Kept; a span holds the GIL for microseconds, so this is also some tenths of a second."""
_SEND_S = 0.2
"""How often they are sent: whatever is at work on them takes cores from ranks. So much of its end is not seen
of a rank that is killed."""
_Span = tuple[int, str, int, int, int, str]
"""Number, name, start, end (nanoseconds on the gang's clock), depth, track."""


class _Depth(threading.local):
    spans = 0
    """How many are open on this thread, whoever opened them."""


depth = _Depth()


class SpanQueue:
    """Spans of one rank that wait to be sent: any thread may add, one takes.

    Bounded: the oldest go when nobody takes, and how many is told.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Span] = deque(maxlen=_MOST)
        self._numbers = itertools.count()
        self._seen = DroppedCounter()
        self._due_s = 0.0

    def add(self, name: str, start_ns: int, end_ns: int, depth: int, track: str) -> None:
        """Take one; times are nanoseconds on the gang's clock."""
        self._waiting.append((next(self._numbers), name, start_ns, end_ns, depth, track))

    def is_half_full(self) -> bool:
        """Tell whether it is high time to send them."""
        return len(self._waiting) > _MOST // 2

    def is_due(self, at_s: float) -> bool:
        """Tell whether they are to be sent now."""
        return at_s >= self._due_s or self.is_half_full()

    def take(self, at_s: float, rank: int) -> Iterator[ev.Spans]:
        """Yield what waits, one event for each track; what was dropped is told with the first."""
        self._due_s = at_s + _SEND_S - TICK_S / 2  # else a tick that comes early is missed
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for number, *_ in taken:
            self._seen.add(number)
        skipped = self._seen.skipped()
        tracks: dict[str, list[_Span]] = {ev.SPANS: []} if skipped else {}
        for span in taken:
            tracks.setdefault(span[5], []).append(span)
        for track, own in tracks.items():
            _, names, starts_ns, ends_ns, depths, _ = zip(*own, strict=True) if own else ((),) * 6
            names = tuple(name[:LONGEST_NAME] for name in names)
            yield ev.Spans(at_s, rank, names, starts_ns, ends_ns, depths, skipped, track)
            skipped = 0
