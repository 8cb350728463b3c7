"""Merges the torch profiler's traces of all ranks into one on the gang's clock.

Every rank's trace has its own clock. Marks, set at known times of the gang, give its offset. In the merged
trace a rank is a process, as in the gang's timeline.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.chrome_trace import metadata

MAX_SPANS = 20_000
"""Spans of one rank for the live view: as many as a canvas draws at once. The file has all of them."""
_LATEST_S = 1e8
"""Later times in a trace are invalid; events do not accept such times."""
MAX_STEPS = 1000
"""Steps of one profile: browsers do not open larger traces."""
_MAX_EVENTS = 1_000_000
"""Events of one rank; a Python object each, about 1 GB in all. Five steps have far fewer."""
_LOOK_EVERY = 1000
"""Number of events after which the reader checks whether the profile is still wanted."""

_DAMAGE = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Exceptions when reading a file that is not a trace."""

_MARK = re.compile(rf"{re.escape(ev.PROFILE_CLOCK)}(\d+\.\d+)")
_GAP = re.compile(r"[\s,]*")
_MACHINERY = frozenset(("cuda_runtime", "cuda_driver", "overhead", "Trace"))
"""Categories that are in the file, but not among the spans of the live view."""


class UnwantedError(Exception):
    """The profile is no longer wanted."""


@dataclass(frozen=True)
class Profile:
    """The result of the merge."""

    ranks: tuple[int, ...]
    """Ranks in the merged trace."""
    spans: tuple[ev.Spans, ...]
    """One for each of them."""
    errors: Mapping[int, str]
    """Rank -> why it has no trace."""


def merge(
    traces: Mapping[int, Any],
    path: Path,
    is_wanted: Callable[[], bool] = lambda: True,
    mask: Callable[[str], str] = str,
) -> Profile:
    """Write the traces (bytes, by rank) to ``path``, gzipped; return their spans.

    No file is written if no rank has a trace. ``mask``: replaces secrets in the text of a trace. Raises
    OSError if it cannot be written, and UnwantedError when ``is_wanted`` returns False.
    """
    spans: list[ev.Spans] = []
    errors: dict[int, str] = {}
    part = path.with_name(f"{path.name}.part")
    try:
        with gzip.open(part, "wt", compresslevel=4, encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for rank in sorted(traces):
                try:
                    trace = _read(rank, mask(str(traces[rank], "utf-8", "replace")), is_wanted)
                except ValueError as error:
                    errors[rank] = str(error)
                    continue
                for event in trace.merged():
                    file.write(json.dumps(event, separators=(",", ":")) + ",\n")
                spans.append(trace.spans())
            file.write(f"{json.dumps(metadata('hydrogen_magic', 0))}]}}\n")
        if spans:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return Profile(tuple(span.rank for span in spans), tuple(spans), errors)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Trace:
    """One rank's trace."""

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)
    names: dict[tuple[Any, Any], str] = field(default_factory=dict)
    """(pid, tid) -> the profiler's name of that thread or GPU stream."""
    offset_us: float = float("-inf")
    """Offset to add to its times."""
    main: tuple[Any, Any] = (0, 0)
    """The thread that set the marks: the training thread."""

    def add(self, event: dict[str, Any]) -> None:
        """Add an event; raises KeyError, TypeError or ValueError if it is malformed."""
        kind, name = event.get("ph"), str(event.get("name", ""))
        where = (event.get("pid"), event.get("tid"))
        if kind == "M" and name == "thread_name":
            self.names[where] = str(event["args"]["name"]).strip()
        elif kind in ("X", "s", "f") and type(where[0]) is int and len(self.events) < _MAX_EVENTS:
            event["ts"], event["name"] = _finite(event["ts"]), name
            mark = _MARK.fullmatch(name)
            if mark is not None:
                # It is set after its time was read, never before: the shortest delay is the most
                # accurate.
                self.offset_us = max(self.offset_us, float(mark[1]) * 1e6 - event["ts"])
                self.main = where
            else:
                if kind == "X":
                    event["dur"] = max(0.0, _finite(event["dur"]))
                self.events.append(event)

    # ── as a trace ──

    def merged(self) -> Iterator[dict[str, Any]]:
        """Yield the events with the rank as process, on the gang's clock."""
        threads = self._threads()
        yield metadata("process_name", self.rank, name=f"rank {self.rank}")
        yield metadata("process_sort_index", self.rank, sort_index=self.rank)
        for where, tid in threads.items():
            yield metadata("thread_name", self.rank, tid, name=self._name(where))
            yield metadata("thread_sort_index", self.rank, tid, sort_index=tid)
        for event in self.events:
            moved = {
                **event,
                "pid": self.rank,
                "tid": threads[event["pid"], event["tid"]],
                "ts": round(event["ts"] + self.offset_us, 3),
            }
            if "id" in event:  # of an arrow between two events: every rank counts from 1
                moved["id"] = f"{self.rank}.{event['id']}"
            yield moved

    def _threads(self) -> dict[tuple[Any, Any], int]:
        """Number the threads and GPU streams, with the training thread first."""
        seen = dict.fromkeys((event["pid"], event["tid"]) for event in self.events)
        others = sorted(
            seen.keys() - {self.main}, key=lambda where: (where[0] != self.main[0], str(where))
        )
        return {where: tid for tid, where in enumerate([self.main, *others])}

    def _name(self, where: tuple[Any, Any]) -> str:
        if where == self.main:
            return "main thread"
        name = self.names.get(where, f"thread {where[1]}")
        return name if where[0] == self.main[0] else f"GPU {where[0]} {name}"

    # ── as spans ──

    def spans(self) -> ev.Spans:
        """Return the outermost spans; threads and streams are stacked by increasing depth."""
        threads = self._threads()
        by_thread: list[list[_Nested]] = [[] for _ in threads]
        for event in self.events:
            if event["ph"] == "X" and event.get("cat") not in _MACHINERY:
                start_us = event["ts"] + self.offset_us
                end_us = start_us + event["dur"]
                thread = by_thread[threads[event["pid"], event["tid"]]]
                thread.append((start_us, end_us, 0, event["name"]))
        nested = [_nest(thread) for thread in by_thread]
        kept = _outermost(nested)
        rows = sorted(_stacked(kept), key=lambda row: (row[0], row[2]))
        starts, ends, depths, names = zip(*rows, strict=True) if rows else ((),) * 4
        return ev.Spans(
            _nanoseconds(max(ends, default=0.0)) / 1e9,
            self.rank,
            names,
            tuple(map(_nanoseconds, starts)),
            tuple(map(_nanoseconds, ends)),
            depths,
            sum(map(len, nested)) - len(rows),
            ev.PROFILER,
        )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a time")
    return number


