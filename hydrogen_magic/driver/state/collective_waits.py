"""Detects slow ranks by the time that each rank waits in collectives: the slowest one waits least.

This needs neither synchronized clocks nor information about the collective itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hydrogen_magic import plugins
from hydrogen_magic.core import events as ev

_MEMORY_S = 30.0
"""The weight of a wait falls to a third after this time: steps that take seconds are averaged, and changes
show."""
_LEAST_S = 2.0
"""Recorded time before a result is reported."""
_LEAST_SHARE = 0.1
"""Share of the time: ranks in step wait for each other too."""
_NEAR = 0.25
"""Who waits longer than the least by less than this part of the difference is late too."""


@dataclass(frozen=True)
class RankWaits:
    """How long a rank has waited, according to recorded spans."""

    since_s: float = math.inf
    """When the first wait began."""
    until_s: float = 0.0
    """End of the last wait."""
    total_s: float = 0.0
    recent_s: float = 0.0
    """The same with decaying weights; as of :attr:`until_s`."""


@dataclass(frozen=True)
class LateRanks:
    """Ranks that the others have waited for."""

    ranks: tuple[int, ...]
    share: float
    """Share of the observed time."""


def added(waits: RankWaits, event: ev.Spans) -> RankWaits:
    """Return ``waits`` with the collectives in ``event``."""
    is_all = event.track == ev.COLLECTIVES
    if not is_all and ev.GRADIENTS not in event.names:
        return waits
    since_s, until_s = waits.since_s, waits.until_s
    total_s, recent_s = waits.total_s, waits.recent_s
    joining = plugins.joining()  # once in a run: who is late there has imported for longer
    for name, start_ns, end_ns in zip(event.names, event.starts_ns, event.ends_ns, strict=True):
        if name in joining or end_ns < start_ns or not (is_all or name == ev.GRADIENTS):
            continue
        start_s, end_s = start_ns / 1e9, end_ns / 1e9
        since_s = min(since_s, start_s)
        recent_s = recent_s * _left(end_s - until_s) + end_s - start_s
        total_s += end_s - start_s
        until_s = max(until_s, end_s)
    return RankWaits(since_s, until_s, total_s, recent_s)


def late_by_now(by_rank: Mapping[int, RankWaits], now_s: float) -> LateRanks | None:
    """Return the ranks that the others have waited for recently; None if no rank stands out."""

    def recent_s(waits: RankWaits) -> float:
        return waits.recent_s * _left(now_s - waits.until_s)

    since_s = min((waits.since_s for waits in by_rank.values()), default=math.inf)
    if now_s - since_s < _LEAST_S:
        return None
    return _late(by_rank, recent_s, _MEMORY_S * (1 - _left(now_s - since_s)))


def late_in_all(by_rank: Mapping[int, RankWaits]) -> LateRanks | None:
    """Return the ranks that the others have waited for in all the recorded time, or None."""
    since_s = min((waits.since_s for waits in by_rank.values()), default=math.inf)
    until_s = max((waits.until_s for waits in by_rank.values()), default=0.0)
    if until_s - since_s < _LEAST_S:
        return None
    return _late(by_rank, lambda waits: waits.total_s, until_s - since_s)


def _left(seconds: float) -> float:
    """Return the remaining weight of a wait after this time."""
    return math.exp(-max(0.0, seconds) / _MEMORY_S)


def _late(
    by_rank: Mapping[int, RankWaits], waited_s: Callable[[RankWaits], float], of_s: float
) -> LateRanks | None:
    waited = {rank: waited_s(waits) for rank, waits in by_rank.items()}
    if len(waited) < 2 or not of_s > 0:
        return None
    least_s, most_s = min(waited.values()), max(waited.values())
    limit_s = least_s + _NEAR * (most_s - least_s)
    late = tuple(rank for rank, seconds in waited.items() if seconds <= limit_s)
    others_s = [seconds for rank, seconds in waited.items() if rank not in late]
    if not others_s or len(late) > len(others_s):
        return None
    late_s = sum(waited[rank] for rank in late) / len(late)
    share = (sum(others_s) / len(others_s) - late_s) / of_s
    return LateRanks(late, min(1.0, share)) if share >= _LEAST_SHARE else None
