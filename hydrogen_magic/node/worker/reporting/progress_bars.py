"""The progress bars of a rank: only the latest state of each is sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import as_float
from hydrogen_magic.node.worker.reporting.spans import LONGEST_NAME

_numbers = itertools.count()
"""Of all bars of this process: one of an earlier cell of a session may still be updated, or close."""
_MAX_CLOSED_BARS = 256
"""Bars that opened and closed before they were sent; a loop of short inner bars makes thousands a second."""


class ProgressBars:
    """States of bars that wait to be sent: any thread may update, one takes."""

    def __init__(self, rank: int, now_s: Callable[[], float]) -> None:
        self._rank = rank
        self._now_s = now_s
        self._waiting: dict[int, ev.Progress] = {}
        self._sent: set[int] = set()
        """Open bars of which a state was sent."""

    def new(self) -> int:
        """Return the number of a new bar."""
        return next(_numbers)

    def update(
        self,
        bar: int,
        desc: str,
        n: float,
        total: float | None,
        unit: str = "it",
        closed: bool = False,
    ) -> None:
        """Set the state of a bar."""
        at_s, total = self._now_s(), None if total is None else as_float(total)
        desc, unit = desc[:LONGEST_NAME], unit[:LONGEST_NAME]
        if closed:  # after the bars inside of it, whose ends come before its own
            self._waiting.pop(bar, None)
        self._waiting[bar] = ev.Progress(
            at_s, self._rank, bar, desc, as_float(n), total, unit, closed
        )
        if closed and len(self._waiting) > _MAX_CLOSED_BARS:
            self._drop_unsent()

    def take(self) -> Iterator[ev.Progress]:
        """Yield the states that changed since the last call."""
        for bar in list(self._waiting):
            state = self._waiting.pop(bar, None)
            if state is None:
                continue  # the main thread has dropped it meanwhile
            if state.closed:
                self._sent.discard(bar)
            else:
                self._sent.add(bar)
            yield state

    def _drop_unsent(self) -> None:
        """Drop the older half of the bars that opened and closed before they were sent."""
        waiting = list(self._waiting.items())
        unsent = [bar for bar, state in waiting if state.closed and bar not in self._sent]
        for bar in unsent[: len(unsent) // 2]:
            self._waiting.pop(bar, None)
