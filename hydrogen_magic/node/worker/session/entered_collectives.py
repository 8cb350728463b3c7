"""How many collectives a rank of a session has entered in its cell, for its peers.

A rank that has ended its cell keeps its connections: nothing else tells that it will not enter a collective
in which others wait. Only the default group counts, of which all ranks are members.
"""

from __future__ import annotations

import sys
import threading

from hydrogen_magic.core.events import CollectivesEntered
from hydrogen_magic.node.worker.reporting.reporter import Reporter
from hydrogen_magic.node.worker.session.group_recovery import ProcessGroups

_STUCK_S = 1.0
"""Users perceive a second as waiting."""


class EnteredCollectives:
    """Those of one cell; :meth:`poll` is called on another thread, all else on the main one."""

    def __init__(self, reporter: Reporter, groups: ProcessGroups) -> None:
        self._reporter = reporter
        self._groups = groups
        self._before: int | None = None
        """Their number at the start of the cell, None while no cell runs."""
        self._reported = 0
        self._place = (0, 0)
        """Where the main thread is."""
        self._since_s = 0.0

    def begin(self) -> None:
        """The cell begins."""
        self._before = self._groups.n_entered(0.0)

    def count(self) -> int:
        """Return how many this rank has entered in the cell; 0 while none runs, or if unknown."""
        return 0 if self._before is None else self._groups.n_entered(0.0) - self._before

    def poll(self) -> None:
        """Report the number of a rank that is stuck, if it is new.

        Groups are only touched then: the main thread does not free one meanwhile.
        """
        now_s = self._reporter.now_s()
        place = _place_of_main_thread()
        if place != self._place:
            self._place, self._since_s = place, now_s
        before = self._before  # the main thread may end the cell meanwhile
        if before is None or now_s - self._since_s < _STUCK_S:
            return
        self._since_s = now_s
        count = self._groups.n_entered(self._waited_s(now_s)) - before
        if self._before is None or count <= self._reported:
            return
        self._reported = count
        self._reporter.report(CollectivesEntered(now_s, self._reporter.rank, count))

    def _waited_s(self, now_s: float) -> float:
        """Return how long this rank has been in a collective."""
        current = self._reporter.collectives.current
        return 0.0 if current is None else now_s - current.start_ns / 1e9

    def end(self) -> None:
        """Report the final number, unless this rank has left the group."""
        count, before, self._before = self.count(), self._before, None
        if before is None or self._groups.are_released or not self._groups.is_joined():
            return
        now_s, rank = self._reporter.now_s(), self._reporter.rank
        self._reporter.report(CollectivesEntered(now_s, rank, count, is_final=True))


def _place_of_main_thread() -> tuple[int, int]:
    """Return the frame and the instruction; both stay while it waits in a call of C code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)
