"""Outputs of a rank below the notebook's cell: they wait here until the reporter sends them.

Code on a rank may display faster than a front end can draw: Jupyter's server drops all output of a kernel
above 1 MB a second, errors included. So a rank sends at a limited rate. Meanwhile an update replaces an
earlier one that waits, and ``clear_output`` removes what it would clear: an animation skips frames instead of
falling behind.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.display_marks import mark
from hydrogen_magic.core.units import size_text
from hydrogen_magic.node.worker import standard_streams

MOST_BYTES = 2_000_000
"""Of one display: Jupyter's server drops larger messages, at its default limits."""
_PER_S = 750_000.0
"""Bytes of all ranks; the rest of the server's limit is for the live view."""
_BURST = 2_000_000.0
_WAITING_BYTES = 6_000_000
_PAGE_BYTES = 20_000_000
"""Displays since the last ``clear_output``: a notebook with more of them opens slowly."""
_PAGE_DISPLAYS = 1000
_DRAIN_S = 30.0
"""More than it takes to send ``_PAGE_BYTES``."""
_LEFT_OUT = "hydrogen_magic left out"
"""Id of the output that reports displays over the limits."""


def _write_to_stdout(data: bytes) -> None:
    with suppress(OSError):  # the user has closed it
        os.write(1, data)


class DisplayQueue:
    """Displays of this rank. Any thread may add, one thread takes.

    ``n_ranks`` ranks share the limits. ``clock`` returns seconds of a monotonic clock, ``write`` writes to
    stdout. ``earlier`` has the ids of what earlier cells of the session have displayed.
    """

    def __init__(
        self,
        rank: int,
        n_ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[bytes], object] = _write_to_stdout,
        earlier: Collection[str] = (),
    ) -> None:
        self._rank = rank
        self._label = f"rank {rank}" if n_ranks > 1 or rank else ""
        self._share = 1 / n_ranks
        self._clock = clock
        self._write = write
        self._level = _BURST * self._share
        self._filled_at = clock()
        self._waiting: deque[ev.Display] = deque()
        self._sizes: dict[str, int] = {}
        """Bytes of each output of the page, by id."""
        self.ids = set(earlier)
        """Of all displays of this process."""
        self._earlier = set(earlier)
        """Those of earlier cells alone."""
        self._n_left_out = 0
        self._mark = 0
        self._lock = threading.RLock()

    def show(self, data: Mapping[str, str], metadata: str = "", display_id: str = "") -> None:
        """Add an output to the page, after what the rank has printed."""
        standard_streams.flush()
        with self._lock:
            self.ids |= {display_id} - {""}
            self._earlier.discard(display_id)
            if not self._mark:  # those of an earlier attempt
                self.clear(wait=True)
            if self._waiting and self._waiting[-1].action == ev.CLEAR_LATER:
                self._begin_page(keep=self._waiting[-1])
            self._mark += 1
            self._add(self._event(ev.SHOW, data, metadata, display_id))
            place = self._mark
        self._write(mark(place))

    def update(self, data: Mapping[str, str], metadata: str, display_id: str) -> None:
        """Replace the data of all outputs with this id; those of an earlier cell by a new output."""
        with self._lock:
            if display_id in self._sizes:
                self._add(self._event(ev.UPDATE, data, metadata, display_id))
            elif display_id in self._earlier:
                self.show(data, metadata, display_id)

    def clear(self, *, wait: bool) -> None:
        """Remove the page's outputs; with ``wait`` when the next one is shown."""
        with self._lock:
            if not wait:
                self._begin_page()
            elif self._waiting and self._waiting[-1].action == ev.CLEAR_LATER:
                return
            self._waiting.append(self._event(ev.CLEAR_LATER if wait else ev.CLEAR))

    def take(self, at_s: float, *, is_last: bool = False) -> Iterator[ev.Display]:
        """Yield what may be sent now, oldest first; if ``is_last``, count the others as not shown."""
        with self._lock:
            now = self._clock()
            grown = self._level + (now - self._filled_at) * _PER_S * self._share
            self._level, self._filled_at = min(_BURST * self._share, grown), now
            while self._waiting and self._may_send(self._waiting[0].size_bytes):
                event = self._waiting.popleft()
                self._level -= event.size_bytes
                yield replace(event, at_s=at_s)
            if is_last and self._waiting:
                self._leave_out_waiting()
                yield from (replace(event, at_s=at_s) for event in self._waiting)
                self._waiting.clear()

    def drain(self) -> None:
        """Wait until all displays are sent."""
        deadline = time.monotonic() + _DRAIN_S
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.02)

    def _may_send(self, size: int) -> bool:
        return self._level >= min(size, _BURST * self._share)

    def _event(
        self, action: str, data: Mapping[str, str] | None = None, metadata: str = "", name: str = ""
    ) -> ev.Display:
        label = self._label if action == ev.SHOW else ""
        return ev.Display(0.0, self._rank, self._mark, action, data or {}, metadata, name, label)

    def _begin_page(self, keep: ev.Display | None = None) -> None:
        """Forget outputs that would be removed before a page shows them."""
        self._waiting.clear()
        if keep is not None:
            self._waiting.append(keep)
        self._sizes.clear()
        self._n_left_out = 0

    def _add(self, event: ev.Display) -> None:
        name = event.display_id or f"place {event.mark}"
        self._drop_older(event)
        if not self._fits(name, event.size_bytes):
            self._leave_out()
            return
        self._sizes[name] = event.size_bytes
        self._waiting.append(event)

    def _drop_older(self, event: ev.Display) -> None:
        """Remove waiting updates that ``event`` replaces."""
        if event.action == ev.UPDATE:
            self._waiting = deque(
                other
                for other in self._waiting
                if (other.action, other.display_id) != (ev.UPDATE, event.display_id)
            )

    def _fits(self, name: str, size: int) -> bool:
        others = sum(self._sizes.values()) - self._sizes.get(name, 0)
        n_others = len(self._sizes) - (name in self._sizes)
        waiting = sum(event.size_bytes for event in self._waiting)
        return (
            others + size <= _PAGE_BYTES * self._share
            and n_others < max(1, _PAGE_DISPLAYS * self._share)
            and waiting + size <= max(MOST_BYTES, _WAITING_BYTES * self._share)
        )

    def _leave_out_waiting(self) -> None:
        """Replace the displays that wait by their number."""
        kept = [event for event in self._waiting if not event.data or event.display_id == _LEFT_OUT]
        n = len(self._waiting) - len(kept)
        self._waiting = deque(kept)
        if n:
            self._leave_out(n)

    def _leave_out(self, n: int = 1) -> None:
        """Count ``n`` more displays as not shown, in an output of its own."""
        self._n_left_out += n
        action = ev.UPDATE if _LEFT_OUT in self._sizes else ev.SHOW
        limits = f"{_PAGE_DISPLAYS:,} displays, {size_text(_PAGE_BYTES)}"
        text = (
            f"{self._n_left_out:,} more not shown: a cell shows at most {limits}, "
            "and not more than a front end can draw in time; clear_output() makes space"
        )
        event = self._event(action, {"text/plain": text}, name=_LEFT_OUT)
        self._drop_older(event)
        self._sizes[_LEFT_OUT] = 0
        self._waiting.append(event)
