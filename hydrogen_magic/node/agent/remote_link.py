"""The link from an agent to a kernel on another machine, apart from the channel.

The agent was started by a Spark task and serves all tasks that attach to it: every barrier task of
a gang on this machine connects by an abstract Unix socket, which leaves nothing on disk, and stays
connected until its rank is over. So the death of a task is noticed at once, and the task returns
after the cleanup. Closures, results and logs are sent over the channel in parts. Between gangs the
agent stays warm for a while. It exits when no task attaches in that time, with the last executor
that it has served, or when the connection to the kernel breaks.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrogen_magic.core import processes
from hydrogen_magic.core.events import ErrorReport
from hydrogen_magic.core.job import DYNAMIC, HOROVOD_TIMELINE
from hydrogen_magic.core.units import size_text
from hydrogen_magic.horovod.node.timeline_follower import GIVEN, path_prefix
from hydrogen_magic.node.agent.log_shipping import Clock, LogShipper, usable_directory
from hydrogen_magic.node.agent.network import interface_of
from hydrogen_magic.node.agent.rank_group import RankGroup
from hydrogen_magic.node.worker import checkpoint
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport import framing
from hydrogen_magic.transport.channel import AgentLink
from hydrogen_magic.transport.file_transfer import Incoming, Outgoing, keep

__all__ = ["RemoteLink"]

_BEAT_S = 2.0
_POLL_S = 0.02
_REPORT_S = 0.5
_LARGE_BYTES = 64 << 20
"""Smaller results are sent within a second on a gigabit line."""
_Key = tuple[str, int]
"""Gang and attempt."""


@dataclass(eq=False)
class _Task:
    """One connection on the Unix socket."""

    sock: socket.socket
    reader: framing.FrameReader
    hello: dict[str, Any] = field(default_factory=dict)
    """The task's description of itself; empty until it arrives."""

    @property
    def key(self) -> _Key:
        return self.hello["gang"], self.hello["attempt"]

    def answer(self, message: dict[str, Any]) -> bool:
        """Return whether the task was still connected to receive it."""
        with suppress(OSError):
            framing.send(self.sock, message)
            return True
        return False


