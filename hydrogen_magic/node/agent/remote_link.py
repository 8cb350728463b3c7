"""The link from an agent to a kernel on another machine, apart from the channel.

The agent was started by a task (:mod:`~hydrogen_magic.node.agent.host_task`) and serves all tasks
that attach to it: every task of a gang on this machine connects by an abstract Unix socket, which
leaves nothing on disk, and stays connected until its rank is over. So the death of a task is noticed
at once, and the task returns after the cleanup. Closures, rows, results and logs are sent over the channel
in parts. Between gangs the agent stays warm for a while. It exits when no task attaches in that time,
with the parent of the task that started it, or when the connection to the kernel breaks.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import network, processes
from hydrogen_magic.core.events import ErrorReport
from hydrogen_magic.core.timeline_files import given_path, path_of_given
from hydrogen_magic.core.units import size_text
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node import dataset_handle
from hydrogen_magic.node.agent.host_files import HostFiles
from hydrogen_magic.node.agent.kernel_link import KernelLink
from hydrogen_magic.node.agent.log_shipping import Clock, LogShipper, usable_directory
from hydrogen_magic.node.agent.rank_group import RankGroup
from hydrogen_magic.node.worker.checkpoints import checkpoint
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport import framing
from hydrogen_magic.transport.background_tasks import BackgroundTasks
from hydrogen_magic.transport.channel import AgentLink
from hydrogen_magic.transport.file_transfer import Incoming, Outgoing
from hydrogen_magic.transport.forwarded_channel import ForwardedChannels

_BEAT_S = 2.0
_REPORT_S = 0.5
_LARGE_BYTES = 64 << 20
"""Smaller results are sent within a second on a gigabit line."""
_IDLE_WITH_DATA_S = 600.0
"""How long an agent that holds data stays without a gang: gigabytes would have to be sent again."""
_Key = tuple[str, int]
"""Gang and attempt."""


@dataclass(eq=False)
class _Task:
    """One connection on the Unix socket."""

    sock: socket.socket
    reader: framing.FrameReader
    hello: msg.TaskHello | None = None
    """None until it has arrived."""

    def answer(self, message: msg.TaskAnswer) -> bool:
        """Return whether the task was still connected to receive it."""
        with suppress(OSError):
            framing.send(self.sock, message)
            return True
        return False


class RemoteLink(KernelLink):
    """See :class:`~hydrogen_magic.node.agent.kernel_link.KernelLink`.

    When the kernel has ended, nothing is left to do here: the gang's record is on its machine.
    """

    def __init__(self, config: msg.RemoteAgentConfig, listening: socket.socket) -> None:
        self.bind = config.bind
        self.ports = config.ports
        self.interface = network.interface_of(self.bind)
        self._config = config
        self._folder = Path(config.folder)
        self._listening = listening
        self._connections: set[_Task] = set()
        self._serving: _Key | None = (config.gang, config.attempt)
        """Whose tasks are attached."""
        self._attached: dict[int, tuple[_Task, msg.TaskHello]] = {}
        """By the task's number."""
        self._group: RankGroup | None = None
        self._is_released = False
        """The kernel has released the tasks of this group, which has not ended yet."""
        self._ranks: dict[int, int] = {}
        """The task's number -> rank."""
        self._needed: list[Path] = []
        """Folders that the gang's ranks need here."""
        self._parents: dict[int, int] = {}
        """Process id -> pidfd."""
        self._incoming = Incoming()
        self._shipping = BackgroundTasks()
        self._next_checkpoints: dict[str, tuple[msg.RankFile, int] | None] = {}
        """Names of checkpoints that are being sent -> the newest state saved since, and its descriptor."""
        self._background = BackgroundTasks()
        self._clock = Clock()
        self._logs: LogShipper | None = None
        self._idle_since = time.monotonic()
        self._is_retiring = False

    # ── life ──

    def begin(
        self, link: AgentLink, over: Callable[[], None], expect_ranks: Callable[[], None]
    ) -> None:
        self._link, self._over, self._expect_ranks = link, over, expect_ranks
        self._outgoing = Outgoing(link.send)
        self._channels = ForwardedChannels(self._outgoing, self._warn)
        self._files = HostFiles(self._config, link.send)
        self._watch_parent(self._config.parent_pid)
        self._listening.setblocking(False)
        self._background.start(self._send_heartbeats())
        self._background.start(self._watch_link())

    async def _send_heartbeats(self) -> None:
        """Send heartbeats to the kernel, compare clocks, and exit after a long time without tasks."""
        while True:
            if self._attached or self._group is not None:
                self._idle_since = time.monotonic()
            idle_s = self._config.idle_s if self._files.datasets.is_empty else _IDLE_WITH_DATA_S
            if time.monotonic() - self._idle_since > idle_s:
                self._exit()
            self._link.send(msg.Heartbeat(time.monotonic()))
            await asyncio.sleep(_BEAT_S)

    def _exit(self) -> None:
        self._stop_listening()
        self._link.send(msg.Leaving())
        self._over()

    async def _watch_link(self) -> None:
        await self._link.lost()
        self._over()

    def _watch_parent(self, pid: int | None) -> None:
        if pid is None or pid in self._parents:
            return
        loop = asyncio.get_running_loop()
        try:
            fd = self._parents[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            if pid == self._config.parent_pid:  # it ended while this process was starting
                loop.call_soon(self._exit_after_gang)
            return
        loop.add_reader(fd, self._on_parents_end, pid)

    def _on_parents_end(self, pid: int) -> None:
        fd = self._parents.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        for task, hello in [one for one in self._attached.values() if one[1].parent_pid == pid]:
            self._on_task_lost(task, f"its {hello.parent} ended")
        if pid == self._config.parent_pid:
            self._exit_after_gang()  # at once, or after the kernel has received the end of its gang

    def _exit_after_gang(self) -> None:
        """Serve no other gang after this one: the directory of our files is removed with that process."""
        self._is_retiring = True
        self._stop_listening()
        if not self._attached and self._group is None:
            self._exit()

    def _stop_listening(self) -> None:
        """Release our name: the next task that looks for it starts its own agent."""
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        self._background.cancel()
        self._next_checkpoints = dict.fromkeys(self._next_checkpoints)  # none follows
        self._shipping.cancel()
        for fd in self._parents.values():
            loop.remove_reader(fd)
            os.close(fd)
        self._stop_listening()
        for task in list(self._connections):
            self._hang_up(task)
        self._files.close()
        self._incoming.drop()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ── tasks ──

    def _accept_tasks(self) -> None:
        """Accept tasks once the kernel has accepted us: no task waits for an agent without a kernel."""
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:
            return
        # Any user of this machine may connect to an abstract socket.
        if not framing.is_of_this_user(sock):
            sock.close()
            return
        task = _Task(sock, framing.FrameReader(sock))
        self._connections.add(task)
        asyncio.get_running_loop().add_reader(sock, self._read, task)

    def _read(self, task: _Task) -> None:
        if not task.reader.feed(socket.MSG_DONTWAIT):
            kind = "task" if task.hello is None else task.hello.kind
            self._on_task_lost(task, f"the Python process of its {kind} ended")
            return
        for raw, _ in task.reader.messages():
            try:
                message = msg.decode(raw, msg.TaskMessage)
            except (
                msg.MessageError
            ) as error:  # from the same package as this agent: a fault of ours
                print("hydrogen_magic agent:", error, file=sys.stderr)
                self._hang_up(task)
                return
            if isinstance(message, msg.TaskHello):
                self._attach(task, message)
            else:
                task.answer(msg.TaskPong())

    def _attach(self, task: _Task, hello: msg.TaskHello) -> None:
        key = (hello.gang, hello.attempt)
        is_free = self._serving in (None, key)
        mark = self._config.env[processes.AGENT]
        accepted = msg.TaskAccepted(mark, str(self._folder), os.getpid())
        if not task.answer(accepted if is_free else msg.AgentBusy()) or not is_free:
            self._hang_up(task)
            return
        task.hello = hello
        self._expect_ranks()
        self._serving = key
        self._attached[hello.number] = (task, hello)
        self._watch_parent(hello.parent_pid)
        self._link.send(msg.TaskAttached(hello))

    def _hang_up(self, task: _Task) -> None:
        if task in self._connections:
            self._connections.discard(task)
            asyncio.get_running_loop().remove_reader(task.sock)
            task.reader.close()
            task.sock.close()

    def _on_task_lost(self, task: _Task, why: str) -> None:
        """A task has exited without being released: its rank must not continue without it."""
        # A task may outlive its parent, and must not end this process.
        task.answer(msg.TaskReleased())
        self._hang_up(task)
        hello = task.hello
        known = None if hello is None else self._attached.get(hello.number)
        if hello is None or known is None or known[0] is not task:
            return  # the tasks were started again, and another one has its number
        del self._attached[hello.number]
        rank = self._ranks.get(hello.number)
        where = f"{hello.place} on host {os.uname().nodename}".lstrip()
        why = f"{why} ({where})"
        if self._group is not None and rank is not None:
            self._group.fail_rank(rank, ErrorReport("TaskLost", why))
        else:
            self._link.send(msg.TaskDetached(hello, why))
        if not self._attached and self._group is None:
            self._serving = None

    def _release(self, key: _Key) -> None:
        """Let the tasks of an attempt return."""
        for number, (task, hello) in list(self._attached.items()):
            if (hello.gang, hello.attempt) == key:
                del self._attached[number]
                task.answer(msg.TaskReleased())
                self._hang_up(task)
        if self._serving == key and self._group is not None:
            self._is_released = True  # what the gang still sends, the next one must not end
        elif self._serving == key:
            self._serving = None
            self._incoming.drop()
            self._files.drop_incomplete()
        if self._is_retiring:
            self._exit()

    # ── messages of the kernel ──

    def take(self, command: msg.AgentCommand, data: memoryview | None) -> bool:
        match command:
            case msg.FilePart():
                self._take_part(command, memoryview(b"") if data is None else data)
            case msg.PartTaken():
                self._outgoing.acknowledged()
            case msg.ClockReading():
                is_sure = self._clock.note(command.sent_s, command.kernel_s)
                self._accept_tasks() if is_sure else self._link.send(
                    msg.Heartbeat(time.monotonic())
                )
            case msg.ReleaseTasks():
                self._files.stop_serving(command.gang)
                self._release((command.gang, command.attempt))
            case _:
                return self._files.handle(command)
        return True

    def _take_part(self, part: msg.FilePart, data: memoryview) -> None:
        self._link.send(msg.PartTaken())
        match part.label:
            case msg.ClosureLabel() | msg.FolderFile() as label:
                self._files.take(label, part, data)
            case msg.ChannelFrame() as label:
                if (fd := self._incoming.take(part, data)) is not None:
                    self._channels.take(label, fd)
            case msg.RankFile():
                raise msg.MessageError("a file of a rank must go to the kernel")

    # ── a gang ──

    def localized(self, request: msg.LaunchRequest) -> msg.LaunchRequest:
        self._incoming.drop()  # rows that were on their way when the attempt before ended
        record_dir = self._folder / "runs" / request.gang
        self._ranks = {one.task: one.rank for one in request.ranks if one.task is not None}
        task = self._nearest_task()
        env = {"OMP_NUM_THREADS": "1", **self._config.env, **(task.env if task else {})}
        shared = request.checkpoint_dir  # the kernel's own directory, where all machines see it
        checkpoints = Path(shared) if shared else self._files.checkpoints.folder / request.gang
        env |= {**checkpoint.environment(checkpoints, is_shared=bool(shared)), **request.env}
        env[dataset_handle.FOLDER] = str(self._files.datasets.folder)
        timeline = request.timeline
        if timeline is not None and given_path(timeline, env):
            # A path of the kernel's machine: the kernel writes what we send it there.
            env[timeline.variable] = path_of_given(timeline, str(record_dir), request.attempt)
        # Our code, then what the task imports; if all tasks were lost in the meantime, what the first did.
        own = self._config.sys_path
        sys_path = (own[0], *task.sys_path) if task else own
        fingerprint = request.fingerprint
        if archives := _archives(sys_path) - _archives(own):
            fingerprint = f"{fingerprint} with {sorted(archives)}"  # its forkserver lacks them
        cwd = usable_directory(request.cwd, self._folder / "work")
        self._needed = [record_dir, Path(cwd)] if shared else [record_dir, Path(cwd), checkpoints]
        return replace(
            request,
            fingerprint=fingerprint,
            record_dir=str(record_dir),
            env=env,
            cwd=cwd,
            sys_path=sys_path,
            clock_zero_s=self._clock.here(request.clock_zero_s),
        )

    def _nearest_task(self) -> msg.TaskHello | None:
        """Return the task whose directories all ranks use, None if all were lost in the meantime.

        Tasks of different parents have the same files in different directories. Those of the agent's own
        parent are preferred, so that consecutive gangs have the same module path.
        """
        hellos, parent = (hello for _, hello in self._attached.values()), self._config.parent_pid
        return min(
            hellos, key=lambda hello: (hello.parent_pid != parent, hello.number), default=None
        )

    async def launch_files(self, group: RankGroup) -> list[int]:
        """Wait for the closure, which arrives in parts; it is kept for the gang's later attempts."""
        self._group = group
        for needed in self._needed:
            try:
                needed.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                where = f"the folder {needed} on host {os.uname().nodename}"
                raise PlacementError(f"{where} cannot be made: {error.strerror}") from None
        folder, timelines = Path(group.record_dir), group.timelines.kept
        self._logs = LogShipper(group.gang, folder, timelines, self._send_log)
        self._logs.begin()
        closure = await self._files.whole_closure(group.gang, lambda: group.is_cancelled)
        channels = self._open_channels(group)
        return [memory_file("nothing") if closure is None else os.dup(closure.fd), *channels]

    def _warn(self, text: str) -> None:
        if self._group is not None:
            self._group.reporter.notice("warning", text)

    def _open_channels(self, group: RankGroup) -> list[int]:
        """Return the ranks' ends of their channels, if they are fed; forward ours to the kernel."""
        pairs = {rank: framing.pair() for rank in group.fed_ranks}
        ours = {rank: sock.detach() for rank, (sock, _) in pairs.items()}
        self._channels.open(group.gang, group.attempt, ours)
        return [sock.detach() for _, sock in pairs.values()]

    def send_file(self, file: msg.RankFile, fd: int) -> None:
        fd = os.dup(fd)
        if isinstance(file.content, msg.SavedCheckpoint):
            self._send_checkpoint(file.content.file_name, file, fd)
        else:
            self._shipping.start(self._ship_file(file, fd))

    def _send_checkpoint(self, name: str, file: msg.RankFile, fd: int) -> None:
        """Send a checkpoint after the one that is being sent, and only if it is the newest one then.

        A rank may save faster than the link transfers; the kernel needs the last state only.
        """
        if name not in self._next_checkpoints:
            self._next_checkpoints[name] = None
            self._shipping.start(self._ship_checkpoint(name, file, fd))
            return
        if (replaced := self._next_checkpoints[name]) is not None:
            os.close(replaced[1])
        self._next_checkpoints[name] = (file, fd)

    async def _ship_checkpoint(self, name: str, file: msg.RankFile, fd: int) -> None:
        try:
            await self._ship_file(file, fd)
        finally:
            if (following := self._next_checkpoints.pop(name)) is not None:
                self._send_checkpoint(name, *following)

    async def _ship_file(self, file: msg.RankFile, fd: int) -> None:
        try:
            await self._outgoing.send_file(file, fd, self._progress(file))
        finally:
            os.close(fd)

    def _progress(self, file: msg.RankFile) -> Callable[[int, int], None]:
        """Return what reports how much of a rank's result has been sent, if that takes a while."""
        group, reported_s = self._group, time.monotonic()

        def report(sent: int, size: int) -> None:
            nonlocal reported_s
            is_over = sent == size
            if group is None or not isinstance(file.content, msg.ResultPart) or size < _LARGE_BYTES:
                return
            if is_over or time.monotonic() - reported_s > _REPORT_S:
                reported_s = time.monotonic()
                text = f"sending {size_text(sent)} of {size_text(size)}"
                group.report_progress(file.rank, "" if is_over else text)

        return report

    async def _send_log(self, part: msg.RecordPart, data: bytes) -> None:
        await self._outgoing.send(part, memoryview(data))

    async def finish(self, group: RankGroup) -> None:
        try:
            await self._shipping.wait()
            await self._channels.close(group.gang, group.attempt, drains=True)
            if self._logs is not None:
                await self._logs.finish()
        finally:  # an agent that has a group does not exit
            self._logs = None
            shutil.rmtree(group.record_dir, ignore_errors=True)
            self._group = None
            self._ranks = {}
            if self._is_released and self._serving is not None:
                self._is_released = False
                self._release(self._serving)

    def released(self, gang: str, attempt: int) -> None:
        self._release((gang, attempt))


def _archives(sys_path: tuple[str, ...]) -> set[str]:
    """Return the names of a module path's archives, which may be added between gangs.

    Directories do not tell paths apart: each task's parent has its own.
    """
    return {os.path.basename(entry) for entry in sys_path if os.path.isfile(entry)}
