"""The agent's workers: one forkserver, and workers forked from it, some of them in advance."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent.child_exit import ChildExit
from hydrogen_magic.node.agent.forkserver_client import ForkserverClient, RefusedImports
from hydrogen_magic.node.agent.pooled_worker import PooledWorker, close_all

_MAX_EXITS = 64
"""Exits kept for forks whose pid is not known yet; there are never more than a few."""


class WorkerPool:
    """Hands out workers that have imported the requested modules."""

    def __init__(self, kernel: int) -> None:
        """``kernel``: its pidfd, -1 where it is on another machine."""
        self._kernel = kernel
        self._forkserver: ForkserverClient | None = None
        self._spares: list[PooledWorker] = []
        self._refused = RefusedImports()
        self._exits: dict[int, tuple[float, ChildExit]] = {}
        """By pid: when the process exited, and how."""
        self._observers: tuple[msg.ObserverSpec, ...] = ()
        self._lock = asyncio.Lock()

    def keepers(self) -> set[int]:
        """Return the pids that must survive the end of a gang."""
        forkserver = {self._forkserver.pid} if self._forkserver else set()
        return forkserver | {worker.pid for worker in self._spares}

    def start(
        self,
        fingerprint: str,
        env: Mapping[str, str],
        sys_path: Sequence[str],
        preload: Sequence[str] = (),
    ) -> None:
        """Start a forkserver of this fingerprint, or replace one of another fingerprint.

        A new one imports ``preload`` at once, without a request.
        """
        if self._forkserver is None or not self._forkserver.is_usable(fingerprint):
            if self._forkserver is not None:
                self._forkserver.give_up()
            self.close()
            self._forkserver = ForkserverClient(
                self._kernel, fingerprint, env, sys_path, preload, self._refused
            )

    async def preload(self, modules: Sequence[str]) -> None:
        """Make the forkserver import those of ``modules`` that it has not imported yet."""
        async with self._lock:
            await self._preload(modules)

    async def take(
        self,
        count: int,
        modules: Sequence[str],
        observers: tuple[msg.ObserverSpec, ...] | None = None,
    ) -> list[PooledWorker]:
        """Return ``count`` workers with ``modules`` imported; they are the caller's from now on.

        ``observers``: those that these workers, and workers forked in advance from now on, attach; None:
        unchanged.
        """
        async with self._lock:
            if observers is not None and observers != self._observers:
                self._observers = observers
                self._drop_spares()
            forkserver = await self._preload(modules)
            ready = [self._spares.pop() for _ in range(min(count, len(self._spares)))]
            try:
                return ready + await forkserver.fork(count - len(ready), self._observers)
            except BaseException:
                self._spares += ready
                raise

    async def stock(self, count: int) -> None:
        """Fork in advance until ``count`` workers wait."""
        async with self._lock:
            forkserver = self._forkserver
            if forkserver is None:
                return
            forked = await forkserver.fork(count - len(self._spares), self._observers)
            if self._forkserver is forkserver:
                self._spares += forked
            else:  # the forkserver was replaced: these workers have other imports
                close_all(forked)

    def forget(self, pid: int, ended: ChildExit) -> None:
        """Handle the exit of child ``pid``."""
        for worker in self._spares:
            if worker.pid == pid:
                self._spares.remove(worker)
                worker.close()
                return
        if self._forkserver is not None and self._forkserver.pid == pid:
            self.close()
            return
        # An orphan of the gang, or a fork whose pid is not known yet.
        self._exits[pid] = time.monotonic(), ended
        while len(self._exits) > _MAX_EXITS:
            del self._exits[next(iter(self._exits))]

    def take_exit(self, worker: PooledWorker) -> ChildExit | None:
        """Return how ``worker`` exited if it did so before it was started on a rank.

        An earlier process may have had the same pid.
        """
        exited_s, ended = self._exits.pop(worker.pid, (-math.inf, None))
        return ended if exited_s > worker.created_s else None

    def abort(self) -> None:
        """End a forkserver that is busy, possibly in an import that hangs; the next launch replaces it."""
        if self._forkserver is not None and self._lock.locked():
            self._forkserver.abort()

    def end(self) -> None:
        """Kill everything at once: the forkserver may import from a folder that is removed with us."""
        if self._forkserver is not None:
            self._forkserver.kill()
        self.close()

    def close(self) -> None:
        """Close everything: forkserver and waiting workers exit when their sockets close."""
        self._drop_spares()
        if self._forkserver is not None:
            self._forkserver.close()
            self._forkserver = None

    def _drop_spares(self) -> None:
        close_all(self._spares)
        self._spares.clear()

    async def _preload(self, modules: Sequence[str]) -> ForkserverClient:
        """Return the forkserver, after it has imported ``modules``."""
        forkserver = self._forkserver
        if forkserver is None:
            raise ChildProcessError("the forkserver exited unexpectedly")
        await forkserver.finish_start()
        if missing := forkserver.missing(modules):
            self._drop_spares()
            await forkserver.preload(missing)
        return forkserver
