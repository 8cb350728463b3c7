"""Curves of the ranks' logged values, of bounded size for runs of any length.

A curve is a series of buckets per metric and rank: count, mean, minimum and maximum of the points whose
steps fall into it. All ranks of a metric share one bucket width, a power of two that starts at 1 and
doubles when there are too many buckets. So extremes are never dropped, and a client with the old buckets
can merge them itself. The points themselves are kept for detail views.

A gang that restarts usually resumes from a checkpoint: the first step that a rank logs replaces that step and
all later ones of the rank; earlier steps stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.growable_arrays import floats
from hydrogen_magic.driver.state.output_lines import clean_name
from hydrogen_magic.views.curve_tips import Logged, Tip, WithBad, tip_of
from hydrogen_magic.views.point_buckets import (
    NOTHING,
    Buckets,
    Points,
    Series,
    as_buckets,
    bucketed,
    merged,
)

ALL_RANKS = -1
"""The rank of the series that summarises all ranks."""

MOST_BUCKETS = 1024
"""Buckets of a series: more than a plot has pixels, few enough to send to a new page."""

_MOST_METRICS = 1000
"""Maximum number of metrics with curves; names created at run time would otherwise fill the memory."""
_LONGEST_NAME = 200
_MOST_METRICS_AT_ONCE = 64
"""Metrics examined for one message, while the others wait for the next: this bounds its time."""
_MOST_WAITING = 5000
"""Buckets that may wait to be sent before widths are doubled: the traffic of two seconds, so that a short
burst stays exact."""
_MOST_PENDING = 10_000
"""Batches of points that wait to be added together; a page that comes late has those of all hours."""
_LARGEST = 1e200
"""Larger values are replaced by this one, so that sums of values are finite."""


@dataclass(frozen=True)
class CurveChange:
    """Changes of one metric since the last call of :meth:`Curves.changes`."""

    metric: str
    width: int
    """Width of the buckets in steps: a power of two."""
    series: Mapping[int, Buckets]
    """Rank -> buckets that are new or have changed."""
    bad_steps: Mapping[int, int]
    """Rank -> first step with a non-finite value, for the ranks in :attr:`series`."""
    tip: Tip | None
    """Of all ranks; None without a value."""
    replaces: bool = False
    """The buckets of the metric that were returned before are void."""


class Curves:
    """The curves of a gang, built from its Metrics events."""

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}
        self._names: dict[str, str] = {}
        self._fresh: dict[str, None] = {}
        """Metrics that may have changes, the one that waited longest first."""
        self._sent_ranks: frozenset[int] | None = None
        self.n_new_points = 0
        """Points since the last call of :meth:`changes`."""
        self._waiting = 0.0
        """Changed buckets beyond the capacity of messages, before widths were doubled."""

    def feed(self, events: Iterable[ev.Event]) -> None:
        """Process Metrics and AttemptStarted; other kinds are ignored."""
        for event in events:
            if isinstance(event, ev.Metrics):
                self._take(event)
            elif isinstance(event, ev.AttemptStarted):
                for curve in self._curves.values():
                    curve.restart()

    def metrics(self) -> list[str]:
        """Return the cleaned names in the order of their first appearance; at most 1,000."""
        return list(self._curves)

    def bad_steps(self, metric: str) -> Mapping[int, int]:
        """Return rank -> first logged step with a non-finite value; these are in no bucket."""
        return dict(self._curves[metric].bad_steps)

    def tip(self, metric: str) -> Tip | None:
        """Return where the mean of all ranks ends, which may have points beyond it."""
        return self._curves[metric].tip()

    def detail(
        self, metric: str, start: float, until: float, n_buckets: int
    ) -> tuple[int, Mapping[int, Buckets]]:
        """Return width and rank (and ALL_RANKS) -> buckets of the steps from ``start`` to ``until``.

        They are computed from the points, in at most about ``n_buckets`` buckets each; only whole buckets,
        so the first and the last may exceed the range.
        """
        return self._curves[metric].detail(start, until, n_buckets)

    def changes(self, ranks: Collection[int] | None, most_buckets: float) -> list[CurveChange]:
        """Return the changes since the last call, of ``ranks`` (None: all) and ALL_RANKS.

        At most about ``most_buckets`` (0 or more), those with the highest keys first; the next calls return
        the others. Widths are doubled if more is logged than calls can return. A rank that was not among
        ``ranks`` before is returned with all its buckets. If ``most_buckets`` is infinite, an empty list
        means that nothing is left.
        """
        self.n_new_points = 0
        self._mark_new_ranks(None if ranks is None else frozenset(ranks))
        changes = self._next_changes(ranks, most_buckets)
        while self._fresh and not changes and most_buckets == math.inf:
            changes = self._next_changes(ranks, most_buckets)
        return changes

    def _next_changes(
        self, ranks: Collection[int] | None, most_buckets: float
    ) -> list[CurveChange]:
        """Return the changes of the metrics that have waited longest; they may have none."""
        names = list(islice(self._fresh, _MOST_METRICS_AT_ONCE))
        n_new = {name: self._curves[name].update(ranks) for name in names}
        self._limit_backlog(n_new, most_buckets)
        changes, left = [], most_buckets
        for place, name in enumerate(names):
            change = self._curves[name].take(ranks, left / (len(names) - place))
            del self._fresh[name]
            if self._curves[name].n_dirty(ranks):
                self._fresh[name] = None
            if change is not None:
                left -= sum(map(len, change.series.values()))
                changes.append(change)
        return changes

    def full(self, ranks: Collection[int] | None) -> list[CurveChange]:
        """Return everything, of ``ranks`` (None: all) and ALL_RANKS, for a new client."""
        for curve in self._curves.values():
            curve.update(ranks)
        found = (curve.full(ranks) for curve in self._curves.values())
        return [change for change in found if change.series]

    def _take(self, event: ev.Metrics) -> None:
        steps = floats(event.steps)
        columns = list(event.values.values())
        # all at once: there are hundreds of batches a second
        table = floats(columns)
        is_all_good = bool((np.abs(table) <= _LARGEST).all())
        for raw_name, column, values in zip(event.values, columns, table, strict=True):
            curve = self._curve(raw_name)
            if curve is not None:
                self._fresh[curve.metric] = None
                self.n_new_points += len(column)
                if event.rank in curve.restarted:
                    curve.resume(event.rank, event.steps, column)
                if is_all_good:
                    curve.add_points(event.rank, steps, values)
                else:
                    curve.add_mixed(event.rank, steps, column)

    def _curve(self, raw_name: str) -> _Curve | None:
        name = self._names.get(raw_name)
        if name is None:
            name = metric_name(raw_name)
            if len(self._names) < 2 * _MOST_METRICS:
                self._names[raw_name] = name
        if name not in self._curves and len(self._curves) < _MOST_METRICS:
            self._curves[name] = _Curve(name)
        return self._curves.get(name)

    def _mark_new_ranks(self, ranks: frozenset[int] | None) -> None:
        """Mark all buckets of ranks that have not been sent before as changed."""
        before, self._sent_ranks = self._sent_ranks, ranks
        if before == ranks or before is None or not self._curves:
            return
        for name, curve in self._curves.items():
            curve.mark_dirty((curve.ranks() if ranks is None else ranks) - before)
            self._fresh[name] = None

    def _limit_backlog(self, n_new: Mapping[str, int], most_buckets: float) -> None:
        """Double the width of the metric that is logged fastest if messages lag for too long."""
        new = dict(n_new)
        self._waiting = max(0.0, self._waiting + sum(new.values()) - most_buckets)
        while self._waiting > _MOST_WAITING and sum(new.values()) > most_buckets:
            fastest = max(new, key=new.__getitem__)
            self._curves[fastest].double()
            self._waiting *= 1 - new[fastest] / sum(new.values()) / 2
            new[fastest] //= 2


def metric_name(raw_name: str) -> str:
    """Return a metric's display name: one plain line of limited length."""
    return clean_name(raw_name[:_LONGEST_NAME]) or "?"


