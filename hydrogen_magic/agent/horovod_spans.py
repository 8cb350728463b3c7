"""Horovod's events put together as spans that can be looked at: what its coordinator did when.

Hundreds of tensors are negotiated and reduced at once. Drawn one by one they would hide each other; what
is drawn is what the coordinator was at: outside, whether it reduced or, while there was nothing to reduce,
negotiated; inside, the activity of the reduction, and in negotiations that tell of it which rank the others
waited for. So the outer spans never overlap, and their times add up.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydrogen_magic.agent.horovod_events import Event

__all__ = ["Span", "Weaver"]

Span = tuple[str, int, int, int]
"""Name, start and end in microseconds of the timeline, depth."""

_NEGOTIATE = "negotiate"
_GAP_US = 50
"""Stretches of one name that lie closer are one: what is fused in one go comes tensor by tensor."""
_LATE_US = 1000
"""Horovod's default cycle: ranks that are in step come within one."""
_LONG_US = 500_000
"""What goes on for longer is told in pieces: it must be seen while it goes on."""
_SILENT_US = 200_000
"""After so long the newest event is taken for the last one for now."""
_MOST_NAMES = 64
"""Horovod has some forty; a name more costs the view one for good."""
_MOST_OPEN = 1 << 16
"""Tensors under way at once, of which a damaged file could leave more and more."""


class Weaver:
    """Takes events in the order in which they were written."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._open: dict[int, list[str]] = {}
        """Tensor -> what was begun for it and has not ended, outermost first."""
        self._ready: dict[int, tuple[int, int, int]] = {}
        """Tensor -> when the last but one rank was ready, when the last, and which that was."""
        self._outer = _Row(0)
        self._inner = _Row(1)
        self._late: dict[int, tuple[int, int]] = {}
        """Rank -> from when until when the others waited for it."""
        self._waits: list[Span] = []
        self.latest_us = 0
        """Time of the newest event."""

    def take(self, events: Iterable[Event]) -> None:
        """Take note of what happened."""
        for phase, name, ts_us, tensor in events:
            if ts_us > self.latest_us:
                self.latest_us = ts_us
            if phase == b"E":
                self._end(tensor, ts_us)
            elif phase == b"B":
                self._begin(tensor, self._names.get(name or b"") or self._named(name or b""), ts_us)
            elif phase == b"X":
                self._note_ready(tensor, name or b"", ts_us)

    def cut_long(self, now_us: int | None) -> None:
        """Tell what goes on, as far as it is known; ``now_us``: None while events are read late.

        An event reaches the file with the one after it, which may take as long as a step. So a reduction
        without an activity, of which nothing more is heard, has ended: only that event is missing.
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
        """Return what has ended since last time."""
        spans = [*self._waits, *self._inner.drain(), *self._outer.drain()]
        self._waits = []
        return spans

    def forget(self) -> None:
        """Events are missing: nothing is known of what was under way."""
        self._open.clear()
        self._ready.clear()
        self._late.clear()
        self._outer.forget()
        self._inner.forget()

    # ── events ──

    def _begin(self, tensor: int, name: str, ts_us: int) -> None:
        stack = self._open.get(tensor)
        if stack:
            stack.append(name)
            self._inner.begin(name, ts_us)
            return
        if len(self._open) >= _MOST_OPEN:
            self.forget()
        self._open[tensor] = [name]
        self._outer.begin(name, ts_us)

    def _end(self, tensor: int, ts_us: int) -> None:
        stack = self._open.get(tensor)
        if not stack:
            return  # it began before the timeline did
        name = stack.pop()
        if stack:
            self._inner.end(name, ts_us)
            return
        del self._open[tensor]
        if tensor in self._ready:
            self._note_late(*self._ready.pop(tensor))
        self._outer.end(name, ts_us)
        if self._late and not self._outer.is_open(_NEGOTIATE):
            self._tell_late()

    def _note_ready(self, tensor: int, rank: bytes, ts_us: int) -> None:
        if tensor in self._open and rank.isdigit():
            before = self._ready.get(tensor, (ts_us, ts_us, -1))
            self._ready[tensor] = (before[1], ts_us, int(rank))

    def _note_late(self, start_us: int, end_us: int, rank: int) -> None:
        if end_us - start_us < _LATE_US:
            return
        known = self._late.get(rank, (start_us, end_us))
        self._late[rank] = (min(known[0], start_us), max(known[1], end_us))

    def _tell_late(self) -> None:
        for rank, (start_us, end_us) in self._late.items():
            self._waits.append((self._named(b"waiting for rank %d" % rank), start_us, end_us, 1))
        self._late.clear()

    def _named(self, written: bytes) -> str:
        """Return the words for a name: ``negotiate allreduce``, ``memcpy in fusion buffer``."""
        if written not in self._names:
            if len(self._names) >= _MOST_NAMES:
                return "other"
            words = written.decode("utf-8", "replace").replace("_", " ").lower()
            self._names[written] = words or "?"
        return self._names[written]


class _Row:
    """Spans of one depth, one after the other: of what is open the one that tells most.

    That is what began last, and negotiating only while nothing else is open.
    """

    def __init__(self, depth: int) -> None:
        self.current = ""
        self._depth = depth
        self._since_us = 0
        self._is_cut = False
        """The part before :attr:`_since_us` has been told."""
        self._counts: dict[str, int] = {}
        """Name -> for how many tensors it is open; what began last comes last."""
        self._done: list[Span] = []

    def begin(self, name: str, ts_us: int) -> None:
        n_open = self._counts.get(name, 0)
        self._counts[name] = n_open + 1
        if n_open == 0:
            self._choose(ts_us)

    def end(self, name: str, ts_us: int) -> None:
        n_open = self._counts.get(name, 0) - 1
        if n_open > 0:
            self._counts[name] = n_open
        elif n_open == 0:
            del self._counts[name]
            self._choose(ts_us)

    def is_open(self, beginning: str) -> bool:
        return any(name.startswith(beginning) for name in self._counts)

    def _choose(self, ts_us: int) -> None:
        names = list(self._counts)
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
        """End what is told, and begin it again, where that is longer than ``least_us``."""
        if at_us - self._since_us > least_us:
            self._close(at_us)
            self._is_cut = True

    def drain(self) -> list[Span]:
        done, self._done = self._done, []
        return done

    def forget(self) -> None:
        self._counts.clear()
        self.current = ""
