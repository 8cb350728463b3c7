"""One launch request on this host: starts its ranks, reports health, carries out commands, cleans up."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import file_limit, processes
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.masking import Mask, secret_values
from hydrogen_magic.core.timeline_files import path_prefix
from hydrogen_magic.errors import RendezvousError
from hydrogen_magic.node.agent import rank_output
from hydrogen_magic.node.agent.attempt_reporter import AttemptReporter
from hydrogen_magic.node.agent.child_exit import ChildExit
from hydrogen_magic.node.agent.descendants import DescendantCleanup
from hydrogen_magic.node.agent.gpus import RankGpus
from hydrogen_magic.node.agent.output_limits import RankLog, TokenBucket
from hydrogen_magic.node.agent.pooled_worker import PooledWorker
from hydrogen_magic.node.agent.rank_process import RankProcess
from hydrogen_magic.node.agent.rank_set import RankSet
from hydrogen_magic.node.agent.rank_starter import RankStarter, preload_text
from hydrogen_magic.node.agent.rendezvous_service import RunningService
from hydrogen_magic.node.agent.timeline_following import follower_of
from hydrogen_magic.node.agent.worker_pool import WorkerPool
from hydrogen_magic.node.agent.worker_reuse import RetainedWorker, RetainedWorkers

_FLUSH_S = 0.05
"""Interval at which output is sent to the kernel: too short to be noticed."""
_HEALTH_S = 1.0


class RankGroup:
    """Runs the ranks of one :class:`~hydrogen_magic.core.messages.LaunchRequest`."""

    def __init__(
        self,
        request: msg.LaunchRequest,
        pool: WorkerPool,
        retained: RetainedWorkers,
        emit: Callable[[ev.Event], None],
        send_file: Callable[[int, msg.FileContent, int], None],
        service: RunningService | None,
    ) -> None:
        self.gang = request.gang
        self.attempt = request.attempt
        self.record_dir = request.record_dir
        mask = Mask((*request.secrets, *secret_values({**os.environ, **request.env})))
        self.reporter = AttemptReporter(request.clock_zero_s, mask, emit, send_file)
        self.timelines = follower_of(request.timeline, request.clock_zero_s, emit)
        """Timelines of the rendezvous library."""
        self.ranks = RankSet()
        self._request = request
        self._pool = pool
        self._retained = retained
        self.service = service
        """What it serves for the rendezvous."""
        self._starter = RankStarter(request, pool, retained, service, self.reporter, self._launch)
        self.cleanup = DescendantCleanup(self._keepers, self.reporter)
        self._gpus = RankGpus({rank.rank: rank.gpu for rank in request.ranks})
        self._is_recording = request.is_recording
        self._ending: asyncio.Task[None] | None = None
        self.is_retained = False
        """Its ranks wait for another gang."""

    @property
    def fed_ranks(self) -> Sequence[int]:
        """The ranks that receive data while they run."""
        is_fed = self._request.options.infer_options is not None
        return [launch.rank for launch in self._request.ranks] if is_fed else []

    @property
    def is_cancelled(self) -> bool:
        """Whether it was asked to end before its ranks were started."""
        return self._starter.is_cancelled

    async def run(self, fds: Sequence[int]) -> None:
        """Start the ranks, wait for their end, and clean up; returns when nothing is left.

        ``fds``: see :meth:`RankStarter.run`.
        """
        try:
            error = await self._starter.run(fds)
            if error is not None:
                self.report_fault(error)
            await self._watch()
        finally:
            self.timelines.finish()
            self._gpus.close()
            self.is_retained = self._retain()
            if self.service is not None and not self.keeps_service:
                self.service.end()
            # In a session, processes that ranks have started stay until it ends.
            if not self.keeps_service:
                await self.cleanup.run()
            for rank in self.ranks:
                rank.close(is_retained=self.is_retained)
            self._delete_traces()

    def _delete_traces(self) -> None:
        """Delete what ranks have left that were killed while they wrote their traces."""
        names = tuple(_trace_name(rank.rank) for rank in self.ranks)
        for left in Path(self.record_dir).glob("trace-*"):
            if left.name.startswith(names):
                left.unlink(missing_ok=True)

    def _launch(self, launch: msg.RankLaunch, worker: PooledWorker, fds: Sequence[int]) -> None:
        log = RankLog(str(Path(self.record_dir) / f"rank-{launch.rank}.log"))
        rank = RankProcess(launch.rank, worker, log, self.reporter)
        rank.on_timeline = functools.partial(self.timelines.turn_to, launch.rank)
        self.ranks.add(rank)
        start = _rank_start(self._request, launch, is_recording=self._is_recording)
        rank.launch(start, fds, launch.device)
        ended = self._pool.take_exit(worker)
        if ended is not None:  # before the process was known to be this rank
            self.on_exit(worker.pid, ended)

    @property
    def keeps_service(self) -> bool:
        """Whether the next cell of the session needs the rendezvous of this one."""
        return self.is_retained and self._request.options.session is not None

    def _retain(self) -> bool:
        """Keep the ranks for another gang, if all of them wait for it; return whether they do."""
        key, is_session = self._request.worker_key, self._request.options.session is not None
        if is_session and not self.ranks:  # it was stopped before it began
            return self._retained.key == key
        retained = {
            rank.rank: RetainedWorker(rank.worker, rank.retained_files)
            for rank in self.ranks
            if rank.retained_files is not None
        }
        is_stopped = self._ending is not None and not is_session
        if not key or is_stopped or len(retained) < len(self._request.ranks):
            self._retained.end()  # the ranks of a session that this cell left out
            return False
        self._retained.hold(key, retained)
        return True

    # ── reports ──

    def report_fault(self, error: BaseException) -> None:
        """Report a fault for which no rank is to blame; the kernel ends the attempt."""
        message = file_limit.explained(error)
        if not self.ranks:
            is_limit = isinstance(error, file_limit.LimitError)
            detail = "" if is_limit else preload_text(self._request)
            where = f" ({detail})" if detail else ""
            message = f"the ranks could not be started: {message}{where}"
        report = ev.ErrorReport(type(error).__name__, message)
        self.reporter.emit(ev.AttemptFailed(self.reporter.now_s(), report))

    def report_progress(self, rank: int, text: str) -> None:
        """Report progress with the result of a rank; an empty text at its end."""
        self.reporter.emit(ev.RankPhase(self.reporter.now_s(), rank, "finishing", text))

    def fail_rank(self, rank: int, why: ev.ErrorReport) -> None:
        """Report and end at once a rank that has lost its place on this machine."""
        process = self.ranks.get(rank)
        if process is None or not process.exited:
            phase = "running" if process else "starting"
            self.reporter.emit(ev.RankFailed(self.reporter.now_s(), rank, why, phase))
        if process is not None:
            process.signal(signal.SIGKILL)

    # ── watching ──

    async def _watch(self) -> None:
        limit = TokenBucket(time.monotonic)
        oom_kills = processes.oom_kills()  # now that no rank waits for its start
        for rank in self.ranks:
            rank.oom_kills = oom_kills
        health_at = time.monotonic() + _HEALTH_S
        all_exited = asyncio.ensure_future(self.ranks.all_exited.wait())
        try:
            while self.ranks.running() and not self._is_stuck():
                await asyncio.wait([all_exited], timeout=_FLUSH_S)
                rank_output.emit_new((rank.output for rank in self.ranks), limit)
                self.timelines.poll()
                if time.monotonic() >= health_at:
                    health_at = time.monotonic() + _HEALTH_S
                    self._check_health()
        finally:
            all_exited.cancel()
        if self._ending is not None:
            await asyncio.wait([self._ending])

    def _is_stuck(self) -> bool:
        """True if all signals have been sent and ranks are left: they hang in the system."""
        return self._ending is not None and self._ending.done()

    def _check_health(self) -> None:
        self.cleanup.note(self.ranks)
        self._gpus.poll({rank.rank: rank.worker.pid for rank in self.ranks.running()})
        for rank in self.ranks.running():
            rank.check_health(self._gpus.use_of(rank.rank))
            why = rank.hang_at_exit()
            if why:
                self.reporter.notice("warning", f"rank {rank.rank} {why}: killed")
                rank.signal(signal.SIGKILL)

    def on_exit(self, pid: int, ended: ChildExit) -> bool:
        """Handle a reaped child; return whether it belonged to this group."""
        if self.ranks.on_exit(pid, ended):
            return True
        if self.service is None or not self.service.on_exit(pid, ended.status):
            return False
        if self._ending is None and self.ranks.running():
            self.report_fault(RendezvousError(self.service.failure))
        return True

    # ── commands ──

    def handle(self, command: msg.RanksCommand) -> None:
        """Carry out a command of the kernel for this gang."""
        match command:
            case msg.StopRanks():
                self.stop()
            case msg.KillRanks():
                self.kill(command.rank)
            case msg.RecordSpans():
                self._is_recording = command.on
                self.ranks.send(command)
            case msg.AnswerInput():
                if (rank := self.ranks.get(command.rank)) is not None:
                    rank.send(command)
            case msg.ProfileSteps():
                for rank in self.ranks:
                    path = Path(self.record_dir) / _trace_name(rank.rank)
                    rank.send(msg.StartProfile(command.number, command.steps, str(path)))

    # ── ending ──

    def stop(self) -> None:
        """Ask every rank to end, then force it."""
        self._starter.cancel()
        self.cleanup.note(self.ranks)
        if self._ending is None:
            is_session = self._request.options.session is not None
            end = self.ranks.end_cell if is_session else self.ranks.end
            self._ending = asyncio.ensure_future(end(self._request.options.spec.grace_s))

    def kill(self, only: int | None = None) -> None:
        """Kill every rank at once, or ``only`` one that is no longer needed."""
        if only is None:
            self.stop()
            self.ranks.signal(signal.SIGKILL)
        elif (rank := self.ranks.get(only)) is not None:
            rank.signal(signal.SIGKILL)

    def _keepers(self) -> set[int]:
        """Return the pids that do not belong to the gang: forkserver, waiting workers, rendezvous server."""
        served = self.service.pids() if self.service else set()
        return self._pool.keepers() | self._retained.pids() | served


def _rank_start(
    request: msg.LaunchRequest, launch: msg.RankLaunch, *, is_recording: bool
) -> msg.RankStart:
    timeline = request.timeline
    prefix = path_prefix(timeline, request.record_dir, request.attempt) if timeline else ""
    return msg.RankStart(
        env={**request.env, **launch.env},
        cwd=request.cwd,
        sys_path=request.sys_path,
        rank=launch.rank,
        clock_zero_s=request.clock_zero_s,
        is_recording=is_recording,
        options=request.options,
        timeline_recorder=timeline.recorder if timeline else "",
        timeline_prefix=prefix,
        speaks_for_host=launch == request.ranks[0],
    )


def _trace_name(rank: int) -> str:
    """Return the name of a rank's trace while it is being written."""
    return f"trace-{rank}.json"
