"""The controller of a gang: what follows from the events of its agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver import controller
from hydrogen_magic.driver.controller import GangController
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.placements import AgentLostError, Attempt, EventSink, Job
from hydrogen_magic.driver.rendezvous.torch import TorchRendezvous
from hydrogen_magic.serialization.result_stream import CELL_VALUE, NONE
from tests.records import launched

LOST = ev.ErrorReport("HostLost", "the agent on host a has not responded for 45 s")
NO_RESULT = "all ranks finished, but the result of rank 0 was lost on its way"


class LosingAgentGroup:
    """Two ranks finish; then rank 0's host is lost, in some attempts with the result of rank 0."""

    def __init__(self, attempts: Sequence[str]) -> None:
        """``attempts``: what happens in each."""
        self._attempts = attempts
        self.stop = self.kill = self.send = MagicMock()

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        what = self._attempts[attempt.number]
        if "result arrives" in what:
            sink.deliver(0, msg.ResultPart(CELL_VALUE), NONE)
        for rank in (0, 1):
            sink.emit(ev.RankResult(1.0, rank, NONE.nbytes))
            sink.emit(ev.RankExited(1.0, rank, 3 * ("rank 1 fails" in what and rank)))
        if "agent" in what:
            raise AgentLostError("the agent process exited unexpectedly")
        sink.emit(ev.RankFailed(2.0, 0, LOST, "running"))
        sink.emit(ev.RankExited(2.0, 0, None, "SIGKILL", True, "its host was lost"))

    async def release(self) -> None:
        """Nothing is kept."""


def made(agents: Any, spec: JobSpec, closure: Any) -> tuple[GangRun, Job, GangController]:
    """Return a gang that was launched, and its controller."""
    run = GangRun("g1", run_log.Record.create("g1", pytest.fail))
    run.emit(launched("g1"))
    folder = run.rank_logs.folder
    job = Job(spec, Plan(()), closure, (), (), TorchRendezvous(), folder, 0.0)
    return run, job, GangController(run, job, agents, MagicMock())


@pytest.mark.parametrize(
    ("attempts", "reason"),
    [
        (["lost"], f"{NO_RESULT}: {LOST.message}"),
        (["lost with its agent"], NO_RESULT),
        (["result arrives"], ""),
        (["result arrives, then the agent is lost"], ""),
        (["lost", "result arrives"], ""),
        (["result arrives, rank 1 fails", "lost"], f"{NO_RESULT}: {LOST.message}"),
    ],
)
def test_a_result_that_was_lost_with_its_host_fails_the_attempt(
    attempts: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the gang is retried, and keeps the checkpoint, which is all that is left."""

    async def at_once(work: Callable[[], None]) -> None:
        work()

    monkeypatch.setattr(controller, "_in_thread", at_once)
    spec = JobSpec(np=2, retries=len(attempts) - 1)
    run, job, controls = made(LosingAgentGroup(attempts), spec, MagicMock())
    job.checkpoints.mkdir()
    asyncio.run(controls.run())
    assert run.state.attempt == len(attempts) - 1
    assert run.state.state == ("FAILED" if reason else "SUCCEEDED")
    assert job.checkpoints.exists() == bool(reason)
    assert run.state.culprit is None, "no rank has failed"
    assert str(run.error() or "") == reason


@pytest.mark.parametrize(
    ("placement", "other", "is_freed"),
    [
        ("local", [ev.RankPhase(0.1, 1, "loading")], False),
        ("local", [ev.RankPhase(0.1, 1, "idle")], True),
        ("spark", [ev.RankPhase(0.1, 1, "idle")], False),  # its host may still be sent the closure
        ("spark", [ev.RankResult(0.1, 1, 4), ev.RankExited(0.1, 1, 0)], True),
    ],
)
def test_the_closure_is_freed_when_no_rank_will_load_it(
    placement: str, other: list[ev.Event], is_freed: bool
) -> None:
    closure = MagicMock()
    run, _, controls = made(MagicMock(), JobSpec(np=2, placement=placement), closure)
    for event in (*other, ev.RankPhase(0.2, 0, "loading")):
        run.emit(event)
    assert not closure.release.called
    controls._on_event(ev.RankPhase(0.3, 0, "running"))
    assert closure.release.called == is_freed
