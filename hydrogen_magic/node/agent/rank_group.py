"""The ranks of one attempt on this host, from their forks to the end of their last process."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import file_limit, processes
from hydrogen_magic.core.masking import Mask, secret_values
from hydrogen_magic.core.messages import (
    FileContent,
    KillRanks,
    LaunchRequest,
    ProfileSteps,
    RankLaunch,
    RanksCommand,
    RankStart,
    RecordSpans,
    SetRecording,
    StartProfile,
    StopRanks,
)
from hydrogen_magic.core.timeline_files import path_prefix
from hydrogen_magic.errors import RendezvousError
from hydrogen_magic.node.agent.gpus import RankGpus
from hydrogen_magic.node.agent.output import RankLog, TokenBucket
from hydrogen_magic.node.agent.rank_process import RankProcess, log_path
from hydrogen_magic.node.agent.rendezvous_service import RunningService
from hydrogen_magic.node.agent.timeline_following import follower_of
from hydrogen_magic.node.agent.worker_pool import PooledWorker, WorkerPool
from hydrogen_magic.node.agent.worker_reuse import RetainedWorker, RetainedWorkers

__all__ = ["RankGroup"]

_T = TypeVar("_T")

_FLUSH_S = 0.05
"""Interval at which output is sent to the kernel: too short to be noticed."""
_HEALTH_S = 1.0
_HEARING_S = 0.4
"""A rank that has not reacted to SIGINT by then is in C code and will not react before that returns."""
_TERM_S = 0.3
"""How long SIGTERM's default action may take; longer means that it is handled or ignored."""
_CLOCK_SLACK_S = 1.0
"""File times may lag behind the clock by a tick; a second is enough."""
_GIVE_UP_S = 10.0
"""A process that survives SIGKILL for this long hangs in the system (state D); waiting does not help."""


