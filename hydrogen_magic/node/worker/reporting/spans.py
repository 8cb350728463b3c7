"""Spans of a rank: their nesting, and their columns in events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.reporting.send_interval import TICK_S

LONGEST_NAME = 200
"""Characters: more than a view draws, and thousands of them still make a small message."""

_MOST = 1 << 15
"""Number of spans kept; a span holds the GIL for microseconds, so this is also some tenths of a second."""
_SEND_S = 0.2
"""How often they are sent: processing them takes CPU time from ranks. If a rank is killed, the spans of
this last interval are lost."""
_Span = tuple[str, int, int, int, str]
"""Name, start, end (nanoseconds on the gang's clock), depth, track."""


class _Depth(threading.local):
    spans = 0
    """Number of open ``hm.span`` blocks on this thread."""


depth = _Depth()


class SpanQueue:
    """Spans of one rank that wait to be sent: any thread may add, one takes.

    Bounded: if they are not taken, the oldest are dropped, and their number is reported.
    """

    def __init__(self) -> None:
        self._waiting: deque[_Span] = deque(maxlen=_MOST)
        self._n_dropped = 0
        self._due_s = 0.0

    def add(self, name: str, start_ns: int, end_ns: int, depth: int, track: str) -> None:
        """Add one; times are nanoseconds on the gang's clock."""
        if len(self._waiting) == self._waiting.maxlen:
            self._n_dropped += 1
        self._waiting.append((name, start_ns, end_ns, depth, track))

    def is_half_full(self) -> bool:
        """Return whether they should be sent urgently."""
        return len(self._waiting) > _MOST // 2

    def is_due(self, at_s: float) -> bool:
        """Return whether they should be sent now."""
        return at_s >= self._due_s or self.is_half_full()

    def take(self, at_s: float, rank: int) -> Iterator[ev.Spans]:
        """Yield waiting spans, one event for each track; the first one has the number of dropped spans."""
        self._due_s = at_s + _SEND_S - TICK_S / 2  # otherwise a tick that comes early is missed
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        skipped, self._n_dropped = self._n_dropped, 0
        tracks: dict[str, list[_Span]] = {ev.SPANS: []} if skipped else {}
        for span in taken:
            tracks.setdefault(span[4], []).append(span)
        for track, own in tracks.items():
            names, starts_ns, ends_ns, depths, _ = zip(*own, strict=True) if own else ((),) * 5
            names = tuple(name[:LONGEST_NAME] for name in names)
            yield ev.Spans(at_s, rank, names, starts_ns, ends_ns, depths, skipped, track)
            skipped = 0
