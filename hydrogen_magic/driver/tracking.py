"""Sends a gang to a tracker, in a thread: events stay in the gang's log until the tracker takes them.

So a slow tracker delays no rank and takes no memory of its own, and one that fails costs a notice.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.trackers import MetricPoint, RunInfo, TrackedRun, Tracker

T = TypeVar("T")

_NEWLINE = "\n"
_INTERVAL_S = 1.0
"""Trackers draw curves for people: a request a second is enough."""
_BATCH = 1000
_FINISH_S = 10.0
"""How long a cell waits for its tracker: a request to a server takes a second."""
LATE_S = 600.0
"""How long after the end of its gang a tracker may take points."""
_RANKS = 8
"""Ranks whose metrics are sent: the curves of more could not be distinguished."""
_MOST_FILE_BYTES = 64 << 20

_followed: set[GangRun] = set()
"""Gangs whose trackers have not received everything yet."""
os.register_at_fork(after_in_child=_followed.clear)


class SweepGroup:
    """The group of a sweep in a tracker, opened by the first run."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker = tracker
        self._name = name
        self._key: str | None = None
        self._opening = threading.Lock()

    def key(self) -> str:
        with self._opening:
            if self._key is None:
                self._key = self._tracker.open_group(self._name)
            return self._key

    def close(self, runs: Iterable[Callable[[], object]], state: str) -> threading.Thread:
        """Close it in a thread when each of ``runs`` has returned: when all runs have been sent."""

        def closing() -> None:
            for wait in runs:
                wait()
            if self._key is not None:
                try:
                    self._tracker.close_group(self._key, state)
                except Exception as error:  # a plug-in's, or of the network
                    _warn(f"the tracker could not close the sweep: {type(error).__name__}: {error}")

        return _in_thread(closing, f"hydrogen_magic tracks sweep {self._name}")


def follow(
    run: GangRun, name: str, tracker: Tracker, source: str, group: SweepGroup | None = None
) -> None:
    """Send ``run`` to the tracker ``name`` until it has ended; ``source``: the text of its cell."""
    run.tracked.clear()
    _followed.add(run)
    forwarder = _Forwarder(run, name, tracker, source, group)
    _in_thread(forwarder.forward, f"hydrogen_magic tracks gang {run.id}")


def finish_all(within_s: float) -> None:
    """Give trackers a moment for the end of their runs, when the process exits."""
    deadline_s = time.monotonic() + within_s
    for run in list(_followed):
        run.tracked.wait(max(0.0, deadline_s - time.monotonic()))


def finish(gangs: Iterable[Gang], closing: threading.Thread | None = None) -> None:
    """Give trackers a moment for the last points: the kernel may end right after the cell.

    ``closing``: what :meth:`SweepGroup.close` returned.
    """
    deadline_s = time.monotonic() + _FINISH_S
    late = [
        gang.id
        for gang in gangs
        if not gang.wait_for_tracker(max(0.0, deadline_s - time.monotonic()))
    ]
    if closing is not None:
        closing.join(max(0.0, deadline_s - time.monotonic()))
    if late:
        _warn(
            f"the tracker has not taken all of gang {', '.join(late)} yet; this goes on in the background"
        )


def _in_thread(work: Callable[[], None], name: str) -> threading.Thread:
    # In this context, ipykernel knows the cell of the thread's output.
    thread = threading.Thread(target=copy_context().run, args=(work,), name=name, daemon=True)
    thread.start()
    return thread


class _Forwarder:
    """Sends one gang."""

    def __init__(
        self, run: GangRun, name: str, tracker: Tracker, source: str, group: SweepGroup | None
    ) -> None:
        self._run = run
        self._name = name
        self._tracker = tracker
        self._source = source
        self._group = group
        self._seen = 0

    def forward(self) -> None:
        try:
            tracked = self._reported(self._start, "anything")
            if tracked is not None:
                self._reported(partial(self._send, tracked))
                self._run.ended.wait()
                # Also after an error: the tracker should not show it as running.
                self._reported(partial(tracked.end, self._run.state.state))
        finally:
            _followed.discard(self._run)
            self._run.tracked.set()

    def _reported(self, act: Callable[[], T], what: str = "the rest") -> T | None:
        """Return what ``act`` returns, None after an error, which becomes a notice."""
        try:
            return act()
        except Exception as error:  # a plug-in's, or of the network: the gang goes on
            text = f"{type(error).__name__}: {str(error).partition(_NEWLINE)[0]}"
            self._notice("warning", f"{self._name} does not get {what} of this gang: {text}")
            return None

    def _start(self) -> TrackedRun:
        tracked = self._tracker.start(self._info())
        where = f": {tracked.where}" if tracked.where else ""
        self._notice("info", f"tracked by {self._name}{where}")
        return tracked

    def _send(self, tracked: TrackedRun) -> None:
        self._send_source(tracked)
        while not self._run.ended.wait(_INTERVAL_S):
            self._send_points(tracked)
        self._send_points(tracked, time.monotonic() + LATE_S)
        log = self._run.rank_logs.path(0)
        if log.exists() and log.stat().st_size <= _MOST_FILE_BYTES:
            tracked.add_file(log)

    def _info(self) -> RunInfo:
        state = self._run.state
        options = {"np": str(len(state.ranks)), "on": state.placement, "with": state.rendezvous}
        group = self._group.key() if self._group is not None else ""
        return RunInfo(
            state.gang, state.name, state.params, {"line": state.title, **options}, group
        )

    def _send_points(self, tracked: TrackedRun, deadline_s: float | None = None) -> None:
        fresh = self._run.events[self._seen :]
        self._seen += len(fresh)
        points = _points(fresh, self._run.state.wall_time)
        while batch := list(islice(points, _BATCH)):
            if deadline_s is not None and time.monotonic() > deadline_s:
                left = len(batch) + sum(1 for _ in points)
                self._notice(
                    "warning",
                    f"{self._name} is slow: it did not take the last {counted(left, 'point')}",
                )
                return
            tracked.log(batch)

    def _send_source(self, tracked: TrackedRun) -> None:
        if not self._source:
            return
        with TemporaryDirectory(prefix="hydrogen_magic-") as folder:
            path = Path(folder) / "cell.py"
            path.write_text(self._run.mask.text(self._source), "utf-8")
            tracked.add_file(path)

    def _notice(self, level: str, text: str) -> None:
        if not (self._run.ended.is_set() or self._run.state.is_terminal):
            self._run.emit(ev.Notice(self._run.state.now_s, level, text))
            return
        text = f"gang {self._run.id}: {self._run.mask.text(text)}"
        if level != "info":
            _warn(text)
        elif self._group is None:  # a sweep would print a line for each run
            print(text)


def _points(events: Sequence[ev.Event], wall_time: float) -> Iterator[MetricPoint]:
    """Yield the logged values: rank 0's by their names, those of rank 1 as ``rank1/loss``."""
    for event in events:
        if isinstance(event, ev.Metrics) and event.rank < _RANKS:
            prefix = f"rank{event.rank}/" if event.rank else ""
            for place, (step, time_s) in enumerate(zip(event.steps, event.times_s, strict=True)):
                columns = ((name, column[place]) for name, column in event.values.items())
                values = {f"{prefix}{name}": value for name, value in columns if value is not None}
                yield MetricPoint(step, wall_time + time_s, values)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
