"""Export of a run as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A rank is a process of the trace. Its tracks of the live view are threads; metrics are counters.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydrogen_magic.core import events as ev

if TYPE_CHECKING:
    from hydrogen_magic.driver.state.span_tracks import SpanTracks

_LANES = 1000
"""Thread ids reserved for each track, which needs more than one if its spans partly overlap."""


def write_chrome_trace(events: Sequence[ev.Event], path: str | os.PathLike[str]) -> Path:
    """Write ``events`` as Chrome trace JSON to ``path``, replacing an existing file; return the path.

    A file whose name ends in ``.gz`` is compressed. What is open at the end of a run, or at the last event
    of one that still runs, ends there.

    Raises OSError when the file cannot be written.
    """
    from hydrogen_magic.driver.state.span_tracks import PHASES, SpanTracks

    spans = SpanTracks()
    spans.feed(events)
    spans.feed([ev.GangEnded(max((event.at_s for event in events), default=0.0), "STOPPED", "")])
    spans.flush(math.inf)
    known = (PHASES, *ev.TRACKS)
    tracks = [*known, *sorted({track for _, track in spans.sizes()}.difference(known))]
    entries = [*_slices(spans, tracks), *_counters(events)]
    pids = sorted({entry["pid"] for entry in entries})
    threads = sorted({(entry["pid"], entry["tid"]) for entry in entries})
    names = [metadata("process_name", pid, name=f"rank {pid}") for pid in pids]
    names += [metadata("thread_name", pid, tid, name=_thread(tid, tracks)) for pid, tid in threads]
    names += [metadata("process_sort_index", pid, sort_index=pid) for pid in pids]
    trace = {"traceEvents": [*names, *entries], "displayTimeUnit": "ms"}
    compressed = os.fspath(path).endswith(".gz")
    # Level 5 is several times as fast as the default, for 5 % more bytes.
    with (
        gzip.open(path, "wt", 5, "utf-8") if compressed else open(path, "w", encoding="utf-8")
    ) as file:
        json.dump(trace, file, separators=(",", ":"), allow_nan=False)
    return Path(path)


def _thread(tid: int, tracks: Sequence[str]) -> str:
    track, lane = divmod(tid, _LANES)
    return f"{tracks[track]} (thread {lane + 1})" if lane else tracks[track]


def metadata(kind: str, pid: int, tid: int = 0, **args: Any) -> dict[str, Any]:
    """Return an event about a process or thread of a trace: its name, its place."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slices(spans: SpanTracks, tracks: Sequence[str]) -> Iterator[dict[str, Any]]:
    for (rank, track), found in spans.tracks().items():
        starts_ns = [round(at_s * 1e9) for at_s in found.starts_s.tolist()]
        ends_ns = [round(at_s * 1e9) for at_s in (found.starts_s + found.durations_s).tolist()]
        names = [spans.names[index] for index in found.names.tolist()]
        rows = zip(starts_ns, ends_ns, found.depths.tolist(), names, strict=True)
        lanes: list[list[int]] = []
        first = _LANES * tracks.index(track)
        # Outer before inner if they start together.
        for start_ns, end_ns, _, name in sorted(rows, key=lambda row: (row[0], -row[1], row[2])):
            tid = first + _lane(lanes, start_ns, end_ns)
            times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
            yield {"ph": "X", "name": name, "pid": rank, "tid": tid, **times}


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
