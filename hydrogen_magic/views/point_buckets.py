"""Buckets of points: the arithmetic for :mod:`~hydrogen_magic.views.curves`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hydrogen_magic.driver.state.growable_arrays import GrowableArray


@dataclass(frozen=True)
class Buckets:
    """Buckets of one series; bucket k holds the points with k*width <= step < (k+1)*width.

    Columns of equal length; keys increase, with gaps where nothing was logged.
    """

    keys: NDArray[np.float64]
    counts: NDArray[np.float64]
    means: NDArray[np.float64]
    mins: NDArray[np.float64]
    maxs: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.keys)

    def first(self, n: int) -> Buckets:
        """Return the ``n`` buckets with the lowest keys."""
        columns = (self.keys, self.counts, self.means, self.mins, self.maxs)
        return Buckets(*(column[:n] for column in columns))


class Points:
    """One rank's logged values of one metric, in their order of arrival."""

    def __init__(self) -> None:
        self._steps = GrowableArray(np.float64)
        self._values = GrowableArray(np.float64)
        self._n_examined = 0
        """Number of points that the next three attributes cover."""
        self._last_step = -np.inf
        self._newest_step = -np.inf
        self._run_start = 0
        """Place of the first point of the last epoch, if each counts its steps from 0."""

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, steps: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        self._steps.append(steps)
        self._values.append(values)

    def reached(self) -> tuple[float, float]:
        """Return the step that was logged last, and the highest one; negative infinity without points."""
        n = len(self)
        if n > self._n_examined:
            # Not as points arrive, in hundreds of batches a second.
            self._examine(self._steps.array[self._n_examined :])
            self._n_examined = n
        return self._last_step, self._newest_step

    def _examine(self, steps: NDArray[np.float64]) -> None:
        falls = np.flatnonzero(steps[1:] < steps[:-1])
        if len(falls):
            self._run_start = self._n_examined + int(falls[-1]) + 1
        elif steps.item(0) < self._last_step:
            self._run_start = self._n_examined
        self._last_step = steps.item(-1)
        newest = float(steps.max()) if len(falls) else self._last_step
        self._newest_step = max(self._newest_step, newest)

    def at(self, step: float) -> tuple[float, float] | None:
        """Return the newest step of the last epoch up to ``step``, and its value; None if there is none."""
        last, _ = self.reached()
        if last <= step:  # as of most ranks
            return (last, float(self._values.array[-1])) if len(self) else None
        steps, values = self.since(self._run_start)
        i = int(steps.searchsorted(step, side="right")) - 1
        return (steps.item(i), values.item(i)) if i >= 0 else None

    def before(self, step: float) -> Points:
        """Return the points before ``step``."""
        steps, values = self.since(0)
        kept = Points()
        kept.append(steps[steps < step], values[steps < step])
        return kept

    def since(self, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._steps.array[n:], self._values.array[n:]

    def between(
        self, start: float, until: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the points with start <= step < until."""
        steps, values = self.since(0)
        is_inside = (steps >= start) & (steps < until)
        return steps[is_inside], values[is_inside]


_KEY, _COUNT, _SUM, _MIN, _MAX, _DIRTY = range(6)
"""Rows; a column is a bucket. Dirty (1): changed since it was sent."""


class Series:
    """Buckets with increasing keys, some of which wait to be sent."""

    def __init__(self) -> None:
        self._rows: NDArray[np.float64] = np.empty((6, 16))
        self._n = 0
        self._width = 1
        self.n_points = 0
        """Number of points so far."""
        self.n_dirty = 0

    def __len__(self) -> int:
        return self._n

    def add(self, steps: NDArray[np.float64], values: NDArray[np.float64], width: int) -> None:
        self.widen(width)
        self.n_points += len(steps)
        new = bucketed(steps, values, width)
        # Points mostly continue the curve: only buckets after the first new key change.
        at = int(self._rows[_KEY, : self._n].searchsorted(new[_KEY, 0]))
        if at == self._n - 1 and self._rows[_KEY, at] == new[_KEY, 0]:
            _add(new[:, 0], self._rows[:, at])  # the one bucket that was not full yet
        elif at < self._n:
            new = merged(np.concatenate((self._rows[:, at : self._n], new), axis=1))
        self._put(at, new)

    def widen(self, width: int) -> None:
        if self._width < width:
            rows = self._rows[:, : self._n].copy()
            rows[_KEY] = np.floor(rows[_KEY] * (self._width / width))
            self._width = width
            self._put(0, merged(rows))

    def take(self, most: int) -> Buckets:
        """Return the dirty buckets with the highest keys, and mark them as sent."""
        found = self._rows[_DIRTY, : self._n].nonzero()[0][-most:]
        self._rows[_DIRTY, found] = 0
        self.n_dirty -= len(found)
        return as_buckets(self._rows[:, found])

    def mark_dirty(self) -> None:
        self._rows[_DIRTY, : self._n] = 1
        self.n_dirty = self._n

    def buckets(self) -> Buckets:
        return as_buckets(self._rows[:, : self._n])

    def _put(self, at: int, rows: NDArray[np.float64]) -> None:
        self._n = at + rows.shape[1]
        if self._n > self._rows.shape[1]:
            room = np.empty((6, 2 * self._n))
            room[:, :at] = self._rows[:, :at]
            self._rows = room
        self._rows[:, at : self._n] = rows
        self.n_dirty = int(np.count_nonzero(self._rows[_DIRTY, : self._n]))


def _add(into: NDArray[np.float64], other: NDArray[np.float64]) -> None:
    """Merge one bucket into another that is known to be dirty."""
    into[_COUNT] += other[_COUNT]
    into[_SUM] += other[_SUM]
    into[_MIN] = min(into[_MIN], other[_MIN])
    into[_MAX] = max(into[_MAX], other[_MAX])


def bucketed(
    steps: NDArray[np.float64], values: NDArray[np.float64], width: int
) -> NDArray[np.float64]:
    """Return points as buckets."""
    if not len(steps):
        return np.empty((6, 0))
    keys = np.floor(steps / width)
    starts = _run_starts(keys)
    rows = np.empty((6, len(starts)))
    rows[_KEY] = keys[starts]
    rows[_COUNT, :-1] = starts[1:]
    rows[_COUNT, -1] = len(keys)
    rows[_COUNT] -= starts
    rows[_SUM] = np.add.reduceat(values, starts, dtype=np.float64)
    rows[_MIN] = np.minimum.reduceat(values, starts)
    rows[_MAX] = np.maximum.reduceat(values, starts)
    rows[_DIRTY] = 1
    return merged(rows)


def merged(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Merge buckets in any order, with duplicates, into unique increasing keys."""
    rows = _runs_merged(rows)
    keys = rows[_KEY]
    if (keys[1:] < keys[:-1]).any():
        rows = _runs_merged(rows[:, np.argsort(keys, kind="stable")])
    return rows


def _runs_merged(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    starts = _run_starts(rows[_KEY])
    if len(starts) == rows.shape[1]:
        return rows
    merged = np.empty((6, len(starts)))
    merged[_KEY] = rows[_KEY, starts]
    merged[_COUNT : _SUM + 1] = np.add.reduceat(rows[_COUNT : _SUM + 1], starts, axis=1)
    merged[_MIN] = np.minimum.reduceat(rows[_MIN], starts)
    merged[_MAX : _DIRTY + 1] = np.maximum.reduceat(rows[_MAX : _DIRTY + 1], starts, axis=1)
    return merged


def _run_starts(keys: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return where runs of equal keys begin."""
    begins: NDArray[np.bool_] = np.empty(len(keys), np.bool_)
    begins[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=begins[1:])
    return begins.nonzero()[0]


def as_buckets(rows: NDArray[np.float64]) -> Buckets:
    means = rows[_SUM] / rows[_COUNT]
    columns = (row.copy() for row in (rows[_KEY], rows[_COUNT], means, rows[_MIN], rows[_MAX]))
    return Buckets(*columns)


NOTHING = as_buckets(np.empty((6, 0)))
