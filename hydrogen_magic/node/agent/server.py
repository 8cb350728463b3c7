"""The agent's main loop: messages from the kernel in, events out, and the shutdown.

It serves one gang at a time; a second gang of the same kernel gets its own agent. So all
descendants of an agent belong to the gang it serves, except its forkserver and waiting workers.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import network, processes
from hydrogen_magic.node.agent import child_exit, rendezvous_service
from hydrogen_magic.node.agent.kernel_link import KernelLink
from hydrogen_magic.node.agent.rank_group import RankGroup
from hydrogen_magic.node.agent.rank_ports import RankPorts
from hydrogen_magic.node.agent.rank_set import GIVE_UP_S
from hydrogen_magic.node.agent.rendezvous_service import RunningService
from hydrogen_magic.node.agent.worker_pool import WorkerPool
from hydrogen_magic.node.agent.worker_reuse import EXIT_S, RetainedWorkers
from hydrogen_magic.transport.background_tasks import BackgroundTasks
from hydrogen_magic.transport.channel import AgentLink

_BATCH_S = 0.05
"""Events that are not urgent are sent together: one message instead of fifty."""

_SOON_S = 0.005
"""Results and successful ends of several ranks come within milliseconds: one message for all of them."""

_STACKS_S = 0.1
"""``faulthandler`` writes stacks within milliseconds of the time at which a rank gets the processor."""
_MAX_STACK_READS = 10
"""A rank whose process is stopped never writes its stacks."""

_MAX_SPARES = 16
"""If there are more ranks, they are forked on request: each waiting one takes some memory."""


class AgentServer:
    """Communicates with the kernel, owns the pool and at most one group."""

    def __init__(self, config: msg.AgentConfig, kernel_link: KernelLink, pool: WorkerPool) -> None:
        self._kernel_link = kernel_link
        self._pool = pool
        self._retained = RetainedWorkers(self._on_rank_lost)
        self._group: RankGroup | None = None
        self._link = AgentLink(config.endpoint, config.server_key, config.secret)
        self._outbox: list[list[Any]] = []
        self._flushing: asyncio.TimerHandle | None = None
        try:
            self._reserved_port = _reserved(kernel_link)
        except OSError as error:  # a range without a free port: the task reports our last output
            sys.exit(f"cannot listen on {kernel_link.bind}: {error.strerror}")
        self._rank_ports = RankPorts(kernel_link.ports)
        self._closing = asyncio.Event()
        self.is_terminated = False
        """It was ended by SIGTERM."""
        self._prepared_service: RunningService | None = None
        """The running service for the next gang's rendezvous, if it fits."""
        self._preparing: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        """Ends what the ranks of a session have left behind."""
        self._tasks = BackgroundTasks()

    async def run(self) -> None:
        """Serve until the kernel ends it or exits."""
        _raise_file_limit()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._kernel_link.begin(self._link, self._closing.set, self._expect_ranks)
        self._link.send(self._hello())
        self._start(self._pool.preload(()))  # wait for the first imports, to note their files
        receiving = asyncio.ensure_future(self._receive())
        receiving.add_done_callback(lambda _: self._closing.set())
        await self._closing.wait()
        receiving.cancel()
        await self._end()
        await asyncio.wait([receiving])
        if not receiving.cancelled() and receiving.exception() is not None:
            print("hydrogen_magic agent:", repr(receiving.exception()), file=sys.stderr)
        self._kernel_link.close()
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            loop.remove_signal_handler(signum)
        self._link.close()

    def _terminate(self) -> None:
        self.is_terminated = True
        self._closing.set()

    def _hello(self) -> msg.Hello:
        return msg.Hello(
            os.uname().nodename, _address(self._reserved_port), self._kernel_link.interface
        )

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.start(work)
        task.add_done_callback(_print_error)
        return task

    # ── the kernel ──

    async def _receive(self) -> None:
        while True:
            message, data = await self._link.receive()
            command = msg.decode(message, msg.AgentCommand)
            if not self._kernel_link.take(command, data):
                self._handle(command)

    def _handle(self, command: msg.AgentCommand) -> None:
        match command:
            case msg.LaunchRequest():
                self._launch(self._kernel_link.localized(command))
            case msg.Quit():
                self._closing.set()
            case msg.Ping():
                self._send(msg.Pong())
            case msg.HoldPorts():
                self._send(self._rank_ports.hold(command))
            case msg.EndSession():
                if self._retained.key == command.worker_key:
                    self._retained.finish()
                    self._end_prepared_service()
                    self._cleaning = self._start(self._clean_up_session())
            case msg.ReportStacks():
                self._start(self._report_stacks())
            case msg.RanksCommand():
                if self._group is not None and command.gang == self._group.gang:
                    self._group.handle(command)
            case _:
                raise msg.MessageError(f"this agent does not handle {type(command).__name__}")

    def _expect_ranks(self) -> None:
        """Queue connections of the next gang's ranks: ranks on other hosts may be faster than this one."""
        rendezvous_service.listen(self._reserved_port)

    def _launch(self, request: msg.LaunchRequest) -> None:
        self._reap()  # a waiting rank that has just died cannot run the cell
        if self._cleaning is not None:  # it would kill the ranks of this gang, too
            self._cleaning.cancel()
        # At once: a stop may be the next message, and must find the group.
        service = self._service_for(request)
        self._group = RankGroup(
            request, self._pool, self._retained, self._emit, self._send_file, service
        )
        self._start(self._serve(self._group, request))

    # ── a gang ──

    async def _serve(self, group: RankGroup, request: msg.LaunchRequest) -> None:
        try:
            fds = await self._kernel_link.launch_files(group)
            if self._preparing is not None:
                await asyncio.wait([self._preparing])
            await group.run(fds)
        except Exception as error:  # whatever it is, the kernel waits for this gang's end
            group.report_fault(error)
        finally:
            self._flush()
            try:
                await self._kernel_link.finish(group)
            finally:  # whatever could not be sent, the kernel waits for this message
                self._finish(group)
        if group.keeps_service:
            self._prepared_service = group.service
        else:
            self._preparing = asyncio.ensure_future(self._prepare(request))

    def _finish(self, group: RankGroup) -> None:
        """Report to the kernel that nothing of the gang is left, and reserve a port for the next."""
        self._flush()
        self._group = None
        self._rank_ports.release()
        try:
            if group.service is None or group.service.port is self._reserved_port:
                self._reserved_port.close()  # a store must never serve two attempts
                self._reserved_port = _reserved(self._kernel_link)
        except OSError:
            self._send(msg.CleanedUp(group.gang, group.attempt, None))
            self._closing.set()  # of no use without a port; the kernel starts another agent
            raise
        held = _address(self._reserved_port)
        self._send(msg.CleanedUp(group.gang, group.attempt, held, group.is_retained))
        if not group.keeps_service:
            self._kernel_link.released(group.gang, group.attempt)

    async def _prepare(self, request: msg.LaunchRequest) -> None:
        """Get ready for another gang like this one: the most likely next."""
        try:
            n_spares = min(len(request.ranks), _MAX_SPARES)
            service = self._prepared_service = self._new_service(request)
            # All at once: each request is one more fork of a large process.
            await self._pool.stock(n_spares + (service is not None))
            if service is not None:
                await service.begin()
        except OSError:
            pass  # the forkserver was ended, or forks are refused: the next launch reports it

    def _service_for(self, request: msg.LaunchRequest) -> RunningService | None:
        """Return what the launch wants served: the prepared one if that is it, else a new one."""
        prepared, self._prepared_service = self._prepared_service, None
        if prepared is not None and prepared.fits(request):
            return prepared
        if prepared is not None:
            prepared.end()
        return self._new_service(request)

    def _new_service(self, request: msg.LaunchRequest) -> RunningService | None:
        if request.service is None:
            return None
        return RunningService(request.service, request, self._reserved_port, self._pool)

    def _emit(self, event: ev.Event) -> None:
        self._outbox.append(ev.encode(event))
        loop = asyncio.get_running_loop()
        at_s = loop.time() + _delay_s(event)
        if self._flushing is None or at_s < self._flushing.when():
            if self._flushing is not None:
                self._flushing.cancel()
            self._flushing = loop.call_at(at_s, self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._outbox and self._group is not None:
            batch, self._outbox = self._outbox, []
            self._send_events(self._group, batch)

    def _send_events(self, group: RankGroup, batch: list[Any]) -> None:
        try:
            self._send(msg.EventBatch(group.gang, group.attempt, tuple(batch)))
        except ValueError as error:  # too large for one message
            half = len(batch) // 2
            if half == 0:
                text = f"an event of type {batch[0][0]} was dropped: it is too large ({error})"
                self._send_events(
                    group, [ev.encode(ev.Notice(group.reporter.now_s(), "warning", text))]
                )
                return
            self._send_events(group, batch[:half])
            self._send_events(group, batch[half:])

    def _send(self, report: msg.AgentReport) -> None:
        if not self._closing.is_set():  # a kernel that let go of us listens no more
            self._link.send(report)

    def _send_file(self, rank: int, content: msg.FileContent, fd: int) -> None:
        """Pass a file of a rank's on to the kernel: its result, or its profile."""
        if self._group is not None:
            file = msg.RankFile(self._group.gang, self._group.attempt, rank, content)
            self._kernel_link.send_file(file, fd)
        os.close(fd)

    async def _report_stacks(self) -> None:
        group = self._group
        if group is None:
            return
        group.ranks.request_stacks()
        for n_reads in range(1, _MAX_STACK_READS + 1):
            await asyncio.sleep(_STACKS_S)
            if group is not self._group:
                return
            is_complete = group.ranks.report_stacks(is_last=n_reads == _MAX_STACK_READS)
            self._flush()
            if is_complete:
                return

    # ── children ──

    def _reap(self) -> None:
        """Reap every child that has exited: ranks, the forkserver, orphans of the gang."""
        while (reaped := child_exit.reap()) is not None:
            pid, ended = reaped
            claimed = self._group is not None and self._group.on_exit(pid, ended)
            claimed = claimed or self._retained.forget(pid)
            service = self._prepared_service
            if not claimed and not (service is not None and service.on_exit(pid, ended.status)):
                self._pool.forget(pid, ended)

    def _on_rank_lost(self, key: str, rank: int) -> None:
        """A rank has exited between two cells of its session."""
        self._end_prepared_service()
        self._cleaning = self._start(self._clean_up_session())
        self._send(msg.SessionLost(key, f"rank {rank} ended while no cell ran"))

    async def _clean_up_session(self) -> None:
        """Kill what a session's ranks have left behind.

        A gang does it at its own end: one that is launched here meanwhile cancels this.
        """
        await asyncio.sleep(EXIT_S)
        if self._group is None:
            await processes.end_descendants(os.getpid(), GIVE_UP_S, self._keepers)

    def _keepers(self) -> set[int]:
        served = self._prepared_service.pids() if self._prepared_service is not None else set()
        return self._pool.keepers() | self._retained.pids() | served

    def _end_prepared_service(self) -> None:
        if self._prepared_service is not None:
            self._prepared_service.end()
            self._prepared_service = None

    async def _end(self) -> None:
        """Kill the gang and all our other descendants, at once."""
        if self._group is not None:
            self._group.kill()
            self._kernel_link.kernel_ended(self._group)
            await self._group.cleanup.run()
        self._end_prepared_service()
        self._retained.end()
        self._pool.end()
        # Such as what a session's ranks have started, whose parents have ended.
        await processes.end_descendants(os.getpid(), GIVE_UP_S)


def _print_error(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    # A forkserver that was ended during its work is replaced at the next launch; that is no error.
    if error is not None and not isinstance(error, (ChildProcessError, BrokenPipeError)):
        print("hydrogen_magic agent:", repr(error), file=sys.stderr)


def _delay_s(event: ev.Event) -> float:
    """Return how long an event may wait for others that are sent with it.

    A failure waits only until all that has arrived with it is read.
    """
    match event:
        case ev.RankFailed() | ev.RecordAwaited():
            return 0.0
        case ev.RankExited(exit_code=code):
            return _SOON_S if code == 0 else 0.0
        case ev.RankResult():
            return _SOON_S
    return _BATCH_S


def _reserved(link: KernelLink) -> socket.socket:
    """Reserve a port for the next gang's rendezvous.

    Until ranks are expected, it rejects connections: those of other users would fill the queue.
    Without ``SO_REUSEADDR``, which would let others bind the port too.
    """
    sock = socket.socket(network.family_of(link.bind))
    network.bind(link.ports, lambda port: sock.bind((link.bind, port)))
    return sock


def _address(reserved: socket.socket) -> msg.Address:
    return msg.Address(*reserved.getsockname()[:2])


def _raise_file_limit() -> None:
    """Raise the limit of descriptors to what the system allows: a rank takes five, and more if it is fed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
