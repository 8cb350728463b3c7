"""The service of a rendezvous beside the ranks (torch's store), in its own worker.

It is started early if the next gang will most likely want the same, so that it already answers when
the ranks start.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes
from hydrogen_magic.errors import RendezvousError
from hydrogen_magic.node.agent.pooled_worker import PooledWorker
from hydrogen_magic.node.agent.worker_pool import WorkerPool
from hydrogen_magic.transport import framing

_BACKLOG = 4096
"""Connections of other users wait in the same queue as those of ranks, until the server rejects
them. This is Linux's default maximum."""

_ERROR_BYTES = 1 << 16
"""As much as a pipe holds."""


def listen(port: socket.socket) -> None:
    """Accept connections into the queue of a reserved port."""
    port.listen(_BACKLOG)


class RunningService:
    """A function that serves on a socket of the agent, for one attempt."""

    def __init__(
        self,
        service: msg.ServiceSpec,
        request: msg.LaunchRequest,
        port: socket.socket,
        pool: WorkerPool,
    ) -> None:
        self._start = msg.ServiceStart(request.env, request.cwd, request.sys_path, service)
        self._owner = _owner_of(request)
        self.port = port
        """On which it serves."""
        self._pool = pool
        self._worker: PooledWorker | None = None
        self._pid = 0
        self._ended = False
        self.failure = ""
        """Why the serving process exited on its own."""

    def fits(self, request: msg.LaunchRequest) -> bool:
        """Whether this is what the launch would have served; it may not have begun."""
        is_same = self._start.service == request.service and self._owner == _owner_of(request)
        return is_same and not self._ended

    async def begin(self) -> None:
        """Start to serve; does nothing if that was done before. Raises RendezvousError if that has failed."""
        if self.failure:
            raise RendezvousError(self.failure)
        if self._worker is None:
            (worker,) = await self._pool.take(1, ())
            if self._ended:
                worker.close()
                return
            self._worker = worker
            self._pid = self._worker.pid
            self._worker.control.setblocking(True)
            listen(self.port)  # here and now: the ranks start next
            framing.send(self._worker.control, self._start, [self.port.fileno()])

    def pids(self) -> set[int]:
        """Return the pid of the serving process, if there is or was one."""
        return {self._pid} if self._pid else set()

    def end(self) -> None:
        """End it at once: it holds no data that is still needed."""
        self._ended = True
        if self._worker is not None:
            processes.send_signal(self._pid, signal.SIGKILL)
            self._worker.close()
            self._worker = None

    def on_exit(self, pid: int, status: int) -> bool:
        """Handle a reaped child; return whether it was the serving process."""
        if self._worker is None or self._pid != pid:
            return False
        how = _how_it_ended(self._worker.stderr, os.waitstatus_to_exitcode(status))
        self.failure = f"the service of the rendezvous ({self._start.service.function}) {how}"
        self._worker.close()
        self._worker, self._ended = None, True
        return True


def _how_it_ended(stderr: int, code: int) -> str:
    """Return ``failed: ValueError: … (server.py, line 12)``; ``stderr``: a pipe with what it reported."""
    with suppress(BlockingIOError):  # it reported nothing, and its children go on
        reported = os.read(stderr, _ERROR_BYTES).decode(errors="replace").strip()
        if code == 1 and reported:
            return f"failed: {reported}"
    if code == 0:
        return "returned while the gang ran: it must serve until the gang ends"
    how = processes.name_of_signal(-code) if code < 0 else f"exit code {code}"
    return f"exited unexpectedly ({how})"


def _owner_of(request: msg.LaunchRequest) -> tuple[object, ...]:
    """Return what a service belongs to: an epoch of a session, whose ranks know its address and keep the
    module path of their first cell; otherwise any gang that imports the same code.
    """
    session = request.options.session
    return (request.worker_key, session.epoch) if session is not None else request.sys_path
