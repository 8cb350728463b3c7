"""Sends the events of a rank to its agent at intervals, from a daemon thread."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.reporting.send_interval import TICK_S, SendInterval

_GPU_WAIT_S = 0.5
"""How long a post waits for values that are being computed on a GPU, which may hang."""

_LAST_GPU_WAIT_S = 2.0
"""The same after a cell that has succeeded: a loop that never waits for its GPU may be ahead of it. Less than
the time of grace of a stop, and than the agent's limit for a rank that does nothing.
"""

_CLOSE_S = 2.0
"""How long a finished rank waits for an agent that does not read its last messages."""


class _SendingThread:
    """A daemon thread that runs one function after another: to start one takes half a millisecond."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self.thread = threading.Thread(
            target=self._run, name="hydrogen_magic.reporter", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            finally:
                self._is_idle.set()

    def begin(self, work: Callable[[], None]) -> None:
        """Let the thread call ``work``; it must be idle."""
        self._is_idle.clear()
        self._work.put(work)

    @property
    def is_busy(self) -> bool:
        """Whether its function has not returned, in the process that has this thread."""
        return self.thread.is_alive() and not self._is_idle.is_set()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of its function."""
        self._is_idle.wait(timeout_s)

    def end(self) -> None:
        """End the idle thread."""
        self._work.put(None)
        self.thread.join()


_idle: list[_SendingThread] = []
"""The thread of the cell before, in a process that runs several cells."""
os.register_at_fork(after_in_child=_idle.clear)


class EventSender:
    """Sends what ``collect`` returns; ``tick`` is called 20 times a second, and tells whether that is urgent.

    ``collect`` takes the time in seconds that it may wait for values of a GPU, and whether this is the end.
    ``send`` may block; after the start, only this thread calls it, so that no signal handler of the main
    thread can interrupt a message. If ``send`` raises ``OSError``, the agent has exited: sending stops, and
    the end of this process is left to others.
    """

    def __init__(
        self,
        send: Callable[[Sequence[ev.Event]], None],
        collect: Callable[[float, bool], Iterable[ev.Event]],
        tick: Callable[[], bool],
        interval: SendInterval,
    ) -> None:
        self._send = send
        self._collect = collect
        self._tick = tick
        self._interval = interval
        self._posted: deque[tuple[ev.Event, threading.Event]] = deque()
        self._thread: _SendingThread | None = None
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._gpu_wait_s = _GPU_WAIT_S
        self._is_closing = False
        self._is_agent_gone = False

    def start(self) -> None:
        """Start sending in a thread."""
        self._thread = _idle.pop() if _idle else _SendingThread()
        self._thread.begin(self._run)

    def post_soon(self, event: ev.Event) -> None:
        """Send ``event`` at once, after all collected events, without waiting for that."""
        self._posted.append((event, threading.Event()))
        self._wake.set()

    def wake(self) -> None:
        """Call ``tick`` now."""
        self._wake.set()

    def post(self, event: ev.Event) -> None:
        """Send ``event`` at once, after all collected events; return when it was sent."""
        sending = self._thread
        is_own = sending is not None and sending.thread is threading.current_thread()
        if sending is None or is_own or not sending.is_busy:
            self._flush(event)
            return
        done = threading.Event()
        self._posted.append((event, done))
        self._wake.set()
        while not done.wait(0.5):
            if not sending.is_busy:  # the thread ended before it saw this
                self._send_posted()

    def close(self, *, is_patient: bool = False, keeps_thread: bool = False) -> None:
        """Send all events and end the thread, within seconds even if the agent hangs.

        ``is_patient``: wait longer for values of a GPU. ``keeps_thread``: the next sender of this process
        needs it.
        """
        if is_patient:
            self._gpu_wait_s = _LAST_GPU_WAIT_S
        self._is_closing = True
        self._wake.set()
        sending, self._thread = self._thread, None
        if sending is not None:
            sending.wait(_CLOSE_S + self._gpu_wait_s)
        if sending is None or not sending.is_busy:
            self._send_posted(is_last=True)  # if there was no thread, or it has failed
        if sending is not None and not sending.is_busy:
            _idle.append(sending) if keeps_thread and sending.thread.is_alive() else sending.end()

    def _run(self) -> None:
        while not (self._is_closing or self._is_agent_gone):
            self._wake.wait(TICK_S)
            self._wake.clear()
            is_urgent = self._tick()
            if self._interval.is_due(is_urgent=is_urgent or bool(self._posted)):
                self._send_posted()
        self._send_posted(is_last=True)

    def _send_posted(self, *, is_last: bool = False) -> None:
        # Recorded data precedes a posted event: take posted events first, recorded data second.
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        try:
            self._flush(*(event for event, _ in posted), is_last=is_last)
        finally:
            for _, done in posted:
                done.set()

    def _flush(self, *posted: ev.Event, is_last: bool = False) -> None:
        with self._sending:
            if self._is_agent_gone:
                return
            wait_s = self._gpu_wait_s if is_last else _GPU_WAIT_S if posted else 0.0
            batch = [*self._collect(wait_s, is_last), *posted]
            if not batch:
                return
            try:
                self._send(batch)
            except OSError:
                self._is_agent_gone = True