class RankGroup:
    """Starts and ends the ranks of one ``launch`` message."""

    def __init__(
        self,
        request: LaunchRequest,
        pool: WorkerPool,
        kept: RetainedWorkers,
        emit: Callable[[ev.Event], None],
        hand_over: Callable[[int, FileContent, int], None],
        service: RunningService | None,
    ) -> None:
        self.gang = request.gang
        self.attempt = request.attempt
        self.record_dir = request.record_dir
        self._request = request
        self._pool = pool
        self._kept = kept
        self._emit = emit
        self._hand_over = hand_over
        self._is_recording = request.is_recording
        self._zero_s = request.clock_zero_s
        env = {**os.environ, **request.env}
        self._mask = Mask((*request.secrets, *secret_values(env)))
        self.timelines = follower_of(request.timeline, self._zero_s, emit, self._mask)
        """Timelines of the rendezvous library."""
        self._grace_s = request.grace_s
        self._ranks: dict[int, RankProcess] = {}
        self._gpus = RankGpus({rank.rank: rank.gpu for rank in request.ranks})
        self._service = service
        self._ending: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._cancelled = False
        self._family: set[int] = set()
        """Every process of the gang that has been seen."""
        self._began = time.time() - _CLOCK_SLACK_S
        self._all_exited = asyncio.Event()
        self._allowance = TokenBucket(time.monotonic)

    def now_s(self) -> float:
        return time.monotonic() - self._zero_s

    @property
    def is_cancelled(self) -> bool:
        """Whether it was asked to end before its ranks were started."""
        return self._cancelled

    async def run(self, handed: Sequence[int], start_forkserver: Callable[[], None]) -> None:
        """Start the ranks, wait for their end, and clean up; returns when nothing is left.

        ``handed``: descriptors, closed here: of the closure, and of a channel for each rank that
        receives data.
        """
        try:
            await self._start_ranks(handed, start_forkserver)
            await self._watch()
        finally:
            self.timelines.finish()
            self._gpus.close()
            if self._service is not None:
                self._service.end()
            is_kept = self._keep()
            await self.sweep()
            for rank in self._ranks.values():
                rank.close(is_kept)
                for left in Path(self.record_dir).glob(f"{_trace_name(rank.rank)}*"):
                    left.unlink(missing_ok=True)  # it was killed while writing it

    async def _start_ranks(
        self, handed: Sequence[int], start_forkserver: Callable[[], None]
    ) -> None:
        try:
            if not self._cancelled:
                start_forkserver()
                self._starting = asyncio.ensure_future(self._start(handed, start_forkserver))
                await asyncio.wait([self._starting])
                self._report_start(self._starting)
        finally:
            _close_all(handed)  # the ranks have their own descriptors

    def _keep(self) -> bool:
        """Keep the ranks for another run of this gang, if all of them allow it and no end was requested."""
        ranks = sorted(self._ranks.values(), key=lambda rank: rank.rank)
        staying = [RetainedWorker(one.worker, one.stays) for one in ranks if one.stays is not None]
        if self._ending is not None or len(staying) < len(self._request.ranks):
            return False
        self._kept.hold(self._request.worker_key, staying)
        return True

    # ── starting ──

    async def _start(self, handed: Sequence[int], start_forkserver: Callable[[], None]) -> None:
        ranks = self._request.ranks
        for one in ranks:
            self._emit(ev.RankPhase(self.now_s(), one.rank, "starting", self._first_detail()))
        workers = self._kept.take(self._request.worker_key)
        if not workers:
            wanted = len(ranks), self._request.preload, self._request.observers
            take = functools.partial(self._pool.take, *wanted)
            workers = await self._with_forkserver(take, start_forkserver)
        if self._service is not None:
            await self._with_forkserver(self._service.begin, start_forkserver)
        closure_fd, *channels = handed
        for n, (one, worker) in enumerate(zip(ranks, workers, strict=True)):
            self._send_off(one, worker, [closure_fd, *channels[n : n + 1]])

    async def _with_forkserver(
        self, take: Callable[[], Awaitable[_T]], start_forkserver: Callable[[], None]
    ) -> _T:
        """Call ``take``, which forks from the forkserver; if the forkserver dies, start another and
        retry once.

        The second one skips the imports during which the first one died: ranks do them themselves.
        """
        try:
            return await take()
        except ChildProcessError as error:
            self._emit(ev.Notice(self.now_s(), "warning", f"{error}; starting a new one"))
        start_forkserver()
        return await take()

    def _report_start(self, start: asyncio.Future[None]) -> None:
        error = None if start.cancelled() else start.exception()
        if error is not None:
            self.report_fault(error)

    def report_fault(self, error: BaseException) -> None:
        """Report a fault for which no rank is to blame; the kernel ends the attempt."""
        message = file_limit.explained(error)
        if not self._ranks:
            is_limit = isinstance(error, file_limit.LimitError)
            detail = "" if is_limit else self._first_detail()
            where = f" ({detail})" if detail else ""
            message = f"the ranks could not be started: {message}{where}"
        report = ev.ErrorReport(type(error).__name__, message)
        self._emit(ev.AttemptFailed(self.now_s(), report))

    def report_progress(self, rank: int, text: str) -> None:
        """Report progress with the result of a rank; an empty text at its end."""
        self._emit(ev.RankPhase(self.now_s(), rank, "finishing", text))

    def lose(self, rank: int, why: ev.ErrorReport) -> None:
        """End a rank at once that has lost its place on this machine, and report it."""
        one = self._ranks.get(rank)
        if one is None or not one.exited:
            self._emit(ev.RankFailed(self.now_s(), rank, why, "running" if one else "starting"))
        if one is not None:
            one.signal(signal.SIGKILL)

    def _first_detail(self) -> str:
        modules = self._request.preload
        return f"importing {', '.join(modules[:3])}" if modules else ""

    def _send_off(self, launch: RankLaunch, worker: PooledWorker, fds: Sequence[int]) -> None:
        rank, request = launch.rank, self._request
        log = RankLog(log_path(self.record_dir, rank))
        one = RankProcess(rank, worker, log, self.now_s, self._emit, self._hand_over, self._mask)
        self._ranks[rank] = one
        timeline = request.timeline
        prefix = path_prefix(timeline, self.record_dir, self.attempt) if timeline else ""
        start = RankStart(
            env={**request.env, **launch.env},
            cwd=request.cwd,
            sys_path=request.sys_path,
            rank=rank,
            clock_zero_s=self._zero_s,
            is_recording=self._is_recording,
            infer_options=request.infer_options,
            join_advice=request.join_advice,
            timeline_recorder=timeline.recorder if timeline else "",
            timeline_prefix=prefix,
        )
        one.on_stay = self._on_rank_over
        one.on_timeline = functools.partial(self.timelines.turn_to, rank)
        one.go(start, fds, launch.device)
        ended = self._pool.take_exit(worker.pid)
        if ended is not None:  # before the process was known to be this rank
            self.on_exit(worker.pid, *ended)

    # ── watching ──

    async def _watch(self) -> None:
        health_at = time.monotonic() + _HEALTH_S
        all_exited = asyncio.ensure_future(self._all_exited.wait())
        try:
            while not self._over() and not self._is_stuck():
                await asyncio.wait([all_exited], timeout=_FLUSH_S)
                for rank in self._ranks.values():
                    rank.send_output(self._allowance)
                self.timelines.look()
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

    def _over(self) -> bool:
        return all(rank.exited for rank in self._ranks.values())

    def _check_health(self) -> None:
        self._note_family()
        self._gpus.look({r.rank: r.worker.pid for r in self._ranks.values() if not r.exited})
        for rank in self._ranks.values():
            rank.check_health(self._gpus.use_of(rank.rank))
            rank.report_packing()
            why = rank.hangs_at_exit()
            if why:
                text = f"rank {rank.rank} {why}: killed"
                self._emit(ev.Notice(self.now_s(), "warning", text))
                rank.signal(signal.SIGKILL)

    def _note_family(self) -> None:
        for rank in self._ranks.values():
            if not rank.exited:
                self._family |= processes.family(rank.worker.pid)

    def on_exit(self, pid: int, status: int, max_rss_bytes: int) -> bool:
        """Handle a reaped child; return whether it was a rank of this group."""
        for rank in self._ranks.values():
            if rank.worker.pid == pid and not rank.exited:
                rank.on_exit(status, max_rss_bytes)
                self._on_rank_over()
                return True
        if self._service is None or not self._service.forget(pid):
            return False
        if self._ending is None and not self._over():
            self.report_fault(RendezvousError("the rendezvous store exited unexpectedly"))
        return True

    def _on_rank_over(self) -> None:
        if self._over():
            self._all_exited.set()

    # ── commands ──

    def obey(self, command: RanksCommand) -> None:
        """Carry out a command of the kernel for this gang."""
        match command:
            case StopRanks():
                self.stop()
            case KillRanks():
                self.kill(command.rank)
            case RecordSpans():
                self._is_recording = command.on
                for rank in self._ranks.values():
                    rank.tell(SetRecording(self._is_recording))
            case ProfileSteps():
                self._profile(command.number, command.steps)

    def _profile(self, number: int, steps: int) -> None:
        for rank in self._ranks.values():
            path = str(Path(self.record_dir) / _trace_name(rank.rank))
            rank.tell(StartProfile(number, steps, path))

    def ask_stacks(self) -> None:
        """Make ``faulthandler`` write the stacks of every rank; see :meth:`read_stacks` a moment later."""
        for rank in self._ranks.values():
            rank.read_stacks()
            rank.ask_stacks()

    def read_stacks(self) -> dict[int, str]:
        """Return the stacks written since :meth:`ask_stacks`."""
        return {rank.rank: rank.read_stacks() for rank in self._ranks.values()}

    # ── ending ──

    def stop(self) -> None:
        """Ask every rank to end, then force it."""
        self._abort_start()
        self._note_family()
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    def kill(self, only: int | None = None) -> None:
        """Kill every rank at once, or ``only`` one that is no longer needed."""
        if only is None:
            self.stop()
        for rank in self._ranks.values():
            if only in (None, rank.rank):
                rank.signal(signal.SIGKILL)

    def _abort_start(self) -> None:
        self._cancelled = True
        if self._starting is None:
            self._pool.abort()  # its preparation for the next gang, which is this one, is still needed
        elif not self._starting.done():
            self._starting.cancel()
            self._pool.abort()

    async def _end(self) -> None:
        """Escalate: SIGINT, SIGTERM, SIGKILL; descendants of the ranks are killed later."""
        begun = time.monotonic()
        for rank in self._ranks.values():
            rank.signal(signal.SIGINT)
        terminated: set[int] = set()
        while not self._over():
            waited = time.monotonic() - begun
            for rank in self._ranks.values():
                limit = self._grace_s if rank.heard else _HEARING_S
                if waited > limit + _TERM_S:
                    rank.signal(signal.SIGKILL)
                elif waited > limit and rank.rank not in terminated:
                    terminated.add(rank.rank)
                    rank.signal(signal.SIGTERM)
            if waited > self._grace_s + _TERM_S + _GIVE_UP_S:
                break
            await asyncio.sleep(0.01)

    async def sweep(self) -> None:
        """Kill all descendants of this agent, except the forkserver and waiting workers."""
        seen, left = await processes.end_descendants(os.getpid(), _GIVE_UP_S, self._keepers)
        self._family |= seen
        if left:
            self._give_up(left)
        else:
            processes.unlink_shared_memory(self._family, self._began)

    def _keepers(self) -> set[int]:
        """Return the pids that do not belong to the gang: forkserver, waiting workers, rendezvous server."""
        served = self._service.pids() if self._service else set()
        return self._pool.keepers() | self._kept.pids() | served

    def _give_up(self, left: list[processes.Process]) -> None:
        said = ", ".join(f"{process.pid} (state {process.state})" for process in left)
        text = f"cannot be killed on {os.uname().nodename}: {said}; check the machine"
        self._emit(ev.Notice(self.now_s(), "error", text))


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _trace_name(rank: int) -> str:
    """Return the name of a rank's trace while it is being written."""
    return f"trace-{rank}.json"
