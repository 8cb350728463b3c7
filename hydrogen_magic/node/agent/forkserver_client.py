"""The agent's side of a forkserver: requests to import modules and to fork workers."""

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
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.units import counted
from hydrogen_magic.node.agent import command_line
from hydrogen_magic.node.agent.file_versions import are_changed, modified_ns
from hydrogen_magic.node.agent.forkserver import FDS_PER_WORKER
from hydrogen_magic.node.agent.pooled_worker import PooledWorker, close_all
from hydrogen_magic.transport import framing

_A = TypeVar("_A", bound=msg.ForkserverAnswer)

_FILES_PER_WORKER = 10
_OTHER_FILES = 16
"""What the agent opens later: logs, results, a port."""
_BATCH = framing.MAX_FDS // FDS_PER_WORKER


@dataclass
class RefusedImports:
    """Modules that forkservers do not import: ranks import them themselves."""

    modules: set[str] = field(default_factory=set)
    """They made a forkserver unsafe to fork, or two in a row have died while they imported them."""
    _suspects: set[str] = field(default_factory=set)
    """One has died while it imported them: the import may kill its process, or another process did."""

    def note_death(self, importing: Sequence[str]) -> None:
        """A forkserver has died while it imported modules."""
        self.modules |= self._suspects.intersection(importing)
        self._suspects.update(importing)

    def note_import(self, modules: Sequence[str]) -> None:
        """A forkserver has imported modules."""
        self._suspects.difference_update(modules)


class ForkserverClient:
    """A running forkserver process. Requests raise ChildProcessError after its end."""

    def __init__(
        self,
        kernel: int,
        fingerprint: str,
        env: Mapping[str, str],
        sys_path: Sequence[str],
        preload: Sequence[str],
        refused: RefusedImports,
    ) -> None:
        """Start it. It imports ``preload`` at once, without a request.

        ``kernel``: the kernel's pidfd, -1 where it is on another machine. ``refused``: modules that make
        a forkserver unsafe to fork, or kill it, are added to them.
        """
        self.modules: set[str] = set()
        """Modules that it was asked to import, whether or not that succeeded."""
        self._fingerprint = fingerprint
        self._first = tuple(preload)
        """Modules that it imports on start; its answer about them has not been read yet."""
        self._refused = refused
        self._files: dict[str, int] = {}
        """Files of its modules and their modification times at import."""
        self._is_aborted = False
        """It was ended during an import, which is not the fault of the imported module."""
        self._sock, theirs = framing.pair()
        self._reader = framing.FrameReader(self._sock)
        fds = theirs.fileno(), kernel
        arguments = (*fds, os.getpid(), json.dumps(list(sys_path)), *preload)
        module = "hydrogen_magic.node.agent.forkserver"
        process = subprocess.Popen(
            command_line.command(module, sys_path, *map(str, arguments)),
            pass_fds=[fd for fd in fds if fd >= 0],
            env=command_line.environment({**memory_settings.ENVIRONMENT, **env}),
            stdin=subprocess.DEVNULL,
            cwd="/",
        )
        theirs.close()
        self.pid = process.pid
        # subprocess must neither wait for it nor report that it still runs: the agent reaps all its children.
        process.returncode = 0

    def is_usable(self, fingerprint: str) -> bool:
        """Return whether it serves launches of ``fingerprint``, with its modules as they are now."""
        return self._fingerprint == fingerprint and not are_changed(self._files)

    def retire(self) -> None:
        """Make it unusable for later launches; its forks so far are usable."""
        self._fingerprint = ""

    async def finish_start(self) -> None:
        """Wait for the imports that it was started with."""
        if self._first:
            first, self._first = self._first, ()
            self._note_modules(first, await self._answer(msg.ModulesPreloaded, first))

    def missing(self, modules: Sequence[str]) -> list[str]:
        """Return those of ``modules`` that it should import."""
        known = self.modules | self._refused.modules
        return [name for name in modules if name not in known]

    async def preload(self, modules: Sequence[str]) -> None:
        """Import ``modules``."""
        self._request(msg.PreloadModules(tuple(modules)))
        self._note_modules(modules, await self._answer(msg.ModulesPreloaded, modules))

    async def fork(self, count: int, observers: tuple[msg.ObserverSpec, ...]) -> list[PooledWorker]:
        """Return new workers, which attach ``observers``."""
        workers: list[PooledWorker] = []
        try:
            while len(workers) < count:
                workers += await self._fork_batch(min(_BATCH, count - len(workers)), observers)
        except BaseException:
            close_all(workers)
            raise
        return workers

    def kill(self) -> None:
        processes.send_signal(self.pid, signal.SIGKILL)

    def abort(self) -> None:
        """Kill it during an import."""
        self.kill()
        self.give_up()

    def give_up(self) -> None:
        """It is ended, perhaps during an import, which is not the fault of the imported module."""
        self.retire()
        self._is_aborted = True

    def close(self) -> None:
        """Close the connection: the process exits when it notices that."""
        # A thread may be reading from it, and would block forever: closing alone does not wake it.
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _note_modules(self, modules: Sequence[str], answer: msg.ModulesPreloaded) -> None:
        self.modules.update(modules)
        self._refused.note_import(modules)
        self._files.update((file, modified_ns(file)) for file in answer.files)
        if answer.is_unsafe:
            self._refused.modules.update(modules)
            self.retire()

    async def _fork_batch(
        self, count: int, observers: tuple[msg.ObserverSpec, ...]
    ) -> list[PooledWorker]:
        ranks = counted(count, "rank")
        file_limit.check(_FILES_PER_WORKER * count + _OTHER_FILES, f"the start of {ranks}")
        workers: list[PooledWorker] = []
        theirs: list[int] = []
        try:
            for _ in range(count):
                worker, fds = PooledWorker.create()
                workers.append(worker)
                theirs += fds
            self._request(msg.ForkWorkers(observers), theirs)
            pids = (await self._answer(msg.WorkersForked, ())).pids
            if len(pids) < count:
                raise BlockingIOError("this machine refused to fork more processes")
        except BaseException:
            close_all(workers)  # forked or not: they exit when the other end is closed
            raise
        finally:
            framing.close_all(theirs)
        for worker, pid in zip(workers, pids, strict=True):
            worker.pid = pid
        return workers

    def _request(self, request: msg.ForkserverRequest, fds: Sequence[int] = ()) -> None:
        try:
            framing.send(self._sock, request, fds)
        except OSError as error:
            raise self._died() from error

    async def _answer(self, expected: type[_A], importing: Sequence[str]) -> _A:
        """Return the next answer; ``importing``: the modules that are imported meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            received = await loop.run_in_executor(None, framing.receive, self._reader)
        except OSError:  # it has died, and the socket was closed when its exit was handled
            received = None
        if received is None:
            if not self._is_aborted:  # an import may kill its process: let a rank show it
                self._refused.note_death(importing)
            raise self._died()
        return msg.decode(received[0], expected)

    def _died(self) -> ChildProcessError:
        self.retire()
        return ChildProcessError("the forkserver exited unexpectedly")
