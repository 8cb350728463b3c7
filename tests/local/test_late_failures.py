"""What ranks report after it is known which of them failed."""

from __future__ import annotations

import asyncio

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements import AgentGroup, Attempt, EventSink
from hydrogen_magic.driver.placements.local import LocalPlacement
from tests import plain_ranks
from tests.gangs import PATIENCE_S, ended

TIMED_OUT = ev.ErrorReport(
    "RuntimeError", "Timed out waiting 10000ms for recv operation to complete"
)
"""Of Gloo: another rank may be the culprit, and is looked for."""


class ScriptedAgentGroup(AgentGroup):
    """Rank 0 waits in vain for rank 1. Its process exits while the stacks of both are written."""

    def __init__(self) -> None:
        self._has_asked = asyncio.Event()
        self._is_stopped = asyncio.Event()

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        now_s = attempt.job.now_s
        for rank in (0, 1):
            sink.emit(ev.RankStarted(now_s(), rank, 1 + rank, "here", "cpu"))
            sink.emit(ev.RankPhase(now_s(), rank, "running"))
        sink.emit(ev.RankFailed(now_s(), 0, TIMED_OUT, "running"))
        await asyncio.wait_for(self._has_asked.wait(), PATIENCE_S)
        sink.emit(ev.RankExited(now_s(), 0, 1))
        await asyncio.wait_for(self._is_stopped.wait(), PATIENCE_S)
        sink.emit(ev.RankExited(now_s(), 1, None, "SIGKILL", asked=True))

    def stop(self) -> None:
        self._is_stopped.set()

    def kill(self) -> None:
        self.stop()

    def send(self, command: msg.AgentCommand) -> None:
        if isinstance(command, msg.ReportStacks):
            self._has_asked.set()

    async def release(self) -> None:
        """Nothing is kept."""


def test_a_rank_that_exits_while_the_gang_is_ended_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(placement: LocalPlacement, spec: JobSpec) -> AgentGroup:
        return ScriptedAgentGroup()

    monkeypatch.setattr(LocalPlacement, "open", opened)
    gang = ended(hm.launch(plain_ranks.rank, np=2))
    orders = [event.reason for event in gang.events() if isinstance(event, ev.StopRequested)]
    assert (gang.state, gang.snapshot().culprit, orders) == ("FAILED", 1, ["failure"])
