"""Where the mean of all ranks ends, and its value there, while some ranks are ahead of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hydrogen_magic.views.point_buckets import Buckets, Points


@dataclass(frozen=True)
class Tip:
    """The newest step of a metric that at least half of the ranks that log it have reached.

    At the newest step of any rank, the mean would be the value of the one rank that is ahead.
    """

    step: int
    mean: float
    """Of the ranks with a value at :attr:`step`; may not be finite."""
    end: int | None
    """Where the mean's line ends: the first step that most ranks have not reached, though one has."""


class Logged(Protocol):
    """What one rank has logged of a metric; :class:`Points` without values that are not finite."""

    def reached(self) -> tuple[float, float]: ...

    def at(self, step: float) -> float | None: ...


@dataclass(frozen=True)
class WithBad:
    """Finite points of a rank, and those that are not finite."""

    finite: Points
    bad: Points

    def reached(self) -> tuple[float, float]:
        (last, newest), (last_bad, newest_bad) = self.finite.reached(), self.bad.reached()
        return max(last, last_bad), max(newest, newest_bad)

    def at(self, step: float) -> float | None:
        value = self.bad.at(step)
        return self.finite.at(step) if value is None else value


def tip_of(ranks: Sequence[Logged], earlier: Sequence[Logged]) -> Tip | None:
    """Return the tip of the ranks that log a metric; None if none has a value.

    ``earlier``: other ranks, whose values are of an earlier attempt.
    """
    reached = [steps for rank in ranks if (steps := rank.reached())[1] > -math.inf]
    if not reached:
        return tip_of(earlier, ()) if earlier else None
    # A rank that counts its steps from 0 again, as in each epoch, is where it logged last.
    step = _reached_by_half(last for last, _ in reached)
    values = [value for rank in (*ranks, *earlier) if (value := rank.at(step)) is not None]
    end = _reached_by_half(newest for _, newest in reached) + 1
    reached += [rank.reached() for rank in earlier]
    is_passed = max(newest for _, newest in reached) >= end
    return Tip(int(step), sum(values) / len(values), int(end) if is_passed else None)


def _reached_by_half(steps: Iterable[float]) -> float:
    ordered = sorted(steps)
    return ordered[len(ordered) // 2]


def n_before_end(buckets: Buckets, width: int, tip: Tip | None) -> int:
    """Return how many buckets of all ranks the mean's line has: the whole ones, and at least the first.

    In the others, the ranks that are ahead count more than the rest.
    """
    if tip is None or tip.end is None:
        return len(buckets)
    return max(1, int(buckets.keys.searchsorted(tip.end // width)))
