"""Sends the events of a rank to its agent at intervals, from a daemon thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.send_interval import TICK_S, SendInterval

_GPU_WAIT_S = 0.5
"""How long a post waits for values that are being computed on a GPU, which may hang."""

_LAST_GPU_WAIT_S = 2.0
"""The same after a cell that has succeeded: a loop that never waits for its GPU may be ahead of it. Less than
the time of grace of a stop, and than the agent's limit for a rank that does nothing.
"""

_CLOSE_S = 2.0
"""How long a finished rank waits for an agent that does not read its last messages."""


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
        self._thread: threading.Thread | None = None
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._gpu_wait_s = _GPU_WAIT_S
        self._is_closing = False
        self._is_agent_gone = False

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(
            target=self._run, name="hydrogen_magic.reporter", daemon=True
        )
        self._thread.start()

    def post_soon(self, event: ev.Event) -> None:
        """Send ``event`` at once, after all collected events, without waiting for that."""
        self._posted.append((event, threading.Event()))
        self._wake.set()

    def wake(self) -> None:
        """Call ``tick`` now."""
        self._wake.set()

    def post(self, event: ev.Event) -> None:
        """Send ``event`` at once, after all collected events; return when it was sent."""
        thread = self._thread
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            self._flush(event)
            return
        done = threading.Event()
        self._posted.append((event, done))
        self._wake.set()
        while not done.wait(0.5):
            if not thread.is_alive():  # the thread ended before it saw this
                self._send_posted()

    def close(self, *, is_patient: bool = False) -> None:
        """Send all events and end the thread, within seconds even if the agent hangs.

        ``is_patient``: wait longer for values of a GPU.
        """
        if is_patient:
            self._gpu_wait_s = _LAST_GPU_WAIT_S
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S + self._gpu_wait_s)
        if self._thread is None or not self._thread.is_alive():
            self._send_posted(is_last=True)  # if there was no thread, or it has failed

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
