"""Waits for slower ranks at the end of a backward pass, separated from the reduction of gradients.

A rank reports one span from the moment it has computed its gradients until all are reduced. The spans of
one reduction overlap on all ranks: the others wait until the last rank begins; from then on, gradients are
reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hydrogen_magic.core import events as ev

_LEAST_S = 5e-5
"""A shorter wait is random."""


@dataclass(frozen=True)
class Reduction:
    """One rank's part in one reduction, or an interval of it."""

    rank: int
    start_s: float
    end_s: float
    depth: int
    name: str = ev.GRADIENTS


def grouped(found: Iterable[Reduction]) -> list[list[Reduction]]:
    """Return the reductions in order; overlapping spans belong to one reduction."""
    groups: list[list[Reduction]] = []
    until_s = 0.0
    for each in sorted(found, key=lambda reduction: reduction.start_s):
        if groups and each.start_s < until_s:
            groups[-1].append(each)
            until_s = min(until_s, each.end_s)
        else:
            groups.append([each])
            until_s = each.end_s
    return groups


def split(group: Sequence[Reduction], np: int) -> Iterator[Reduction]:
    """Yield the spans of one reduction, with waiting and reducing separated if every rank is in it once."""
    last = max(group, key=lambda each: each.start_s)
    is_whole = np > 1 and sorted(each.rank for each in group) == list(range(np))
    for each in group:
        if not is_whole or last.start_s - each.start_s < _LEAST_S:
            yield each
        else:
            yield replace(each, end_s=last.start_s, name=f"waiting for rank {last.rank}")
            yield replace(each, start_s=last.start_s)
