"""Spans for drawing: tracks per rank, in columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.growable_arrays import GrowableArray, floats
from hydrogen_magic.driver.state.output_lines import clean_name

PHASES = "phases"
"""The track that is derived here: a rank's phases and their details."""

OTHER = 2**16 - 1
"""Index of the name ``other``, for spans when no more names can get an index."""

_LONGEST_NAME = 120
_LATE_S = 1.0
"""How much later than the end of a wait the span of the same collective may arrive."""
_LEAST_S = 5e-5
"""A shorter wait for gradients is random."""


@dataclass(frozen=True)
class SpanTrack:
    """Spans of one track of one rank, in their order of arrival: inner before outer."""

    starts_s: NDArray[np.float64]
    durations_s: NDArray[np.float64]
    names: NDArray[np.uint16]
    """Indices in :attr:`SpanTracks.names`."""
    depths: NDArray[np.uint8]
    skipped: int
    """Spans that the rank dropped because it recorded faster than it could send."""

    def __len__(self) -> int:
        return len(self.starts_s)

    def part(self, start: int, until: int) -> SpanTrack:
        """Return spans ``start`` to ``until``, exclusive."""
        return self._those(slice(start, until))

    def since(self, start_s: float) -> SpanTrack:
        """Return the spans that began at ``start_s`` or later."""
        return self._those(self.starts_s >= start_s)

    def _those(self, chosen: Any) -> SpanTrack:
        return SpanTrack(
            self.starts_s[chosen],
            self.durations_s[chosen],
            self.names[chosen],
            self.depths[chosen],
            self.skipped,
        )


Key = tuple[int, str]
"""Rank and track."""


def newest(tracks: Mapping[Key, SpanTrack], most: int) -> tuple[Mapping[Key, SpanTrack], float]:
    """Return about the newest ``most`` spans of all tracks, and the time since which there are all.

    The time is 0 if all spans are returned.
    """
    if sum(map(len, tracks.values())) <= most:
        return tracks, 0.0
    # A single track may have all of them: of a longer one, the first spans need not be compared.
    last = {key: spans.part(max(0, len(spans) - most), len(spans)) for key, spans in tracks.items()}
    starts_s = np.concatenate([spans.starts_s for spans in last.values()])
    since_s = float(np.partition(starts_s, -most)[-most])
    return {key: spans.since(since_s) for key, spans in last.items()}, since_s


