"""Export of a run as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A rank is a process of the trace. Its phases, the collectives that made it wait, and every track of spans
are threads; metrics are counters.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.backward_waits import Reduction, grouped, split

_PHASES, _WAITS, _FIRST_SPANS = 0, 1, 2
"""Thread ids of a rank."""
_LANES = 1000
"""Thread ids reserved for each track, which needs more than one if its spans partly overlap."""


def write_chrome_trace(events: Sequence[ev.Event], path: str | os.PathLike[str]) -> Path:
    """Write ``events`` as Chrome trace JSON to ``path``, replacing an existing file; return the path.

    A file whose name ends in ``.gz`` is compressed.

    Raises OSError when the file cannot be written.
    """
    tracks = _tracks(events)
    entries = [*_spans(events, tracks), *_phases(events), *_waits(events), *_counters(events)]
    pids = sorted({entry["pid"] for entry in entries})
    threads = sorted({(entry["pid"], entry["tid"]) for entry in entries})
    names = [metadata("process_name", pid, name=f"rank {pid}") for pid in pids]
    names += [metadata("thread_name", pid, tid, name=_thread(tid, tracks)) for pid, tid in threads]
    names += [metadata("process_sort_index", pid, sort_index=pid) for pid in pids]
    trace = {"traceEvents": [*names, *entries], "displayTimeUnit": "ms"}
    compressed = os.fspath(path).endswith(".gz")
    with (gzip.open if compressed else open)(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"), allow_nan=False)
    return Path(path)


def library_timelines(run_dir: Path) -> list[Path]:
    """Return the timelines that libraries wrote in a run, oldest first; they are Chrome traces as well.

    There is one for each time that recording was turned on, complete and valid JSON when that is over:
    ``…-1.json``, ``…-2.json``; of later attempts ``…-retry1-1.json``.
    """
    return sorted(run_dir.glob("*-timeline-*.json"), key=lambda path: path.stat().st_mtime)


def _tracks(events: Sequence[ev.Event]) -> list[str]:
    """Return the tracks of all ranks in display order."""
    found = {event.track for event in events if isinstance(event, ev.Spans)}
    return [*ev.TRACKS, *sorted(found.difference(ev.TRACKS))]


def _thread(tid: int, tracks: list[str]) -> str:
    if tid < _FIRST_SPANS:
        return ("phases", "waiting in collectives")[tid]
    track, lane = divmod(tid - _FIRST_SPANS, _LANES)
    return f"{tracks[track]} (thread {lane + 1})" if lane else tracks[track]


def metadata(kind: str, pid: int, tid: int = 0, **args: Any) -> dict[str, Any]:
    """Return an event about a process or thread of a trace: its name, its place."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(name: str, pid: int, tid: int, start_s: float, end_s: float) -> dict[str, Any]:
    start_us, end_us = round(start_s * 1e6, 3), round(end_s * 1e6, 3)
    duration_us = round(max(0.0, end_us - start_us), 3)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start_us, "dur": duration_us}


def _spans(events: Sequence[ev.Event], tracks: list[str]) -> Iterator[dict[str, Any]]:
    by_track: dict[tuple[int, str], list[tuple[int, int, int, str]]] = {}
    for event in events:
        if isinstance(event, ev.Spans):
            rows = zip(event.starts_ns, event.ends_ns, event.depths, event.names, strict=True)
            own = by_track.setdefault((event.rank, event.track), [])
            own.extend(row for row in rows if row[3] != ev.GRADIENTS)
    for rank, row in _reductions(events):
        by_track.setdefault((rank, ev.SPANS), []).append(row)
    for (rank, track), spans in by_track.items():
        lanes: list[list[int]] = []
        first = _FIRST_SPANS + _LANES * tracks.index(track)
        # Outer before inner if they start together.
        for start_ns, end_ns, _, name in sorted(spans, key=lambda s: (s[0], -s[1], s[2])):
            lane = _lane(lanes, start_ns, end_ns)
            yield _slice(name, rank, first + lane, start_ns / 1e9, end_ns / 1e9)


