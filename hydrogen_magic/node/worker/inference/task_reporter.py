"""A thread of Spark's Python worker that reports its tasks to the kernel and takes its commands.

It uses the channel of agents. The commands: end a task that Spark has cancelled (Spark itself would wait
for seconds), send the stacks of all threads, and stop reporting.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent import host_task
from hydrogen_magic.node.worker.inference.task_status import TaskCounter
from hydrogen_magic.transport.channel import AgentLink

_GRACE_S = 0.4
"""How long ``predict`` may handle the KeyboardInterrupt that ends it."""
_POLL_S = 0.02
_LAST_REPORT_S = 3.0
"""How long a failed task waits until the kernel has its last report: Spark ends its process at once."""
_MAX_ERROR_CHARACTERS = 4000


class TaskReporter:
    """Reports the tasks of one run in this process, one after another."""

    def __init__(self, report_to: Mapping[str, Any]) -> None:
        self.key = str(report_to["key"])
        self.is_closed = False
        """The kernel does not listen any more, or never did."""
        self._report_to = report_to
        self._lock = threading.Lock()
        self._task: TaskCounter | None = None
        self._ended: list[TaskCounter] = []
        self._stacks = ""
        self._is_received = threading.Event()
        """Set when the kernel has the report of the last failure, or will not get it."""
        self._wake: Callable[[], object] = lambda: None
        host, pid = socket.gethostname(), os.getpid()
        device = os.environ.get("HYDROGEN_MAGIC_DEVICE", "cpu")
        self._status = msg.TaskStatus(f"{host} {pid} {time.monotonic_ns()}", host, pid, device, ())
        threading.Thread(target=self._run, name="hydrogen_magic reporter", daemon=True).start()

    @contextmanager
    def reporting(self, task: TaskCounter) -> Iterator[None]:
        """Report ``task`` during the block, and how it ended."""
        self._task = task
        phase = "failed"
        try:
            yield
            phase = "done"
        except GeneratorExit:
            phase = "left"
            raise
        except BaseException as error:
            task.fail(str(error)[:_MAX_ERROR_CHARACTERS])
            raise
        finally:
            self._end(task, phase)

    def _end(self, task: TaskCounter, phase: str) -> None:
        with self._lock:  # so that a stop does not hit the next task
            task.enter(phase)
            self._task = None
            if not self.is_closed:
                self._ended.append(task)
                self._is_received.clear()
        if phase == "failed":
            with suppress(RuntimeError):  # the loop has just ended
                self._wake()
            self._is_received.wait(_LAST_REPORT_S)

    # ── the thread ──

    def _run(self) -> None:
        with suppress(Exception):  # the task goes on without reports
            asyncio.run(self._connect())
        with self._lock:
            self.is_closed = True
            self._ended.clear()
            self._is_received.set()
            self._wake = lambda: None

    async def _connect(self) -> None:
        endpoint, _ = host_task.reachable(self._report_to["endpoints"], "executors")
        server_key, secret = (str(self._report_to[name]) for name in ("server_key", "secret"))
        link = AgentLink(endpoint, server_key, secret)
        try:
            await self._report(link)
        finally:
            link.close()

    async def _report(self, link: AgentLink) -> None:
        """Report at intervals; the kernel may answer each report with a command."""
        lost = asyncio.ensure_future(link.lost())
        commands = asyncio.ensure_future(self._follow_commands(link))
        failed, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(failed.set)
        try:
            while not (lost.done() or commands.done()):
                self._send(link)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(failed.wait(), self._report_to["interval_s"])
                failed.clear()
        finally:
            lost.cancel()
            commands.cancel()

    async def _follow_commands(self, link: AgentLink) -> None:
        """Execute the kernel's commands; return when it wants no more reports."""
        while True:
            message, _ = await link.receive()
            command = msg.decode(message, msg.TaskCommand)
            if isinstance(command, msg.EndTask):
                await self._end_task(link)
            elif isinstance(command, msg.FailureReceived):
                self._is_received.set()
            elif isinstance(command, msg.ReportStacks):
                self._stacks = _stacks()
            elif isinstance(command, msg.Quit):
                return

    def _send(self, link: AgentLink) -> None:
        with self._lock:
            tasks, self._ended = self._ended, []
            stacks, self._stacks = self._stacks, ""
            if self._task is not None:
                tasks.append(self._task)
            progress = tuple(task.progress for task in tasks)
            status = replace(self._status, tasks=progress, stacks=stacks)
        link.send(status)

    async def _end_task(self, link: AgentLink) -> None:
        """End the task, which Spark has cancelled: by KeyboardInterrupt, else with the process."""
        with self._lock:
            task = self._task
            if task is None:
                return
            os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + _GRACE_S
        while self._task is task and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if self._task is task:
            task.enter("left")
            self._send(link)
            await asyncio.sleep(_POLL_S)  # until ZeroMQ has sent it
        with self._lock:
            if self._task is task:
                os.kill(os.getpid(), signal.SIGKILL)


def _stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
