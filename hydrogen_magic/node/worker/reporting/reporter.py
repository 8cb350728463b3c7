"""Collects a rank's events at almost no cost; a thread sends them.

The user's code only appends to queues in memory, a microsecond per call. A daemon thread empties them every
tenth of a second (less often in large gangs), turns points into columns and passes the events to ``send``:
reporting never makes the rank wait for a socket, a GPU or a view.

Queues are bounded. If the agent does not read for a while, the oldest points of curves and the oldest spans
are dropped, and their number is reported; failures, phases and notices are never dropped.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.interactive.displays import DisplayQueue
from hydrogen_magic.node.worker.main_thread import Watch
from hydrogen_magic.node.worker.reporting.event_sender import EventSender
from hydrogen_magic.node.worker.reporting.point_queue import PointQueue
from hydrogen_magic.node.worker.reporting.progress_bars import ProgressBars
from hydrogen_magic.node.worker.reporting.send_interval import SendInterval
from hydrogen_magic.node.worker.reporting.spans import SpanQueue
from hydrogen_magic.node.worker.reporting.training_progress import CollectiveTracker, StepCounter
from hydrogen_magic.node.worker.reporting.unsynchronized import ExchangeCounter

_ANSWER_S = 0.002
"""An answer of the kernel takes about this long."""


class Reporter:
    """Collects the events of one rank.

    ``clock_zero_s`` is the ``time.monotonic()`` at which the gang's clock was 0. Events are sent at
    ``interval``, and sooner if a queue is half full or an event is posted.
    """

    def __init__(
        self,
        rank: int,
        clock_zero_s: float,
        send: Callable[[Sequence[ev.Event]], None],
        *,
        interval: SendInterval | None = None,
    ) -> None:
        interval = interval or SendInterval()
        self.rank = rank
        self.phase = "running"
        """Phase of the last :class:`~hydrogen_magic.core.events.RankPhase` that was posted."""
        self.is_recording = False
        """Whether activities of libraries (forward, backward, …) are recorded as spans."""
        self.on_tick: Callable[[], None] | None = None
        """Called every 50 ms by the sending thread; must not raise."""
        self.displays: DisplayQueue | None = None
        """What this rank displays below the cell; None if its displays are printed."""
        self.bars = ProgressBars(rank, self.now_s)
        self.steps = StepCounter()
        self.collectives = CollectiveTracker(self.now_ns)
        self.exchanges = ExchangeCounter(rank)
        self._zero_ns = round(clock_zero_s * 1e9)
        self._points = PointQueue(rank, interval)
        self._spans = SpanQueue()
        self._others: deque[ev.Event] = deque()
        self._watch = Watch(rank)
        self._sender = EventSender(send, self._collect, self._tick, interval)
        self._has_failed = False
        """:attr:`on_tick` has raised an error, which was reported."""

    # ── called by the user's code, through api and observe ───────────────────────────────────────

    def now_s(self) -> float:
        """Return the time on the gang's clock."""
        return self.now_ns() / 1e9

    def now_ns(self) -> int:
        """Return the time of a span on the gang's clock."""
        return self.at_ns(time.monotonic_ns())

    def at_ns(self, monotonic_ns: int) -> int:
        """Return the time on the gang's clock of a moment of :func:`time.monotonic_ns`."""
        return monotonic_ns - self._zero_ns

    def log(self, step: int | None, values: dict[str, Any]) -> None:
        """Record a point, see :meth:`PointQueue.add`."""
        self._points.add(self.now_s(), step, values)

    def span(
        self, name: str, start_ns: int, end_ns: int, depth: int, track: str = ev.SPANS
    ) -> None:
        """Record an interval on the gang's clock."""
        self._spans.add(name, start_ns, end_ns, depth, track)

    def notice(self, level: str, text: str) -> None:
        """Show a message to the user (``level``: info, warning or error)."""
        self.report(ev.Notice(self.now_s(), level, f"rank {self.rank}: {text}"))

    def report(self, event: ev.Event) -> None:
        """Send ``event`` with the next batch."""
        self._others.append(event)

    # ── called by the worker ─────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start sending events."""
        self._sender.start()

    def post(self, event: ev.Event, *, waits: bool = True) -> None:
        """Send ``event`` at once, after all earlier events; ``waits``: return when it was sent.

        Waits as long as the agent does not read. It waits at most half a second for values that are being
        computed on a GPU; later ones follow the event.
        """
        if isinstance(event, ev.RankPhase):
            self.phase = event.phase
        if waits:
            self._sender.post(event)
        else:
            self._sender.post_soon(event)

    def ask(self, event: ev.Event, has_answer: Callable[[float], bool], within_s: float) -> bool:
        """Post ``event`` and wait for its answer, which ``on_tick`` receives; return whether it came.

        ``has_answer`` waits for so many seconds. The answer is looked for more often than at every tick.
        """
        deadline = time.monotonic() + within_s
        self._sender.post_soon(event)
        while time.monotonic() < deadline:
            if has_answer(_ANSWER_S):
                return True
            self._sender.wake()
        return False

    def close(self, *, is_patient: bool = False, keeps_thread: bool = False) -> None:
        """Send all events and end the thread, within seconds even if the agent hangs.

        ``is_patient``: wait longer for logged values that a GPU still computes. ``keeps_thread``: this
        process runs another cell.
        """
        if current() is self:
            install(None)
        self._sender.close(is_patient=is_patient, keeps_thread=keeps_thread)

    # ── on the sending thread ────────────────────────────────────────────────────────────────────

    def _tick(self) -> bool:
        seen = list(self._watch.poll(self.now_s(), self.phase, self.collectives.current))
        self._others.extend(seen)
        if self.on_tick is not None:
            try:
                self.on_tick()
            except Exception as error:
                # A fault of ours: without this thread, no event would be sent.
                if not self._has_failed:
                    self._has_failed = True
                    text = f"a command was not carried out: {type(error).__name__}: {error}"
                    self.notice("warning", text)
        return bool(seen) or self._spans.is_half_full()

    def _collect(self, wait_s: float, is_last: bool) -> Iterator[ev.Event]:
        at_s = self.now_s()
        yield from self._points.take(at_s, wait_s, is_last=is_last)
        if wait_s or self._others or self._spans.is_due(at_s):  # such as a completed wait
            yield from self._spans.take(at_s, self.rank)
        if (n_steps := self.steps.take_changed()) is not None:
            yield ev.Steps(at_s, self.rank, n_steps)
        if text := self.exchanges.warning(self.steps.count, is_over=self.phase == "finishing"):
            self.notice("warning", text)
        yield from self.bars.take()
        if self.displays is not None:
            yield from self.displays.take(at_s, is_last=is_last)
        while self._others:
            yield self._others.popleft()


class _ProcessReporter:
    """The reporter of this process: observers are called by libraries, which cannot pass one on."""

    reporter: Reporter | None = None
    has_warned: mmap.mmap | None = None
    """One byte that the rank shares with processes that it forks: it is not 0 after a warning of one."""


_process = _ProcessReporter()


def current() -> Reporter | None:
    """Return this process's reporter, None if it is not (or no longer) a rank."""
    return _process.reporter


def notice(level: str, text: str) -> None:
    """Show a message to the user; ignored in a process that is no rank."""
    reporter = current()
    if reporter is not None:
        reporter.notice(level, text)


def install(reporter: Reporter | None) -> None:
    """Make ``reporter`` the reporter of this process."""
    _process.reporter = reporter
    if reporter is not None:
        _process.has_warned = mmap.mmap(-1, 1)


def may_warn() -> bool:
    """Return whether no process forked by this rank has asked this before; in other processes always true."""
    shared = _process.has_warned
    if shared is None:
        return True
    before, shared[0] = shared[0], 1
    return not before


# A process forked by a rank (a DataLoader worker) has no sending thread, and must not write into
# its parent's messages: there, all reports are ignored.
os.register_at_fork(after_in_child=lambda: install(None))