def _nanoseconds(time_us: float) -> int:
    return round(min(max(0.0, time_us), _LATEST_S * 1e6) * 1e3)


_Nested = tuple[float, float, int, str]
"""Start, end (microseconds on the gang's clock), depth, name."""


def _read(rank: int, text: str, is_wanted: Callable[[], bool]) -> _Trace:
    """Return the trace in a rank's answer; raises ValueError with the reason if there is none."""
    if text.startswith('{"error"'):
        raise ValueError(str(json.loads(text)["error"]))
    trace = _Trace(rank)
    try:
        for number, event in enumerate(_events(text)):
            if number % _LOOK_EVERY == 0 and not is_wanted():
                raise UnwantedError
            trace.add(event)
    except _DAMAGE as error:
        raise ValueError(f"its trace is damaged ({type(error).__name__}: {error})") from error
    if trace.offset_us == float("-inf"):
        raise ValueError("its trace lacks the marks that relate its clock to the gang's")
    return trace


def _events(text: str) -> Iterator[Any]:
    """Yield the trace's events one by one: parsing all at once would block other threads."""
    at = text.find("[", text.find('"traceEvents"')) + 1
    decoder = json.JSONDecoder()
    while at:
        at = _end_of_gap(text, at)
        if text[at : at + 1] in ("]", ""):
            return
        event, at = decoder.raw_decode(text, at)
        yield event


def _end_of_gap(text: str, at: int) -> int:
    gap = _GAP.match(text, at)
    return at if gap is None else gap.end()


# ── nesting ──────────────────────────────────────────────────────────────────────────────────────


def _nest(thread: list[_Nested]) -> list[_Nested]:
    """Return the spans of one thread with their depths, each inside the one in which it began."""
    nested: list[_Nested] = []
    ends: list[float] = []
    for start, end, _, name in sorted(thread, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= start:
            ends.pop()
        end = min(end, ends[-1]) if ends else end  # rounded times may exceed the parent
        nested.append((start, end, len(ends), name))
        ends.append(end)
    return nested


def _outermost(threads: list[list[_Nested]]) -> list[list[_Nested]]:
    """Return as many spans as a view can show: the outermost of all threads, the longest of a depth."""
    ranked = sorted(
        (span[2], span[0] - span[1], number, span)
        for number, thread in enumerate(threads)
        for span in thread
    )
    kept: list[list[_Nested]] = [[] for _ in threads]
    for _, _, number, span in ranked[:MAX_SPANS]:
        kept[number].append(span)
    return kept


def _stacked(threads: list[list[_Nested]]) -> Iterator[_Nested]:
    """Put every thread's spans below those of the threads before it."""
    base = 0
    for thread in threads:
        for start, end, depth, name in thread:
            yield start, end, base + depth, name
        base += max((depth + 1 for _, _, depth, _ in thread), default=0)
