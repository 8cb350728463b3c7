"""The agent's workers: one forkserver, and workers forked from it, some of them in advance."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from hydrogen_magic.core import file_limit, memory_settings, processes
from hydrogen_magic.core.messages import (
    ForkserverAnswer,
    ForkserverRequest,
    ForkWorkers,
    ModulesPreloaded,
    ObserverSpec,
    PreloadModules,
    WorkersForked,
    decode,
)
from hydrogen_magic.node.agent import command_line
from hydrogen_magic.node.agent.forkserver import FDS_PER_WORKER
from hydrogen_magic.transport import framing

__all__ = ["WorkerPool", "PooledWorker"]

_A = TypeVar("_A", bound=ForkserverAnswer)

_DIED = "the forkserver exited unexpectedly"
_FILES_PER_WORKER = 10
_OTHER_FILES = 16
"""What the agent opens later: logs, results, a port."""
_MAX_EXITS = 64
"""Exits kept for forks whose pid is not known yet; there are never more than a few."""
_BATCH = framing.MAX_FDS // FDS_PER_WORKER


@dataclass
class PooledWorker:
    """The agent's ends of one worker's pipes.

    See :class:`~hydrogen_magic.node.worker.process_setup.WorkerPipes`.
    """

    control: socket.socket
    stdout: int
    stderr: int
    interrupted: int
    stacks: int
    pid: int = 0

    def close(self) -> None:
        """Close the connections; a worker that was never used then exits on its own."""
        self.control.close()
        for fd in (self.stdout, self.stderr, self.interrupted, self.stacks):
            os.close(fd)


@dataclass
class _Forkserver:
    """A running forkserver process and its imports."""

    pid: int
    sock: socket.socket
    reader: framing.FrameReader
    fingerprint: str
    first: tuple[str, ...] = ()
    """Modules that it imports on start; its answer about them has not been read yet."""
    loaded: set[str] = field(default_factory=set)
    """Modules that it was asked to import, whether or not that succeeded."""
    aborted: bool = False
    """It was ended during an import, which is not the fault of the imported module."""
    files: dict[str, int] = field(default_factory=dict)
    """Files of those modules and their modification times at import."""

    def is_stale(self) -> bool:
        """True if a module that it has imported was changed since."""
        return any(_modified(file) != when for file, when in self.files.items())


def _modified(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


_ON_FIRST_USE = (("torch", "torch._dynamo"),)
"""Module -> modules that it imports on first use. Creating an optimizer does that, for over a second."""


class WorkerPool:
    """Hands out workers that have imported the requested modules."""

    def __init__(self, kernel: int) -> None:
        """``kernel``: its pidfd, -1 where it is on another machine."""
        self._kernel = kernel
        self._forkserver: _Forkserver | None = None
        self._spares: list[PooledWorker] = []
        self._avoid: set[str] = set()
        """Modules that made a forkserver unsafe to fork: ranks import them themselves."""
        self._exits: dict[int, tuple[int, int]] = {}
        self._observers: tuple[ObserverSpec, ...] = ()
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
        current = self._forkserver
        if current is not None and current.fingerprint == fingerprint and not current.is_stale():
            return
        self.close()
        ours, theirs = socket.socketpair()
        # subprocess must not wait for the exit status: the agent reaps all its children.
        process = subprocess.Popen(
            command_line.command(
                "hydrogen_magic.node.agent.forkserver", sys_path,
                str(theirs.fileno()), str(self._kernel), str(os.getpid()),
                json.dumps(list(sys_path)), *preload,
            ),
            pass_fds=[fd for fd in (theirs.fileno(), self._kernel) if fd >= 0],
            env=command_line.environment({**memory_settings.ENVIRONMENT, **env}),
            stdin=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        theirs.close()
        self._forkserver = _Forkserver(
            process.pid, ours, framing.FrameReader(ours), fingerprint, tuple(preload)
        )

    async def preload(self, modules: Sequence[str]) -> None:
        """Make the forkserver import those of ``modules`` that it has not imported yet."""
        async with self._lock:
            await self._preload(modules)

    async def preload_ahead(self) -> None:
        """Make the forkserver import modules that its modules would import on first use, in every rank."""
        async with self._lock:
            loaded = self._forkserver.loaded if self._forkserver is not None else ()
            await self._preload([more for name, more in _ON_FIRST_USE if name in loaded])

    async def take(
        self,
        count: int,
        modules: Sequence[str],
        observers: tuple[ObserverSpec, ...] | None = None,
    ) -> list[PooledWorker]:
        """Return ``count`` workers with ``modules`` imported; they are the caller's from now on.

        ``observers``: those that these workers, and workers forked in advance from now on, attach; None:
        unchanged.
        """
        async with self._lock:
            self._use_observers(observers)
            await self._preload(modules)
            ready = [self._spares.pop() for _ in range(min(count, len(self._spares)))]
            try:
                return ready + await self._fork(count - len(ready))
            except BaseException:
                self._spares += ready
                raise

    def _use_observers(self, observers: tuple[ObserverSpec, ...] | None) -> None:
        if observers is not None and observers != self._observers:
            self._observers = observers
            _close_all(self._spares)
            self._spares.clear()

    async def stock(self, count: int) -> None:
        """Fork in advance until ``count`` workers wait."""
        async with self._lock:
            forkserver = self._forkserver
            forked = await self._fork(count - len(self._spares)) if forkserver is not None else []
            if self._forkserver is forkserver:
                self._spares += forked
            else:  # the forkserver was replaced: these workers have other imports
                _close_all(forked)

    def forget(self, pid: int, ended: tuple[int, int]) -> None:
        """Handle the exit of child ``pid``; ``ended``: its wait status and peak memory in bytes."""
        for worker in self._spares:
            if worker.pid == pid:
                self._spares.remove(worker)
                worker.close()
                return
        if self._forkserver is not None and self._forkserver.pid == pid:
            self.close()
            return
        self._exits[pid] = ended  # an orphan of the gang, or a fork whose pid is not known yet
        while len(self._exits) > _MAX_EXITS:
            del self._exits[next(iter(self._exits))]

    def take_exit(self, pid: int) -> tuple[int, int] | None:
        """Return how worker ``pid`` exited if it did so before it was started on a rank."""
        return self._exits.pop(pid, None)

    def abort(self) -> None:
        """End the forkserver although it is busy, possibly in an import that hangs; the next one
        replaces it.
        """
        if self._forkserver is not None and self._lock.locked():
            processes.send_signal(self._forkserver.pid, signal.SIGKILL)
            self._forkserver.fingerprint = ""  # matches no launch: the next one replaces it
            self._forkserver.aborted = True

    def end(self) -> None:
        """Kill everything at once: the forkserver may import from a folder that is removed with us."""
        if self._forkserver is not None:
            processes.send_signal(self._forkserver.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Close everything: forkserver and waiting workers exit when their sockets close."""
        _close_all(self._spares)
        self._spares.clear()
        if self._forkserver is not None:
            # A thread may be reading from it, and would block forever: closing alone does not wake
            # it.
            with suppress(OSError):
                self._forkserver.sock.shutdown(socket.SHUT_RDWR)
            self._forkserver.sock.close()
            self._forkserver = None

    async def _preload(self, modules: Sequence[str]) -> None:
        forkserver = self._running()
        if forkserver.first:
            first, forkserver.first = forkserver.first, ()
            self._note_loaded(forkserver, first, await self._answer(ModulesPreloaded, first))
        missing = [m for m in modules if m not in forkserver.loaded and m not in self._avoid]
        if not missing:
            return
        _close_all(self._spares)
        self._spares.clear()
        self._ask(forkserver, PreloadModules(tuple(missing)))
        self._note_loaded(forkserver, missing, await self._answer(ModulesPreloaded, missing))

    def _note_loaded(
        self, forkserver: _Forkserver, modules: Sequence[str], answer: ModulesPreloaded
    ) -> None:
        forkserver.loaded.update(modules)
        forkserver.files.update((file, _modified(file)) for file in answer.files)
        if answer.unsafe:
            self._avoid.update(modules)
            forkserver.fingerprint = (
                ""  # replaced before the next gang; its forks so far are usable
            )

    async def _fork(self, count: int) -> list[PooledWorker]:
        workers: list[PooledWorker] = []
        try:
            while len(workers) < count:
                workers += await self._fork_batch(min(_BATCH, count - len(workers)))
        except BaseException:
            _close_all(workers)
            raise
        return workers

    async def _fork_batch(self, count: int) -> list[PooledWorker]:
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        file_limit.check(_FILES_PER_WORKER * count + _OTHER_FILES, f"the start of {ranks}")
        workers: list[PooledWorker] = []
        theirs: list[int] = []
        try:
            for _ in range(count):
                worker, fds = _new_worker()
                workers.append(worker)
                theirs += fds
            self._ask(self._running(), ForkWorkers(self._observers), theirs)
            pids = (await self._answer(WorkersForked, ())).pids
            if len(pids) < count:
                raise BlockingIOError("this machine refused to fork more processes")
        except BaseException:
            _close_all(workers)  # forked or not: they exit when the other end is closed
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        for worker, pid in zip(workers, pids, strict=True):
            worker.pid = pid
        return workers

    async def _answer(self, expected: type[_A], importing: Sequence[str]) -> _A:
        """Return the forkserver's next answer; ``importing``: what it imports meanwhile."""
        forkserver = self._running()
        loop = asyncio.get_running_loop()
        try:
            received = await loop.run_in_executor(None, framing.receive, forkserver.reader)
        except OSError:  # it has died, and the socket was closed when its exit was handled
            received = None
        if received is None:
            if not forkserver.aborted:  # an import may kill its process: let a rank show it
                self._avoid.update(importing)
            raise _died(forkserver)
        return decode(received[0], expected)

    def _ask(
        self, forkserver: _Forkserver, request: ForkserverRequest, fds: Sequence[int] = ()
    ) -> None:
        try:
            framing.send(forkserver.sock, request, fds)
        except OSError as error:
            raise _died(forkserver) from error

    def _running(self) -> _Forkserver:
        if self._forkserver is None:
            raise ChildProcessError(_DIED)
        return self._forkserver


def _died(forkserver: _Forkserver) -> ChildProcessError:
    """Return the error for a forkserver that does not answer; it is not used for later launches."""
    forkserver.fingerprint = ""
    return ChildProcessError(_DIED)


def _close_all(workers: Sequence[PooledWorker]) -> None:
    for worker in workers:
        worker.close()


def _new_worker() -> tuple[PooledWorker, list[int]]:
    """Return the agent's ends and the worker's five descriptors, in the order of ``WorkerPipes``."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    ack_read, ack_write = os.pipe()
    stacks = _memory_file()
    for fd in (out_read, err_read, ack_read):
        os.set_blocking(fd, False)
    worker = PooledWorker(ours, out_read, err_read, ack_read, stacks)
    return worker, [theirs.detach(), out_write, err_write, ack_write, os.dup(stacks)]


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hydrogen-stacks")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