class SpanTracks:
    """All tracks of a gang, built from its events. They continue from attempt to attempt.

    Phases follow one after the other at depth 0; details of a phase ("importing torch") are at depth 1. The
    current phase of a rank has no span yet: it began where the last one of depth 0 ended, and its name is
    in the rank's row. Waits in collectives are in their track only if the rank did not record the
    collective itself.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """The names that :attr:`SpanTrack.names` are indices of."""
        self._index: dict[str, int] = {}
        self._shown: dict[str, int] = {}
        """Index of each entry of :attr:`names`; several names may be shown alike."""
        self._tracks: dict[tuple[int, str], _Columns] = {}
        self._phases: dict[int, _Open] = {}
        self._details: dict[int, _Open] = {}
        self._waiting: dict[int, ev.CollectiveWait] = {}
        self._waited: list[_Interval] = []
        """Completed waits, until it is clear that there is no span for them."""
        self._reductions: list[_Interval] = []
        """Reductions of gradients, until all ranks have reported theirs."""
        self._np = 0

    def feed(self, events: Iterable[ev.Event]) -> None:
        """Process Spans, phases, waits in collectives and ends; other kinds are ignored."""
        for event in events:
            rule = _RULES.get(type(event))
            if rule is not None:
                rule(self, event)

    def flush(self, now_s: float) -> None:
        """Add waits that ended a while before ``now_s`` and have no span."""
        waited, self._waited = self._waited, []
        for wait in waited:
            if now_s - wait.end_s < _LATE_S:
                self._waited.append(wait)
            elif not self._is_covered(wait):
                self._add(ev.COLLECTIVES, wait)
        if self._reductions:
            self._flush_reductions(now_s)

    def _flush_reductions(self, now_s: float) -> None:
        """Add reductions that all ranks have reported, and those of a while before ``now_s``."""
        groups, self._reductions = _grouped(self._reductions), []
        for group in groups:
            is_late = now_s - max(each.end_s for each in group) >= _LATE_S
            if len(group) < self._np and not is_late:
                self._reductions += group
                continue
            for each in _split(group, self._np):
                self._add(ev.SPANS, each)

    def tracks(self) -> Mapping[tuple[int, str], SpanTrack]:
        """Return (rank, track) -> spans."""
        return {key: columns.spans() for key, columns in self._tracks.items()}

    def sizes(self) -> Mapping[tuple[int, str], int]:
        """Return (rank, track) -> number of spans."""
        return {key: len(columns) for key, columns in self._tracks.items()}

    def spans(self, rank: int, track: str) -> SpanTrack:
        return self._tracks[rank, track].spans()

    def shares(self) -> Mapping[str, Mapping[int, float]]:
        """Return name -> rank -> seconds: where the time goes, by the same rule as in the live view.

        It sums the spans of a rank's first track with any, at the outermost depth with more than one name:
        if "step" encloses everything, the time is that of its parts. A share refers to the recorded time,
        see :meth:`recorded_s`.
        """
        shares: dict[str, dict[int, float]] = {}
        for rank, spans in self._tracks_for_shares().items():
            for name, seconds in self._seconds(spans).items():
                shares.setdefault(name, {})[rank] = seconds
        return shares

    def recorded_s(self) -> Mapping[int, float]:
        """Return rank -> seconds from the first to the last moment in :meth:`shares`."""
        return {
            rank: float((spans.starts_s + spans.durations_s).max() - spans.starts_s.min())
            for rank, spans in self._tracks_for_shares().items()
        }

    def _tracks_for_shares(self) -> Mapping[int, SpanTrack]:
        """Return rank -> the track used for its time shares.

        It is the first of its tracks in display order; a second one would count the same time twice.
        """
        tracks: dict[int, list[str]] = {}
        for (rank, track), columns in self._tracks.items():
            if track != PHASES and len(columns):
                tracks.setdefault(rank, []).append(track)
        first = {rank: min(found, key=_order) for rank, found in sorted(tracks.items())}
        return {rank: self.spans(rank, track) for rank, track in first.items()}

    def _seconds(self, spans: SpanTrack) -> Mapping[str, float]:
        is_counted = spans.depths == _shares_depth(spans)
        seconds = np.bincount(spans.names[is_counted], spans.durations_s[is_counted])
        return {self.names[index]: float(seconds[index]) for index in np.flatnonzero(seconds)}

    # ── handlers by kind of event ────────────────────────────────────────────────────────────────

    def _launched(self, event: ev.GangLaunched) -> None:
        self._np = event.np

    def _attempt(self, event: ev.AttemptStarted) -> None:
        for rank in list(self._phases):
            self._leave(rank, event.at_s)
        self._phases = {rank: _Open("waiting", event.at_s) for rank in range(self._np)}

    def _started(self, event: ev.RankStarted) -> None:
        self._enter(event.rank, "starting", event.at_s)

    def _phase(self, event: ev.RankPhase) -> None:
        self._enter(event.rank, event.phase, event.at_s)
        self._close(self._details, event.rank, event.at_s, depth=1)
        if event.detail:
            self._details[event.rank] = _Open(event.detail, event.at_s)

    def _exited(self, event: ev.RankExited) -> None:
        self._leave(event.rank, event.at_s)
        self._end_wait(event.rank, event.at_s)

    def _wait(self, event: ev.CollectiveWait) -> None:
        self._end_wait(event.rank, event.at_s)
        if event.name:
            self._waiting[event.rank] = event

    def _spans(self, event: ev.Spans) -> None:
        columns = self._columns(event.rank, clean_name(event.track[:_LONGEST_NAME]))
        names = np.array(self._indices(event.names), np.uint16)
        starts_s, ends_s = floats(event.starts_ns) / 1e9, floats(event.ends_ns) / 1e9
        depths = np.clip(np.array(event.depths, np.int64), 0, 255).astype(np.uint8)
        columns.skipped += max(0, event.skipped)
        is_kept = self._hold_reductions(event, starts_s, ends_s)
        columns.extend(starts_s[is_kept], ends_s[is_kept], names[is_kept], depths[is_kept])

    def _hold_reductions(
        self, event: ev.Spans, starts_s: NDArray[np.float64], ends_s: NDArray[np.float64]
    ) -> Any:
        """Hold reductions of gradients until peers have reported theirs; return a mask of the other
        spans.
        """
        if event.track != ev.SPANS or ev.GRADIENTS not in event.names:
            return slice(None)
        is_kept = np.array([name != ev.GRADIENTS for name in event.names])
        self._reductions += [
            _Interval(
                event.rank,
                float(starts_s[at]),
                float(ends_s[at]),
                min(255, max(0, event.depths[at])),
            )
            for at in np.flatnonzero(~is_kept)
        ]
        return is_kept

    def _ended(self, event: ev.GangEnded) -> None:
        for rank in list(self._phases):
            self._leave(rank, event.at_s)
        for rank in list(self._waiting):
            self._end_wait(rank, event.at_s)
        self.flush(event.at_s + _LATE_S)

    # ── phases and waits ─────────────────────────────────────────────────────────────────────────

    def _enter(self, rank: int, phase: str, at_s: float) -> None:
        known = self._phases.get(rank)
        if known is None or known.name != phase:
            self._leave(rank, at_s)
            self._phases[rank] = _Open(phase, at_s)

    def _leave(self, rank: int, at_s: float) -> None:
        self._close(self._details, rank, at_s, depth=1)
        self._close(self._phases, rank, at_s, depth=0)

    def _close(self, opened: dict[int, _Open], rank: int, at_s: float, *, depth: int) -> None:
        before = opened.pop(rank, None)
        if before is not None:
            self._add(PHASES, _Interval(rank, before.since_s, at_s, depth, before.name))

    def _end_wait(self, rank: int, at_s: float) -> None:
        wait = self._waiting.pop(rank, None)
        if wait is not None:
            self._waited.append(_Interval(rank, wait.since_s, at_s, 0, wait.name))

    def _is_covered(self, wait: _Interval) -> bool:
        if (wait.rank, ev.COLLECTIVES) not in self._tracks:
            return False
        spans = self.spans(wait.rank, ev.COLLECTIVES)
        ends_s = spans.starts_s + spans.durations_s
        return bool(((spans.starts_s < wait.end_s) & (ends_s > wait.start_s)).any())

    # ── tracks and names ─────────────────────────────────────────────────────────────────────────

    def _add(self, track: str, found: _Interval) -> None:
        (index,) = self._indices((found.name,))
        self._columns(found.rank, track).add(found.start_s, found.end_s, index, found.depth)

    def _columns(self, rank: int, track: str) -> _Columns:
        return self._tracks.setdefault((rank, track), _Columns())

    def _indices(self, names: Sequence[str]) -> list[int]:
        index = self._index
        try:
            return [index[name] for name in names]
        except KeyError:
            return [index[name] if name in index else self._new_index(name) for name in names]

    def _new_index(self, name: str) -> int:
        """Assign an index to ``name``; the last one is shared by all names that exceed the limit."""
        shown = clean_name(name[:_LONGEST_NAME]) or "?"
        if shown in self._shown:  # not in `_index`, which names without end would fill
            return self._shown[shown]
        if len(self.names) >= OTHER:
            self.names += ["other"] * (len(self.names) == OTHER)
            return OTHER
        self._index[name] = self._shown[shown] = len(self.names)
        self.names.append(shown)
        return self._index[name]


def _order(track: str) -> int:
    return ev.TRACKS.index(track) if track in ev.TRACKS else len(ev.TRACKS)


def _shares_depth(spans: SpanTrack) -> int:
    """Return the outermost depth with more than one name, otherwise the outermost."""
    depths = np.flatnonzero(np.bincount(spans.depths))
    several = (d for d in depths if np.ptp(spans.names[spans.depths == d]) > 0)
    return int(next(several, depths[0]))


_RULES: Mapping[type, Callable[[SpanTracks, Any], None]] = {
    ev.GangLaunched: SpanTracks._launched,
    ev.AttemptStarted: SpanTracks._attempt,
    ev.RankStarted: SpanTracks._started,
    ev.RankPhase: SpanTracks._phase,
    ev.RankExited: SpanTracks._exited,
    ev.CollectiveWait: SpanTracks._wait,
    ev.Spans: SpanTracks._spans,
    ev.GangEnded: SpanTracks._ended,
}


@dataclass(frozen=True)
class _Open:
    """An open phase or wait."""

    name: str
    since_s: float


@dataclass(frozen=True)
class _Interval:
    """An interval of a rank that may become a span: a phase, a wait in a collective, or the rank's part in a
    reduction of gradients.
    """

    rank: int
    start_s: float
    end_s: float
    depth: int
    name: str = ev.GRADIENTS


class _Columns:
    """A growing track."""

    def __init__(self) -> None:
        kinds = np.float64, np.float64, np.uint16, np.uint8  # as in SpanTrack
        self._columns = [GrowableArray(kind) for kind in kinds]
        self._added: list[tuple[float, float, int, int]] = []
        """Single spans: arrays are made of all of them at once."""
        self.skipped = 0

    def __len__(self) -> int:
        self._extend_by_added()
        return len(self._columns[0])

    def spans(self) -> SpanTrack:
        self._extend_by_added()
        starts_s, durations_s, names, depths = (column.array for column in self._columns)
        return SpanTrack(starts_s, durations_s, names, depths, self.skipped)

    def extend(
        self,
        starts_s: NDArray[np.float64],
        ends_s: NDArray[np.float64],
        names: NDArray[np.uint16],
        depths: NDArray[np.uint8],
    ) -> None:
        """Append spans; those that end before they start have no length."""
        self._extend_by_added()
        columns = starts_s, np.maximum(0.0, ends_s - starts_s), names, depths
        for column, values in zip(self._columns, columns, strict=True):
            column.append(values)

    def add(self, start_s: float, end_s: float, name: int, depth: int) -> None:
        """Append one span, as :meth:`extend` does."""
        self._added.append((start_s, end_s, name, depth))

    def _extend_by_added(self) -> None:
        if self._added:
            starts_s, ends_s, names, depths = zip(*self._added, strict=True)
            self._added = []
            times = np.array(starts_s), np.array(ends_s)
            self.extend(*times, np.array(names, np.uint16), np.array(depths, np.uint8))


# ── waits in reductions of gradients ─────────────────────────────────────────────────────────────

# A rank reports one span from the moment it has computed its gradients until all are reduced. The spans of
# one reduction overlap on all ranks: the others wait until the last rank begins; from then on, gradients
# are reduced.


def _grouped(found: Iterable[_Interval]) -> list[list[_Interval]]:
    """Return the reductions in order; overlapping spans belong to one reduction."""
    groups: list[list[_Interval]] = []
    until_s = 0.0
    for each in sorted(found, key=lambda reduction: reduction.start_s):
        if groups and each.start_s < until_s:
            groups[-1].append(each)
            until_s = min(until_s, each.end_s)
        else:
            groups.append([each])
            until_s = each.end_s
    return groups


def _split(group: Sequence[_Interval], np: int) -> Iterator[_Interval]:
    """Yield the spans of one reduction, with waiting and reducing separated if every rank is in it once."""
    last = max(group, key=lambda each: each.start_s)
    is_whole = np > 1 and sorted(each.rank for each in group) == list(range(np))
    for each in group:
        if not is_whole or last.start_s - each.start_s < _LEAST_S:
            yield each
        else:
            yield replace(each, end_s=last.start_s, name=f"waiting for rank {last.rank}")
            yield replace(each, start_s=last.start_s)
