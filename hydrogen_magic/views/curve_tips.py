"""Where the mean of all ranks ends, and its value there, while some ranks are ahead of others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from hydrogen_magic.views.point_buckets import Buckets, Points


@dataclass(frozen=True)
class Tip:
    """The newest step of a metric that more than half of the ranks that log it have reached.

    At the newest step of any rank, the mean would be the value of the one rank that is ahead.
    """

    step: int
    mean: float
    """Of the ranks that have reached :attr:`step`, each with its value there or at its last step before; may
    not be finite."""
    end: int | None
    """Where the mean's line ends: the first step that most ranks have not reached, though one has."""


class Logged(Protocol):
    """What one rank has logged of a metric; :class:`Points` without values that are not finite."""

    def reached(self) -> tuple[float, float]: ...

    def at(self, step: float) -> tuple[float, float] | None: ...


@dataclass(frozen=True)
class WithBad:
    """Finite points of a rank, and those that are not finite."""

    finite: Points
    bad: Points

    def reached(self) -> tuple[float, float]:
        (last, newest), (last_bad, newest_bad) = self.finite.reached(), self.bad.reached()
        return max(last, last_bad), max(newest, newest_bad)

    def at(self, step: float) -> tuple[float, float] | None:
        found = filter(None, (self.bad.at(step), self.finite.at(step)))
        return max(found, key=itemgetter(0), default=None)


def tip_of(ranks: Sequence[Logged], earlier: Sequence[Logged]) -> Tip | None:
    """Return the tip of the ranks that log a metric; None if none has a value.

    ``earlier``: other ranks, whose values are of an earlier attempt.
    """
    reached = [steps for rank in ranks if (steps := rank.reached())[1] > -math.inf]
    if not reached:
        return tip_of(earlier, ()) if earlier else None
    # A rank that counts its steps from 0 again, as in each epoch, is where it logged last.
    step = _reached_by_most(last for last, _ in reached)
    found = (rank.at(step) for rank in (*ranks, *earlier) if rank.reached()[0] >= step)
    values = [value for _, value in filter(None, found)]
    end = _reached_by_most(newest for _, newest in reached) + 1
    reached += [rank.reached() for rank in earlier]
    is_passed = max(newest for _, newest in reached) >= end
    return Tip(int(step), sum(values) / len(values), int(end) if is_passed else None)


def _reached_by_most(steps: Iterable[float]) -> float:
    ordered = sorted(steps)
    return ordered[(len(ordered) - 1) // 2]


def n_before_end(buckets: Buckets, width: int, tip: Tip | None) -> int:
    """Return how many buckets of all ranks the mean's line has: the whole ones, and at least the first.

    In the others, the ranks that are ahead count more than the rest.
    """
    if tip is None or tip.end is None:
        return len(buckets)
    return max(1, int(buckets.keys.searchsorted(tip.end // width)))