class _Curve:
    """All series of one metric."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.width = 1
        self.restarted: set[int] = set()
        """Ranks that have not logged this metric since the gang started again."""
        self._is_cut = False
        """Points were dropped that a page may still have."""
        self.bad_steps: dict[int, int] = {}
        self._bad_points: dict[int, Points] = {}
        self._sent_bad: set[int] = set()
        self._sent_tip: Tip | None = None
        self._points: dict[int, Points] = {}
        self._series: dict[int, Series] = {ALL_RANKS: Series()}
        self._pending: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        """Points that are not yet in the series of all ranks."""

    def ranks(self) -> frozenset[int]:
        return frozenset((ALL_RANKS, *self._points))

    def restart(self) -> None:
        self.restarted = set(self._points)

    def resume(self, rank: int, steps: tuple[int, ...], column: tuple[float | None, ...]) -> None:
        """Drop a rank's points of earlier attempts from the first of ``steps`` that has a value."""
        logged = [step for step, value in zip(steps, column, strict=True) if value is not None]
        if not logged:
            return
        self.restarted.discard(rank)
        self._is_cut = True
        self._points[rank] = self._points[rank].before(min(logged))
        if rank in self._bad_points:
            self._bad_points[rank] = self._bad_points[rank].before(min(logged))
        self.width = 1  # it grows again with the points that are left
        self._series = {ALL_RANKS: Series()}
        self._pending = [points.since(0) for points in self._points.values() if len(points)]
        if self.bad_steps.get(rank, -math.inf) >= min(logged):
            del self.bad_steps[rank]
        self._sent_bad.clear()

    def add_points(
        self, rank: int, steps: NDArray[np.float64], values: NDArray[np.float64]
    ) -> None:
        points = self._points.get(rank)
        if points is None:
            points = self._points[rank] = Points()
        if len(values):
            points.append(steps, values)
            self._pending.append((steps, values))
            if len(self._pending) >= _MOST_PENDING:
                self._add_pending()

    def add_mixed(
        self, rank: int, steps: NDArray[np.float64], column: tuple[float | None, ...]
    ) -> None:
        """Add the finite values; record the first step with another value."""
        values = floats(column)
        is_good = np.isfinite(values)
        bad = [int(i) for i in np.flatnonzero(~is_good) if column[i] is not None]
        if bad:
            self.bad_steps.setdefault(rank, int(steps[bad[0]]))
            self._bad_points.setdefault(rank, Points()).append(steps[bad], values[bad])
        small = np.clip(values[is_good], -_LARGEST, _LARGEST)
        self.add_points(rank, steps[is_good], small)

    def update(self, ranks: Collection[int] | None) -> int:
        """Update the series; return how many buckets have changed that were not waiting."""
        before = self.n_dirty(ranks)
        if self._pending:
            self._add_pending()
        for rank in self._shown(ranks):
            self.series(rank)
        return max(0, self.n_dirty(ranks) - before)

    def _add_pending(self) -> None:
        """Add points to the series of all ranks."""
        steps, values = (np.concatenate(part) for part in zip(*self._pending, strict=True))
        self._pending.clear()
        self._series[ALL_RANKS].add(steps, values, self.width)
        # It has every key of every rank: if it is small enough, all are.
        while len(self._series[ALL_RANKS]) > MOST_BUCKETS:
            self.double()

    def series(self, rank: int) -> Series:
        """Return the updated series: series that are not displayed are updated only here."""
        series = self._series.setdefault(rank, Series())
        if rank != ALL_RANKS and series.n_points < len(self._points[rank]):
            series.add(*self._points[rank].since(series.n_points), self.width)
        series.widen(self.width)
        return series

    def double(self) -> None:
        self.width *= 2
        self._series[ALL_RANKS].widen(self.width)

    def n_dirty(self, ranks: Collection[int] | None) -> int:
        shown = (self._series.get(rank) for rank in (ALL_RANKS, *self._shown(ranks)))
        return sum(series.n_dirty for series in shown if series is not None)

    def mark_dirty(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._sent_bad.discard(rank)
            if rank in self._series:
                self._series[rank].mark_dirty()

    def tip(self) -> Tip | None:
        now = [self._logged(rank) for rank in self._points if rank not in self.restarted]
        return tip_of(now, [*map(self._logged, self.restarted)])

    def _logged(self, rank: int) -> Logged:
        points, bad = self._points[rank], self._bad_points.get(rank)
        return points if bad is None else WithBad(points, bad)

    def take(self, ranks: Collection[int] | None, most_buckets: float) -> CurveChange | None:
        """Return at most about this many changed buckets, and mark them as sent; None if nothing changed."""
        shown = [(rank, self.series(rank)) for rank in (ALL_RANKS, *self._shown(ranks))]
        waiting = sorted((s.n_dirty, rank, s) for rank, s in shown if s.n_dirty)
        # Non-finite values matter even on ranks without their own line.
        taken = {rank: NOTHING for rank in self.bad_steps if rank not in self._sent_bad}
        for place, (_, rank, series) in enumerate(waiting):
            taken[rank] = series.take(max(1, int(min(1e9, most_buckets / (len(waiting) - place)))))
            most_buckets -= len(taken[rank])
        self._sent_bad.update(taken.keys() & self.bad_steps.keys())
        replaces, self._is_cut = self._is_cut and bool(taken), self._is_cut and not taken
        change = self._change(taken, replaces)
        before, self._sent_tip = self._sent_tip, change.tip
        # Values that are not finite move the tip, and are in no bucket.
        return change if taken or before != change.tip else None

    def full(self, ranks: Collection[int] | None) -> CurveChange:
        shown = {rank: self.series(rank) for rank in (ALL_RANKS, *self._shown(ranks))}
        found = {r: s.buckets() for r, s in shown.items() if len(s)}
        found = {**dict.fromkeys(self.bad_steps, NOTHING), **found}
        return self._change(found)

    def detail(
        self, start: float, until: float, n_buckets: int
    ) -> tuple[int, Mapping[int, Buckets]]:
        start, until = sorted((start, until))
        per_bucket = max(1.0, (until - start) / max(1, n_buckets))
        width = 2 ** math.ceil(math.log2(per_bucket))
        first, last = math.floor(start / width), math.floor(until / width)
        found = {
            rank: bucketed(*points.between(first * width, (last + 1) * width), width)
            for rank, points in self._points.items()
        }
        together = [rows for rows in found.values() if rows.shape[1]]
        if together:
            found[ALL_RANKS] = merged(np.concatenate(together, axis=1))
        return width, {rank: as_buckets(rows) for rank, rows in sorted(found.items())}

    def _shown(self, ranks: Collection[int] | None) -> Iterable[int]:
        return self._points if ranks is None else [rank for rank in ranks if rank in self._points]

    def _change(self, series: Mapping[int, Buckets], replaces: bool = False) -> CurveChange:
        bad_steps = {rank: self.bad_steps[rank] for rank in series if rank in self.bad_steps}
        shown = dict(sorted(series.items()))
        return CurveChange(self.metric, self.width, shown, bad_steps, self.tip(), replaces)
