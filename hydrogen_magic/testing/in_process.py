"""One rank in a thread of this process, driven like any other gang: no agent, no fork.

For tests of a rendezvous or an observer, and as an example of what a placement has to do. The rank
changes ``os.environ`` of this process while it runs, so one gang runs at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import LOOPBACK, JobSpec, Plan, Slot
from hydrogen_magic.driver.placements import AgentGroup, Attempt, EventSink, Placement
from hydrogen_magic.driver.placements.inline import InlinePlacement
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.serialization.payload import Payload

__all__ = ["InProcessPlacement"]


class InProcessPlacement(Placement):
    """One rank in a thread of this process."""

    def plan(self, spec: JobSpec) -> Plan:
        if spec.np != 1:
            raise PlacementError(
                f"np={spec.np} is not possible: this process can be only one rank; use np=1"
            )
        return Plan((Slot(0, 0, 0, 1, 1, 1, os.uname().nodename, interface=LOOPBACK),))

    def open(self, spec: JobSpec) -> _ThreadGroup:
        return _ThreadGroup()


class _ThreadGroup(AgentGroup):
    """The thread of the rank."""

    def __init__(self) -> None:
        self._thread_id: int | None = None
        """Of the thread that runs the rank, while it runs."""
        self._is_stopped = False

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        if self._is_stopped:
            return
        ended = asyncio.Event()
        end = partial(asyncio.get_running_loop().call_soon_threadsafe, ended.set)
        # Daemons: a rank that cannot be interrupted does not keep this process from its end.
        rank = threading.Thread(target=self._run, args=(attempt, _on_loop(sink)), daemon=True)
        rank.start()
        # Another thread reports the end: a late interrupt may stop the rank's thread anywhere.
        threading.Thread(target=_report_end, args=(rank, end), daemon=True).start()
        await ended.wait()

    def _run(self, attempt: Attempt, sink: EventSink) -> None:
        self._thread_id = threading.get_ident()
        try:
            with suppress(BaseException):  # the rank's own: its events have reported it
                InlinePlacement().run_here(attempt, sink)
        finally:
            self._thread_id = None

    def stop(self) -> None:
        """Raise KeyboardInterrupt in the rank; it takes effect at its next line of Python."""
        self._is_stopped = True
        thread_id = self._thread_id
        if thread_id is not None:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), interrupt)

    def kill(self) -> None:
        self.stop()

    def send(self, command: msg.AgentCommand) -> None:
        """A rank in this process reads its standard input, and has no recording, profile or stacks."""
        if isinstance(command, msg.KillRanks):
            self.stop()

    async def release(self) -> None:
        """Nothing is kept."""


def _report_end(rank: threading.Thread, end: Callable[[], object]) -> None:
    rank.join()
    end()


def _on_loop(sink: EventSink) -> EventSink:
    """Return a sink for another thread: it forwards its events to the running loop."""
    loop = asyncio.get_running_loop()

    def emit(event: ev.Event) -> None:
        loop.call_soon_threadsafe(sink.emit, event)

    def deliver(rank: int, part: msg.ResultPart, section: Payload) -> None:
        loop.call_soon_threadsafe(sink.deliver, rank, part, section)

    return EventSink(emit, deliver)
