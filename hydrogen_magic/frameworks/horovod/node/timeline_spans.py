"""Converts Horovod's events into spans for display: the activity of its coordinator over time.

Hundreds of tensors are negotiated and reduced at once. Drawn one by one, they would hide each other.
Instead, the spans show the coordinator's activity: the outer ones whether it reduced or, without a
reduction, negotiated; the inner ones the activity of the reduction, and in negotiations with this
information the rank that the others waited for. So the outer spans never overlap, and their times add up.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydrogen_magic.frameworks.horovod.node.timeline_file import Event

Span = tuple[str, int, int, int]
"""Name, start and end in microseconds of the timeline, depth."""

_NEGOTIATE = "negotiate"
_GAP_US = 50
"""Closer intervals of one name are merged: tensors that are fused arrive one by one."""
_LATE_US = 1000
"""Horovod's default cycle: ranks in step are ready within one."""
_LONG_US = 500_000
"""Longer intervals are reported in pieces, so that they are visible while they last."""
_SILENT_US = 200_000
"""After this time, the newest event counts as the last one for now."""


class SpanBuilder:
    """Processes events in the order in which they were written."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._open: dict[bytes, list[str]] = {}
        """Tensor -> its open activities, outermost first."""
        self._ready: dict[bytes, tuple[int, int, int]] = {}
        """Tensor -> when the last but one rank was ready, when the last one was, and which that was."""
        self._outer = _SpanRow(0)
        self._inner = _SpanRow(1)
        self._late: dict[int, tuple[int, int]] = {}
        """Rank -> interval in which the others waited for it."""
        self._waits: list[Span] = []
        self.latest_us = 0
        """Time of the newest event."""

    def take(self, events: Iterable[Event]) -> None:
        """Process an event. There are thousands a second: most only change a count."""
        at = b"0"
        opened, names = self._open, self._names
        outer, inner = self._outer, self._inner
        for phase, name, at, tensor in events:
            stack = opened.get(tensor)
            if phase == b"B":
                words = names.get(name) or self._named(name)
                if stack:
                    row = inner
                    stack.append(words)
                else:
                    row = outer
                    opened[tensor] = [words]
                if words in row.counts:
                    row.counts[words] += 1
                else:
                    row.begin(words, int(at))
            elif not stack:
                continue  # it began before the timeline did, or is not about a tensor
            elif phase == b"E":
                words = stack.pop()
                row = inner if stack else outer
                if row.counts[words] > 1:
                    row.counts[words] -= 1
                else:
                    row.end(words, int(at))
                if not stack:
                    del opened[tensor]
                    if self._ready or self._late:
                        self._note_late(tensor)
            elif phase == b"X":
                self._note_ready(tensor, name, int(at))
        self.latest_us = max(self.latest_us, int(at))

    def cut_long(self, now_us: int | None) -> None:
        """Report activities in progress, if known; ``now_us``: None while events are read late.

        The released writer writes an event together with the next one, which may take as long as a step. So
        a reduction without an activity and without new events has ended: only its end event is missing.
        """
        known_us = self.latest_us
        is_negotiating = self._outer.current.startswith(_NEGOTIATE)
        if now_us is not None and is_negotiating:
            known_us = max(now_us, known_us)
        self._outer.cut(known_us, _LONG_US)
        self._inner.cut(self.latest_us, _LONG_US)
        is_silent = now_us is not None and now_us - self.latest_us > _SILENT_US
        if is_silent and not is_negotiating and not self._inner.current:
            self._outer.cut(self.latest_us)

    def drain(self) -> list[Span]:
        """Return the spans that ended since the last call."""
        spans = [*self._waits, *self._inner.drain(), *self._outer.drain()]
        self._waits = []
        return spans

    # ── events ──

    def _note_ready(self, tensor: bytes, rank: bytes, ts_us: int) -> None:
        before = self._ready.get(tensor, (ts_us, ts_us, -1))
        self._ready[tensor] = (before[1], ts_us, int(rank))

    def _note_late(self, tensor: bytes) -> None:
        """All activities of a tensor have ended: report the rank it waited for, once none is negotiated."""
        start_us, end_us, rank = self._ready.pop(tensor, (0, 0, -1))
        if end_us - start_us >= _LATE_US:
            known = self._late.get(rank, (start_us, end_us))
            self._late[rank] = (min(known[0], start_us), max(known[1], end_us))
        if self._late and not self._outer.is_open(_NEGOTIATE):
            self._report_late()

    def _report_late(self) -> None:
        for rank, (start_us, end_us) in self._late.items():
            self._waits.append((f"waiting for rank {rank}", start_us, end_us, 1))
        self._late.clear()

    def _named(self, written: bytes) -> str:
        """Return the display text of a name: ``negotiate allreduce``, ``memcpy in fusion buffer``."""
        self._names[written] = written.decode().replace("_", " ").lower()
        return self._names[written]


class _SpanRow:
    """Consecutive spans of one depth: the most informative of the open activities.

    That is the last one to begin, with negotiations only if nothing else is open.
    """

    def __init__(self, depth: int) -> None:
        self.counts: dict[str, int] = {}
        """Name -> number of tensors for which it is open; the last one to begin comes last."""
        self.current = ""
        self._depth = depth
        self._since_us = 0
        self._is_cut = False
        """The part before :attr:`_since_us` has been reported."""
        self._done: list[Span] = []

    def begin(self, name: str, ts_us: int) -> None:
        """Open it for the first tensor."""
        self.counts[name] = 1
        self._choose(ts_us)

    def end(self, name: str, ts_us: int) -> None:
        """Close it for the last one."""
        del self.counts[name]
        self._choose(ts_us)

    def is_open(self, beginning: str) -> bool:
        return any(name.startswith(beginning) for name in self.counts)

    def _choose(self, ts_us: int) -> None:
        names = list(self.counts)
        others = [name for name in names if not name.startswith(_NEGOTIATE)]
        chosen = (others or names or [""])[-1]
        if chosen != self.current:
            self._close(ts_us)
            self.current = chosen
            self._since_us = max(ts_us, self._since_us)
            self._is_cut = False

    def _close(self, ts_us: int) -> None:
        least_us = _GAP_US if self._is_cut else 0
        if not self.current or ts_us < self._since_us + least_us:
            return
        last = self._done[-1] if self._done else None
        start_us = self._since_us
        if last is not None and last[0] == self.current and start_us - last[2] < _GAP_US:
            self._done.pop()
            start_us = last[1]
        self._done.append((self.current, start_us, ts_us, self._depth))
        self._since_us = ts_us

    def cut(self, at_us: int, least_us: int = 0) -> None:
        """End the reported span, and begin it again, if it is longer than ``least_us``."""
        if at_us - self._since_us > least_us:
            self._close(at_us)
            self._is_cut = True

    def drain(self) -> list[Span]:
        done, self._done = self._done, []
        return done
