"""Collects a rank's events at almost no cost; a thread sends them.

The user's code only appends to queues in memory, a microsecond per call. A daemon thread empties them every
tenth of a second (less often in large gangs), turns points into columns and passes the events to ``send``:
reporting never makes the rank wait for a socket, a GPU or a view.

Queues are bounded. If the agent does not read for a while, the oldest points of curves and the oldest spans
are dropped, and their number is reported; failures, phases and notices are never dropped.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.main_thread import Watch
from hydrogen_magic.node.worker.metric_points import (
    DroppedCounter,
    Point,
    as_float,
    as_metrics,
    as_numbers,
    as_step,
    chunks,
    is_computed,
)
from hydrogen_magic.node.worker.send_interval import TICK_S, SendInterval
from hydrogen_magic.node.worker.spans import LONGEST_NAME, SpanQueue
from hydrogen_magic.node.worker.unsynchronized import ExchangeCounter

__all__ = ["Reporter", "current", "install"]

_MAX_POINTS = 1 << 16
"""Maximum number of points: more than half a second of 100 000 a second, and about 30 MB of memory."""

_MAX_CLOSED_BARS = 256
"""Bars that opened and closed before they were sent; a loop of short inner bars makes thousands a
second."""

_GPU_WAIT_S = 0.5
"""How long a post waits for values that are being computed on a GPU, which may hang."""

_CLOSE_S = 2.0
"""How long a finished rank waits for an agent that does not read its last messages."""


class Reporter:
    """Collects the events of one rank and sends them to its agent.

    ``clock_zero_s`` is the ``time.monotonic()`` at which the gang's clock was 0. Events are sent in
    intervals of ``pace``, and sooner if a queue is half full or an event is posted. ``send`` may block;
    after the start, only the reporter's own thread calls it, so that no signal handler of the main thread
    can interrupt a message. If ``send`` raises ``OSError``, the agent has exited: the reporter stops
    sending, and leaves the end of this process to others.
    """

    def __init__(
        self,
        rank: int,
        clock_zero_s: float,
        send: Callable[[Sequence[ev.Event]], None],
        *,
        pace: SendInterval | None = None,
    ) -> None:
        self.rank = rank
        self.phase = "running"
        """Phase of the last :class:`~hydrogen_magic.core.events.RankPhase` that was posted."""
        self.collective: tuple[str, int, int] | None = None
        """Name, number and start (nanoseconds) of the current collective of the rank."""
        self.is_recording = False
        """Whether activities of libraries (forward, backward, …) are recorded as spans."""
        self.on_step: Callable[[], None] | None = None
        """Called after every step of an optimizer, by the stepping thread."""
        self.on_tick: Callable[[], None] | None = None
        """Called every 50 ms by the reporter's thread; must not raise."""
        self.solo = ExchangeCounter(rank)
        """The rank's traffic with other ranks."""
        self._zero_ns = round(clock_zero_s * 1e9)
        self._pace = pace or SendInterval()
        self._send = send
        self._gone = False
        self._thread: threading.Thread | None = None
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._watch = Watch(rank)

        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._held: deque[Point] = deque()
        """Taken from ``_points``, not yet sent: the first one's value is still being computed."""
        self._point_numbers = itertools.count()
        self._points_seen = DroppedCounter()
        self._auto_steps = itertools.count()
        self._spans = SpanQueue()
        self._bars: dict[int, ev.Progress] = {}
        self._bars_sent: set[int] = set()
        self._bar_numbers = itertools.count()
        self._steps = self._steps_sent = 0
        self._stepped: set[int] = set()
        self._collectives = 0
        self._others: deque[ev.Event] = deque()
        self._posted: deque[tuple[ev.Event, threading.Event]] = deque()

    # ── called by the user's code, through api and observe ───────────────────────────────────────

    def now_s(self) -> float:
        """Return the time on the gang's clock."""
        return self.now_ns() / 1e9

    def now_ns(self) -> int:
        """Return the time of a span on the gang's clock."""
        return time.monotonic_ns() - self._zero_ns

    def log(self, step: int | None, values: dict[str, Any]) -> None:
        """Record a point; the reporter takes ownership of ``values``. ``step`` None numbers such calls.

        Raises TypeError if a value is not a number or ``step`` is not an integer.
        """
        ready = as_numbers(values)
        step = next(self._auto_steps) if step is None else as_step(step)
        self._points.append((next(self._point_numbers), self.now_s(), step, values, ready))

    def span(
        self, name: str, start_ns: int, end_ns: int, depth: int, track: str = ev.SPANS
    ) -> None:
        """Record an interval on the gang's clock."""
        self._spans.add(name, start_ns, end_ns, depth, track)

    def new_bar(self) -> int:
        """Return a number for a new progress bar."""
        return next(self._bar_numbers)

    def progress(
        self, bar: int, desc: str, n: float, total: float | None, unit: str = "it",
        closed: bool = False,
    ) -> None:  # fmt: skip
        """Record the state of a bar; only the latest state is sent."""
        at_s, total = self.now_s(), None if total is None else as_float(total)
        desc, unit = desc[:LONGEST_NAME], unit[:LONGEST_NAME]
        self._bars[bar] = ev.Progress(at_s, self.rank, bar, desc, as_float(n), total, unit, closed)
        if closed and len(self._bars) > _MAX_CLOSED_BARS:
            self._forget_unseen_bars()

    def step_done(self, optimizer: int) -> None:
        """Count a step of an optimizer; ``optimizer`` is its identity.

        A step is over when an optimizer steps again that has already stepped in it: of alternating
        optimizers (the two of a GAN) the busiest one counts, and consecutive ones add up.
        """
        if optimizer in self._stepped:
            self._steps += 1
            self._stepped = {optimizer}
        else:
            self._stepped.add(optimizer)
            self._steps = self._steps or 1
        if (on_step := self.on_step) is not None:  # another thread may remove it
            on_step()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._steps

    @property
    def collectives(self) -> int:
        """Collectives entered so far; to join a process group is one."""
        return self._collectives

    def collective_enter(self, name: str, *, is_joining: bool = False) -> bool:
        """Note that a collective begins; False when it is a part of one that is under way.

        ``is_joining``: ranks join or leave by it, and exchange nothing of their training.
        """
        if self.collective is not None:
            return False
        self._collectives += 1
        if not is_joining:
            self.solo.entered()
        self.collective = (name, self._collectives, self.now_ns())
        return True

    def collective_leave(self) -> None:
        """Record that the collective is over for this rank."""
        left, self.collective = self.collective, None
        if self.is_recording and left is not None:
            self.span(left[0], left[2], self.now_ns(), 0, ev.COLLECTIVES)

    def notice(self, level: str, text: str) -> None:
        """Send a message to the user (``level``: info, warning or error)."""
        self.tell(ev.Notice(self.now_s(), level, f"rank {self.rank}: {text}"))

    def tell(self, event: ev.Event) -> None:
        """Send ``event`` with the next batch."""
        self._others.append(event)

    # ── called by the worker ─────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start sending events."""
        self._thread = threading.Thread(
            target=self._run, name="hydrogen_magic.reporter", daemon=True
        )
        self._thread.start()

    def post(self, event: ev.Event) -> None:
        """Send ``event`` at once, after all earlier events; return when it was sent.

        Waits as long as the agent does not read. It waits at most half a second for values that are being
        computed on a GPU; later ones follow the event.
        """
        if isinstance(event, ev.RankPhase):
            self.phase = event.phase
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

    def close(self) -> None:
        """Send all events and end the thread, within two seconds even if the agent hangs."""
        if current() is self:
            install(None)
        self._closing = True
        self._wake.set()
        if self._thread is None:
            self._flush()
        else:
            self._thread.join(_CLOSE_S)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not (self._closing or self._gone):
            self._wake.wait(TICK_S)
            self._wake.clear()
            seen = list(self._watch.look(self.now_s(), self.phase, self.collective))
            self._others.extend(seen)
            if self.on_tick is not None:
                self.on_tick()
            if self._pace.is_due(
                is_urgent=bool(seen or self._posted or self._spans.is_half_full())
            ):
                self._send_posted()
        self._send_posted()

    def _send_posted(self) -> None:
        # Recorded data precedes a posted event: take posted events first, recorded data second.
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        try:
            self._flush(*(event for event, _ in posted))
        finally:
            for _, done in posted:
                done.set()

    def _flush(self, *posted: ev.Event) -> None:
        with self._sending:
            wait_s = _GPU_WAIT_S if posted or self._closing else 0.0
            batch = [*self._recorded(wait_s), *posted]
            if not batch or self._gone:
                return
            try:
                self._send(batch)
            except OSError:
                self._gone = True

    def _recorded(self, wait_s: float) -> Iterator[ev.Event]:
        at_s = self.now_s()
        yield from self._take_points(at_s, wait_s)
        if wait_s or self._others or self._spans.is_due(at_s):  # such as a completed wait
            yield from self._spans.take(at_s, self.rank)
        if self._steps != self._steps_sent:
            self._steps_sent = self._steps
            yield ev.Steps(at_s, self.rank, self._steps_sent)
        if text := self.solo.look(self._steps, self.phase == "finishing"):
            self.notice("warning", text)
        for bar in list(self._bars):
            yield from self._take_bar(bar)
        while self._others:
            yield self._others.popleft()

    def _take_points(self, at_s: float, wait_s: float) -> Iterator[ev.Metrics]:
        n_waiting = len(self._held) + len(self._points)
        for _ in range(len(self._points)):
            self._held.append(self._points.popleft())
            self._points_seen.add(self._held[-1][0])
        skipped = self._points_seen.skipped()
        limit = self._pace.max_points
        # A rank that logs more than it may send shows its newest points, not those from seconds ago.
        n_kept = limit if n_waiting >= _MAX_POINTS else _MAX_POINTS
        while len(self._held) > n_kept:
            self._held.popleft()
            skipped += 1
        ready = self._pop_ready(_MAX_POINTS if wait_s else limit, time.monotonic() + wait_s)
        for chunk in chunks(ready):
            yield as_metrics(at_s, self.rank, chunk, skipped)
            skipped = 0
        if skipped:
            yield ev.Metrics(at_s, self.rank, (), (), {}, skipped)

    def _pop_ready(self, limit: int, deadline: float) -> list[Point]:
        """Return at most ``limit`` points from the front of the queue, whose values are computed."""
        popped: list[Point] = []
        while self._held and len(popped) < limit:
            while not is_computed(self._held[0][4]):
                if time.monotonic() > deadline:
                    return popped
                time.sleep(0.001)
            popped.append(self._held.popleft())
        return popped

    def _take_bar(self, bar: int) -> Iterator[ev.Progress]:
        state = self._bars.pop(bar, None)
        if state is None:
            return  # the main thread has dropped it meanwhile
        if state.closed:
            self._bars_sent.discard(bar)
        else:
            self._bars_sent.add(bar)
        yield state

    def _forget_unseen_bars(self) -> None:
        """Drop the older half of the bars that opened and closed before they were sent."""
        unseen = [b for b, s in list(self._bars.items()) if s.closed and b not in self._bars_sent]
        for bar in unseen[: len(unseen) // 2]:
            self._bars.pop(bar, None)


# ── the reporter of this process ─────────────────────────────────────────────────────────────────

_current: Reporter | None = None


def current() -> Reporter | None:
    """Return this process's reporter, None if it is not (or no longer) a rank."""
    return _current


def install(reporter: Reporter | None) -> None:
    """Make ``reporter`` the reporter of this process."""
    global _current
    _current = reporter


def _forget() -> None:
    install(None)


# A process forked by a rank (a DataLoader worker) has no reporting thread, and must not write into
# its parent's messages: there, all reports are ignored.
os.register_at_fork(after_in_child=_forget)