def _reductions(events: Sequence[ev.Event]) -> Iterator[tuple[int, tuple[int, int, int, str]]]:
    """Yield waits for gradients as in the live view: rank, then start, end (ns), depth, name."""
    np = next((event.np for event in events if isinstance(event, ev.GangLaunched)), 0)
    found = [
        Reduction(event.rank, start_ns / 1e9, end_ns / 1e9, depth)
        for event in events
        if isinstance(event, ev.Spans) and ev.GRADIENTS in event.names
        for name, start_ns, end_ns, depth in zip(
            event.names, event.starts_ns, event.ends_ns, event.depths, strict=True
        )
        if name == ev.GRADIENTS
    ]
    for group in grouped(found):
        for each in split(group, np):
            start_ns, end_ns = round(each.start_s * 1e9), round(each.end_s * 1e9)
            yield each.rank, (start_ns, end_ns, each.depth, each.name)


def _lane(lanes: list[list[int]], start_ns: int, end_ns: int) -> int:
    """Put the span into the first lane where it is beside or inside of the existing spans; return that
    lane.

    Spans on one thread of a trace must not partly overlap, but spans of several threads of a rank do. A
    lane is the stack of the ends of its spans that are open at ``start_ns``.
    """
    for number, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= start_ns:
            open_ends.pop()
        if not open_ends or end_ns <= open_ends[-1]:
            open_ends.append(end_ns)
            return number
    lanes.append([end_ns])
    return len(lanes) - 1


def _phases(events: Sequence[ev.Event]) -> Iterator[dict[str, Any]]:
    for phase, end_s in _until_next(events, ev.RankPhase):
        yield _slice(phase.phase, phase.rank, _PHASES, phase.at_s, end_s)


def _waits(events: Sequence[ev.Event]) -> Iterator[dict[str, Any]]:
    recorded = set(_collectives(events))
    for wait, end_s in _until_next(events, ev.CollectiveWait):
        if wait.name and (wait.rank, wait.since_s) not in recorded:
            yield _slice(wait.name, wait.rank, _WAITS, wait.since_s, end_s)


_T = TypeVar("_T", ev.RankPhase, ev.CollectiveWait)


def _until_next(events: Sequence[ev.Event], kind: type[_T]) -> Iterator[tuple[_T, float]]:
    """Yield each event of ``kind`` with the time of its rank's next one, or of the rank's end.

    What is open at the end of a run, or at the last event of one that still runs, ends there.
    """
    current: dict[int, _T] = {}
    for event in events:
        if isinstance(event, (kind, ev.RankExited)):
            before = current.pop(event.rank, None)
            if before is not None:
                yield before, event.at_s
            if isinstance(event, kind):
                current[event.rank] = event
        elif isinstance(event, ev.AttemptStarted):
            yield from ((before, event.at_s) for before in current.values())
            current.clear()
    if current:
        last_s = max(event.at_s for event in events)
        yield from ((before, last_s) for before in current.values())


def _collectives(events: Sequence[ev.Event]) -> Iterator[tuple[int, float]]:
    """Yield rank and start of collectives that are already spans, which need no second entry."""
    for event in events:
        if isinstance(event, ev.Spans) and event.track == ev.COLLECTIVES:
            yield from ((event.rank, start_ns / 1e9) for start_ns in event.starts_ns)


def _counters(events: Sequence[ev.Event]) -> Iterator[dict[str, Any]]:
    for event in events:
        if isinstance(event, ev.Metrics):
            for name, column in event.values.items():
                for at_s, value in zip(event.times_s, column, strict=True):
                    # JSON has no NaN, which may be the last value of a curve.
                    if value is not None and math.isfinite(value):
                        yield {
                            "ph": "C",
                            "name": name,
                            "pid": event.rank,
                            "tid": 0,
                            "ts": round(at_s * 1e6, 3),
                            "args": {"value": value},
                        }
