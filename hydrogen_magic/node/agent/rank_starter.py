"""The start of an attempt's ranks, up to the moment at which it is cancelled."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent.attempt_reporter import AttemptReporter
from hydrogen_magic.node.agent.pooled_worker import PooledWorker, close_all
from hydrogen_magic.node.agent.rendezvous_service import RunningService
from hydrogen_magic.node.agent.worker_pool import WorkerPool
from hydrogen_magic.node.agent.worker_reuse import RANKS_ENDED, RetainedWorkers
from hydrogen_magic.transport import framing

_T = TypeVar("_T")

_RETRIES = 2


@dataclass
class RankStarter:
    """Gets a worker for every rank of ``request``, and starts the rendezvous ``service``."""

    request: msg.LaunchRequest
    pool: WorkerPool
    retained: RetainedWorkers
    service: RunningService | None
    reporter: AttemptReporter
    launch: Callable[[msg.RankLaunch, PooledWorker, Sequence[int]], None]
    """Starts a rank in its worker."""
    is_cancelled: bool = False
    """The end was requested before the ranks were started."""
    _starting: asyncio.Future[None] | None = None

    async def run(self, fds: Sequence[int]) -> BaseException | None:
        """Call ``launch`` for every rank; return the error that prevented it, if there was one.

        ``fds`` are closed here: the closure, then a channel for each rank that receives data.
        """
        try:
            if self.is_cancelled:
                return None
            starting = self._starting = asyncio.ensure_future(self._start(fds))
            await asyncio.wait([starting])
            return None if starting.cancelled() else starting.exception()
        finally:
            framing.close_all(fds)  # the ranks have their own descriptors

    def cancel(self) -> None:
        """Start no more ranks."""
        self.is_cancelled = True
        if self._starting is None:
            self.pool.abort()  # its preparation for the next gang, which is this one, is still needed
        elif not self._starting.done():
            self._starting.cancel()
            self.pool.abort()

    async def _start(self, fds: Sequence[int]) -> None:
        request = self.request
        numbers = [rank.rank for rank in request.ranks]
        is_held = self.retained.holds(request.worker_key, numbers)
        workers = [] if is_held else await self._new_workers()
        try:
            if self.service is not None:
                await self._retry(self.service.begin)
            workers = workers or self.retained.take(numbers)
            closure_fd, *channels = fds
            for n, rank in enumerate(request.ranks):
                self.launch(rank, workers.pop(0), [closure_fd, *channels[n : n + 1]])
        finally:
            close_all(workers)  # that run no rank, after an error or a Stop

    async def _new_workers(self) -> list[PooledWorker]:
        request, session = self.request, self.request.options.session
        if session is not None and session.number > 0:
            raise ProcessLookupError(RANKS_ENDED)
        for rank in request.ranks:
            detail = preload_text(request)
            phase = ev.RankPhase(self.reporter.now_s(), rank.rank, "starting", detail)
            self.reporter.emit(phase)
        self._start_forkserver()
        wanted = len(request.ranks), request.preload, request.observers
        return await self._retry(functools.partial(self.pool.take, *wanted))

    def _start_forkserver(self) -> None:
        self.pool.start(self.request.fingerprint, self.request.env, self.request.sys_path)

    async def _retry(self, fork: Callable[[], Awaitable[_T]]) -> _T:
        """Call ``fork``; if the forkserver dies, start another one and retry, twice at most.

        The third one skips the imports during which both others died: ranks do them themselves.
        """
        for _ in range(_RETRIES):
            try:
                return await fork()
            except ChildProcessError as error:
                self.reporter.notice("warning", f"{error}; starting a new one")
            self._start_forkserver()
        return await fork()


def preload_text(request: msg.LaunchRequest) -> str:
    """Return what the forkserver imports for these ranks; empty if nothing."""
    packages = dict.fromkeys(module.partition(".")[0] for module in request.preload)
    return f"importing {', '.join([*packages][:3])}" if packages else ""