class RemoteLink:
    """See :class:`hydrogen_magic.node.agent.kernel_link.KernelLink`."""

    def __init__(self, boot: dict[str, Any], listening: socket.socket) -> None:
        self.bind = str(boot["bind"])
        self._boot = boot
        self._folder = Path(boot["folder"])
        self._listening = listening
        self._connections: set[_Task] = set()
        self._serving: _Key | None = None
        """The gang whose tasks are attached."""
        self._attached: dict[int, _Task] = {}
        """By partition."""
        self._group: RankGroup | None = None
        self._ranks: dict[int, int] = {}
        """Partition -> rank."""
        self._executors: dict[int, int] = {}
        """Process id -> pidfd."""
        self._closures: dict[str, int] = {}
        self._incoming = Incoming()
        self._handing_over: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
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
        self._watch_executor(int(self._boot["executor_pid"]))
        self._listening.setblocking(False)
        self._background = [asyncio.ensure_future(w) for w in (self._beat(), self._watch_link())]

    def hello(self) -> dict[str, Any]:
        return {"interface": interface_of(self.bind)}

    async def _beat(self) -> None:
        """Send heartbeats to the kernel, compare clocks, and exit after a long time without tasks."""
        while True:
            if self._attached or self._group is not None:
                self._idle_since = time.monotonic()
            if time.monotonic() - self._idle_since > self._boot["idle_s"]:
                self._leave()
            self._link.send({"beat": time.monotonic()})
            await asyncio.sleep(_BEAT_S)

    def _leave(self) -> None:
        self._stop_listening()
        self._link.send({"bye": True})
        self._over()

    async def _watch_link(self) -> None:
        await self._link.lost()
        self._over()

    def _watch_executor(self, pid: int) -> None:
        if pid in self._executors:
            return
        try:
            fd = self._executors[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        asyncio.get_running_loop().add_reader(fd, self._on_executors_end, pid)

    def _on_executors_end(self, pid: int) -> None:
        fd = self._executors.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        for task in [t for t in self._attached.values() if t.hello["executor_pid"] == pid]:
            self._lose(task, "its Spark executor ended")
        if pid == self._boot["executor_pid"]:
            self._retire()  # at once, or after the kernel has received the end of its gang

    def _retire(self) -> None:
        """Serve no other gang after this one: our files are in a directory that is removed with
        that executor.
        """
        self._is_retiring = True
        self._stop_listening()
        if not self._attached and self._group is None:
            self._leave()

    def _stop_listening(self) -> None:
        """Release our name: the next task that looks for it starts its own agent."""
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()

    def kernel_ended(self, group: RankGroup) -> None:
        """The record is not on this machine."""

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for work in (*self._background, *self._handing_over):
            work.cancel()
        for fd in self._executors.values():
            loop.remove_reader(fd)
            os.close(fd)
        self._stop_listening()
        for task in list(self._connections):
            self._hang_up(task)
        for fd in self._closures.values():
            os.close(fd)
        self._incoming.drop()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ── tasks ──

    def _welcome_tasks(self) -> None:
        """Accept tasks after the kernel has accepted us: a task must not wait for an agent without
        a kernel.
        """
        if self._listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:
            return
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():  # any user of this machine may connect to an abstract socket
            sock.close()
            return
        task = _Task(sock, framing.FrameReader(sock))
        self._connections.add(task)
        asyncio.get_running_loop().add_reader(sock, self._read, task)

    def _read(self, task: _Task) -> None:
        if not task.reader.feed(socket.MSG_DONTWAIT):
            self._lose(task, "the Python process of its Spark task ended")
            return
        for message, _ in task.reader.messages():
            if "ping" in message:
                task.answer({"pong": True})
            else:
                self._attach(task, message)

    def _attach(self, task: _Task, hello: dict[str, Any]) -> None:
        is_free = self._serving in (None, (hello["gang"], hello["attempt"]))
        mark = self._boot["env"][processes.AGENT]
        about = {"attached": mark, "folder": str(self._folder), "pid": os.getpid()}
        answer = about if is_free else {"busy": True}
        if not task.answer(answer) or not is_free:
            self._hang_up(task)
            return
        task.hello = hello
        self._expect_ranks()
        self._serving = task.key
        self._attached[hello["partition"]] = task
        self._watch_executor(hello["executor_pid"])
        self._link.send({"attached": hello})

    def _hang_up(self, task: _Task) -> None:
        if task in self._connections:
            self._connections.discard(task)
            asyncio.get_running_loop().remove_reader(task.sock)
            task.reader.close()
            task.sock.close()

    def _lose(self, task: _Task, why: str) -> None:
        """A task has exited without being released: its rank must not continue without it."""
        task.answer({"lost": True})  # a worker may outlive its executor; it must not kill us
        self._hang_up(task)
        if not task.hello or self._attached.pop(task.hello["partition"], None) is None:
            return
        rank = self._ranks.get(task.hello["partition"])
        where = f"executor {task.hello['executor']} on host {os.uname().nodename}"
        if self._group is not None and rank is not None:
            self._group.lose(rank, ErrorReport("SparkTaskLost", f"{why} ({where})"))
        else:
            self._link.send({"detached": task.hello, "why": f"{why} ({where})"})
        if not self._attached and self._group is None:
            self._serving = None

    def _release(self, key: _Key) -> None:
        """Let the tasks of an attempt return."""
        for partition, task in list(self._attached.items()):
            if task.key == key:
                del self._attached[partition]
                task.answer({"done": True})
                self._hang_up(task)
        if self._serving == key:
            self._serving = None
            self._incoming.drop()  # a closure that was on its way when the gang was stopped
        if self._is_retiring:
            self._leave()

    # ── messages of the kernel ──

    def take(self, message: dict[str, Any]) -> bool:
        action = message["do"]
        if action == "part":
            self._take_part(message["part"], message["blob"])
        elif action == "got":
            self._outgoing.acknowledged()
        elif action == "clock":
            is_sure = self._clock.note(float(message["sent"]), float(message["at"]))
            self._welcome_tasks() if is_sure else self._link.send({"beat": time.monotonic()})
        elif action == "forget":
            shutil.rmtree(self._own_checkpoints(message["gang"]), ignore_errors=True)
        elif action == "release":
            self._release((message["gang"], message["attempt"]))
        else:
            return False
        return True

    def _take_part(self, label: dict[str, Any], data: memoryview) -> None:
        fd = self._incoming.take(label, data)
        self._link.send({"got": True})
        if fd is None:
            return
        if "closure" in label:
            for old in self._closures.values():
                os.close(old)
            self._closures = {label["closure"]: fd}
            for folder in self._folder.glob("checkpoints/*"):
                if folder.name != label["closure"]:
                    shutil.rmtree(folder, ignore_errors=True)
        else:
            self._keep_checkpoint(label, fd)

    def _keep_checkpoint(self, label: dict[str, Any], fd: int) -> None:
        try:
            keep(fd, self._own_checkpoints(label["gang"]) / Path(label["checkpoint"]).name)
        finally:
            os.close(fd)

    def _own_checkpoints(self, gang: str) -> Path:
        folder = self._folder / "checkpoints" / gang
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ── a gang ──

    def localized(self, launch: dict[str, Any]) -> dict[str, Any]:
        record_dir = self._folder / "runs" / launch["gang"]
        record_dir.mkdir(parents=True, exist_ok=True)
        self._ranks = {slot["partition"]: slot["rank"] for slot in launch["slots"]}
        env = {"OMP_NUM_THREADS": "1", **self._boot["env"]}
        env |= {**self._checkpoints(launch), **launch["env"]}
        if env.get(HOROVOD_TIMELINE, DYNAMIC) != DYNAMIC:
            # A path of the kernel's machine: the kernel writes the data that we send there.
            env[HOROVOD_TIMELINE] = f"{path_prefix(str(record_dir), launch['attempt'])}{GIVEN}.json"
        return {
            **launch, "record_dir": str(record_dir), "env": env,
            "cwd": usable_directory(launch["cwd"], self._folder / "work"),
            "sys_path": self._boot["sys_path"],
            "clock_zero_s": self._clock.here(launch["clock_zero_s"]),
        }  # fmt: skip

    def _checkpoints(self, launch: dict[str, Any]) -> dict[str, str]:
        """Return the directory of checkpoints: the kernel's own if all machines share it."""
        shared = launch["checkpoints"]
        folder = Path(shared) if shared else self._own_checkpoints(launch["gang"])
        return dict(checkpoint.environment(folder, is_shared=bool(shared)))

    async def handed(self, group: RankGroup) -> list[int]:
        """Wait for the closure, which arrives in parts; it is kept for the gang's later attempts."""
        self._group = group
        self._logs = LogShipper(Path(group.record_dir), group.timelines.kept, self._send_log)
        self._logs.begin()
        while group.gang not in self._closures and not group.is_cancelled:
            await asyncio.sleep(_POLL_S)
        fd = self._closures.get(group.gang)
        return [memory_file("nothing") if fd is None else os.dup(fd)]

    def hand_over(self, label: dict[str, Any], fd: int) -> None:
        self._in_background(self._send_file(label, os.dup(fd)))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    async def _send_file(self, label: dict[str, Any], fd: int) -> None:
        try:
            await self._outgoing.send_file(label, fd, self._progress(label))
        finally:
            os.close(fd)

    def _progress(self, label: dict[str, Any]) -> Callable[[int, int], None]:
        """Return a function that reports how much of a rank's result has been sent, if that takes long."""
        group, reported_s = self._group, time.monotonic()

        def report(sent: int, size: int) -> None:
            nonlocal reported_s
            is_over = sent == size
            if group is None or "result" not in label or size < _LARGE_BYTES:
                return
            if is_over or time.monotonic() - reported_s > _REPORT_S:
                reported_s = time.monotonic()
                text = f"sending {size_text(sent)} of {size_text(size)}"
                group.report_progress(label["rank"], "" if is_over else text)

        return report

    async def _send_log(self, label: dict[str, Any], data: bytes) -> None:
        assert self._group is not None
        await self._outgoing.send({**label, "gang": self._group.gang}, memoryview(data))

    async def finish(self, group: RankGroup) -> None:
        while self._handing_over:
            await asyncio.wait(self._handing_over)
        if self._logs is not None:
            await self._logs.finish()
            self._logs = None
        shutil.rmtree(group.record_dir, ignore_errors=True)
        self._group = None
        self._ranks = {}

    def released(self, gang: str, attempt: int) -> None:
        self._release((gang, attempt))
