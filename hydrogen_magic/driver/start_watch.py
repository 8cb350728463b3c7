"""Fails the ranks that do not start in time: they do not reach the cell, or not the initial collective."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.placements import Job
from hydrogen_magic.driver.state.culprit import PartialCollective, late_to_join
from hydrogen_magic.driver.state.formatting import ranks_text
from hydrogen_magic.driver.state.gang_state import RankState

START_PHASES = ("waiting", "starting", "loading")
"""Phases of a rank that has not loaded the closure yet."""
_CHECK_S = 0.5


@dataclass(frozen=True)
class StartWatch:
    """Watches one attempt, until its end or until it has failed ranks."""

    run: GangRun
    job: Job
    on_event: Callable[[ev.Event], None]
    """Receives the failures of the ranks."""

    async def watch(self) -> None:
        """Watch until cancelled, or until nothing is left to watch."""
        await asyncio.gather(self._watch_start(), self._watch_rendezvous())

    async def _watch_start(self) -> None:
        """Fail the ranks that do not reach the first line of the cell in time.

        While the attempt waits for slots, or for data to reach its hosts, there are no ranks. While bytes of
        the closure arrive, a slow line is not their fault.
        """
        began_s, sent_bytes = self.job.now_s(), 0
        limit_s = self.job.spec.start_timeout_s
        while True:
            await asyncio.sleep(_CHECK_S)
            state = self.run.state
            is_bringing_data = state.closure is not None and state.closure.what == ev.DATA
            if state.queued is not None or is_bringing_data:
                began_s = self.job.now_s()
                continue
            if state.closure is not None and state.closure.sent_bytes > sent_bytes:
                began_s, sent_bytes = state.closure.at_s, state.closure.sent_bytes
            late = [rank for rank in state.ranks if rank.phase in START_PHASES]
            if not late:
                return
            if self.job.now_s() - began_s > limit_s:
                self._fail_late(late, limit_s)
                return

    def _fail_late(self, late: Sequence[RankState], limit_s: float) -> None:
        for rank in late:
            doing = rank.detail or rank.phase
            text = f"did not reach the cell within {limit_s:g} s (start_timeout): {doing}"
            self._fail(rank, "StartTimeout", text)

    async def _watch_rendezvous(self) -> None:
        """Fail the ranks that do not enter the initial collective while the others wait there."""
        init_collective = self.job.rendezvous.init_collective
        limit_s = self.job.rendezvous.join_timeout_s(self.job.spec)
        while init_collective:
            await asyncio.sleep(_CHECK_S)
            found = late_to_join(self.run.state, init_collective, limit_s, self.job.now_s())
            if found is not None:
                self._fail_outside(found, limit_s)
                return

    def _fail_outside(self, found: PartialCollective, limit_s: float) -> None:
        text = (
            f"{ranks_text(found.outside)} did not enter {found.collective} within {limit_s:g} s, "
            f"while {ranks_text(found.waiting)} waited there (start_timeout)"
        )
        for number in found.outside:
            rank = self.run.state.ranks[number]
            why = "; its process is stopped (SIGSTOP)" if rank.process_state == "T" else ""
            self._fail(rank, "RendezvousTimeout", f"{text}{why}")

    def _fail(self, rank: RankState, kind: str, text: str) -> None:
        report = ev.ErrorReport(kind, text)
        self.on_event(ev.RankFailed(self.job.now_s(), rank.rank, report, rank.phase))
