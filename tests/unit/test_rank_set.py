"""The ranks of one attempt on a host."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.core.messages import RankEvents, WorkerCommand
from hydrogen_magic.node.agent import rank_set
from hydrogen_magic.node.agent.attempt_reporter import AttemptReporter
from hydrogen_magic.node.agent.child_exit import ChildExit
from hydrogen_magic.node.agent.output_limits import RankLog
from hydrogen_magic.node.agent.pooled_worker import PooledWorker
from hydrogen_magic.node.agent.rank_process import RankProcess
from hydrogen_magic.node.agent.rank_set import RankSet
from hydrogen_magic.node.agent.rank_starter import RankStarter
from hydrogen_magic.node.agent.worker_pool import WorkerPool
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport import framing
from tests.open_files import open_files


class DeafRank:
    """Takes the place of a rank that only SIGKILL ends."""

    rank = 0
    exited = False
    on_retained: Callable[[], None]

    def __init__(self, has_reacted: bool) -> None:
        self.has_reacted = has_reacted
        self.signals: list[int] = []

    def send(self, command: WorkerCommand) -> None:
        """It reads nothing."""

    def signal(self, signum: int) -> None:
        self.signals.append(signum)
        self.exited = signum == signal.SIGKILL


@pytest.mark.parametrize("has_reacted", [False, True])
def test_a_rank_that_handles_signals_is_killed_in_the_end(
    has_reacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr(rank_set, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    deaf: Any = DeafRank(has_reacted)
    ranks = RankSet()
    ranks.add(deaf)
    asyncio.run(ranks.end(grace_s=2.0))
    assert deaf.signals == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


def test_a_rank_of_a_session_that_does_not_return_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_REACTION_S", "GIVE_UP_S"):
        monkeypatch.setattr(rank_set, name, 0.0)
    deaf: Any = DeafRank(has_reacted=True)
    ranks = RankSet()
    ranks.add(deaf)
    asyncio.run(ranks.end_cell(grace_s=0.0))
    assert deaf.signals == [signal.SIGINT, signal.SIGKILL]


def test_ending_the_cell_of_no_ranks_takes_no_grace() -> None:
    """A Stop may come before the first rank of a session's cell has started."""
    asyncio.run(asyncio.wait_for(RankSet().end_cell(grace_s=1000.0), 20.0))


def new_worker(pid: int = 0) -> PooledWorker:
    """Return a worker without a process."""
    worker, theirs = PooledWorker.create()
    framing.close_all(theirs)
    worker.pid = pid
    return worker


def test_the_exit_of_an_earlier_process_is_not_that_of_a_rank_with_its_pid() -> None:
    pool = WorkerPool(kernel=-1)
    pool.forget(7, ChildExit(signal.SIGKILL))
    workers = [new_worker(pid=7) for _ in range(2)]
    assert pool.take_exit(workers[0]) is None
    pool.forget(7, ChildExit(signal.SIGTERM))
    assert pool.take_exit(workers[1]) == ChildExit(signal.SIGTERM)
    for worker in workers:
        worker.close()


def test_an_event_that_a_rank_may_not_report_is_refused_with_a_warning(tmp_path: Path) -> None:
    emitted: list[ev.Event] = []
    own, foreign = ev.Steps(1.0, 0, 5), ev.Steps(1.0, 1, 5)
    of_the_gang = ev.Recording(1.0, True)

    async def read() -> None:
        worker, theirs = PooledWorker.create()
        reporter = AttemptReporter(0.0, Mask(), emitted.append, Mock())
        process = RankProcess(0, worker, RankLog(str(tmp_path / "log")), reporter)
        for _ in range(2):
            events = tuple(map(ev.encode, (own, foreign, of_the_gang)))
            with socket.socket(fileno=os.dup(theirs[0])) as end:
                framing.send(end, RankEvents(events))
        process._read_control()
        process.close(is_retained=False)
        framing.close_all(theirs)

    asyncio.run(read())
    notices = [event.text for event in emitted if isinstance(event, ev.Notice)]
    assert [event for event in emitted if not isinstance(event, ev.Notice)] == [own, own]
    assert [text.partition(" is ignored")[0] for text in notices] == [
        "rank 0: Steps of rank 1",
        "rank 0: Recording of the gang",
    ]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_workers_that_run_no_rank_are_closed(is_stopped: bool) -> None:
    """After a Stop before the rendezvous is served, or after an error at the start of rank 1 of 4."""
    before = open_files()
    launched: list[int] = []
    began = asyncio.Event()

    async def begin() -> None:
        began.set()
        if is_stopped:
            await asyncio.Future()

    def launch(rank: Any, worker: PooledWorker, fds: Any) -> None:
        launched.append(rank.rank)
        worker.close()
        if rank.rank == 1:
            raise OSError("no space left on device")

    async def start() -> None:
        request: Any = Mock(ranks=[SimpleNamespace(rank=n) for n in range(4)], preload=())
        request.options.session = None
        pool: Any = Mock(take=AsyncMock(return_value=[new_worker() for _ in range(4)]))
        retained: Any = Mock(holds=lambda *_: False)
        service: Any = Mock(begin=begin)
        starter = RankStarter(request, pool, retained, service, Mock(), launch)
        running = asyncio.ensure_future(starter.run([memory_file("closure")]))
        await began.wait()
        if is_stopped:
            starter.cancel()
        assert (await running is None) == is_stopped
        assert launched == ([] if is_stopped else [0, 1])

    asyncio.run(start())
    assert open_files() <= before
