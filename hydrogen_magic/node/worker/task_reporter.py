"""The thread of a Spark Python worker that reports on its tasks to the kernel and receives requests.

It uses the same channel as agents. The kernel may request that a task cancelled by Spark ends now (Spark
itself would wait for seconds), or the stacks of its threads.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from hydrogen_magic.core.messages import (
    EndTask,
    Quit,
    ReportStacks,
    TaskCommand,
    TaskStatus,
    decode,
)
from hydrogen_magic.node.worker.task_status import TaskCounter
from hydrogen_magic.transport.channel import AgentLink

__all__ = ["TaskReporter"]

_REACH_S = 3.0
"""How long one of the kernel's addresses may take to answer."""
_GRACE_S = 0.4
"""How long ``predict`` may clean up after the KeyboardInterrupt that ends it."""
_POLL_S = 0.02
_LAST_WORD_S = 0.3
"""How long a failed task may wait until its report was sent: Spark ends its process at once."""
_LONGEST = 4000
"""Maximum length of the report of a failed task, in characters."""


class TaskReporter:
    """Reports the tasks of one run in this process, which has one at a time."""

    def __init__(self, tell: Mapping[str, Any]) -> None:
        self.key = str(tell["key"])
        self.is_over = False
        """The kernel no longer listens, or never did."""
        self._tell = tell
        self._lock = threading.Lock()
        self._task: TaskCounter | None = None
        self._ended: list[TaskCounter] = []
        self._stacks = ""
        self._has_told = threading.Event()
        """Set when all reports were sent."""
        self._wake: Callable[[], object] = lambda: None
        host, pid = socket.gethostname(), os.getpid()
        device = os.environ.get("HYDROGEN_MAGIC_DEVICE", "cpu")
        worker = f"{host} {pid} {time.monotonic_ns()}"
        self._about = TaskStatus(worker, host, pid, device, tasks=())
        threading.Thread(target=self._run, name="hydrogen_magic telling", daemon=True).start()

    # ── beside the task ──

    @contextmanager
    def telling(self, task: TaskCounter) -> Iterator[None]:
        """Report ``task`` until the block ends, and its result."""
        self._task = task
        phase = "failed"
        try:
            yield
            phase = "done"
        except GeneratorExit:
            phase = "left"
            raise
        except BaseException as error:
            task.fail(str(error)[:_LONGEST])
            raise
        finally:
            with self._lock:  # so that a later task is not ended by mistake
                task.enter(phase)
                self._task = None
                if not self.is_over:
                    self._ended.append(task)
                    self._has_told.clear()
            if phase == "failed":
                with suppress(RuntimeError):  # its loop has just ended
                    self._wake()
                self._has_told.wait(_LAST_WORD_S)

    # ── the thread ──

    def _run(self) -> None:
        with suppress(Exception):  # whatever it is, it must not affect the task
            asyncio.run(self._talk())
        with self._lock:
            self.is_over = True
            self._ended.clear()
            self._has_told.set()
            self._wake = lambda: None

    async def _talk(self) -> None:
        endpoint = _reachable(self._tell["endpoints"])
        if endpoint is None:
            return
        keys = (str(self._tell[name]) for name in ("server_key", "key", "secret"))
        link = AgentLink(endpoint, *keys)
        try:
            await self._report(link)
        finally:
            link.close()

    async def _report(self, link: AgentLink) -> None:
        """Send reports repeatedly: the answer, if any, is a request of the kernel."""
        lost = asyncio.ensure_future(link.lost())
        hearing = asyncio.ensure_future(link.receive())
        failed, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(failed.set)
        try:
            while not lost.done():
                self._say(link)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(failed.wait(), self._tell["every_s"])
                failed.clear()
                if hearing.done():
                    message, _ = hearing.result()
                    if not await self._obey(decode(message, TaskCommand), link):
                        return
                    hearing = asyncio.ensure_future(link.receive())
        finally:
            lost.cancel()
            hearing.cancel()

    def _say(self, link: AgentLink) -> None:
        with self._lock:
            tasks, self._ended = self._ended, []
            stacks, self._stacks = self._stacks, ""
            if self._task is not None:
                tasks.append(self._task)
            progress = tuple(task.progress for task in tasks)
            status = replace(self._about, tasks=progress, stacks=stacks)
        link.send(status)
        self._has_told.set()

    async def _obey(self, command: TaskCommand, link: AgentLink) -> bool:
        """Do what the kernel wants; False when that is nothing any more."""
        if isinstance(command, EndTask):
            await self._end_task(link)
        elif isinstance(command, ReportStacks):
            self._stacks = _stacks()
        return not isinstance(command, Quit)

    async def _end_task(self, link: AgentLink) -> None:
        """End a task that Spark has cancelled: by a KeyboardInterrupt, or else with its process."""
        with self._lock:
            task = self._task
            if task is not None:
                os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + _GRACE_S
        while self._is_at(task) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if task is not None and self._is_at(task):
            task.enter("left")
            self._say(link)
            await asyncio.sleep(_POLL_S)  # until ZeroMQ has sent the message
        with self._lock:
            if self._is_at(task):
                os.kill(os.getpid(), signal.SIGKILL)

    def _is_at(self, task: TaskCounter | None) -> bool:
        return task is not None and self._task is task


def _reachable(endpoints: Sequence[str]) -> str | None:
    """Return the first reachable address of ``tcp://host:port``."""
    for endpoint in endpoints:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
            return endpoint
    return None


def _stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
