"""How far ranks are, and who of them holds the gang up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from hydrogen_magic.gang.state import Bar, GangState, RankState
from hydrogen_magic.gang.waits import late_by_now

__all__ = ["is_waiting", "progress", "remaining_s", "stragglers"]

_WAIT_S = 1.0
"""Ranks that keep step wait for each other all the time, but not for so long."""
_BEHIND = 0.1
"""Part of what the ranks in the middle have done that a rank may lack: less is chance."""
_STEPS_BEHIND = 3
"""The same in steps, for the beginning of a run."""
_PROGRESS_BEHIND = 0.05
"""And in parts of all its work, where nobody counts steps."""
_FAST_ENOUGH_S = 1.0
"""A bar has to run for so long before it foretells anything."""


def stragglers(state: GangState, now_s: float) -> frozenset[int]:
    """Return the ranks that others wait for in a collective, again and again, or that are clearly behind.

    Stopped ranks are among them when others wait. Empty where nobody is worse than the rest.
    """
    running = [rank for rank in state.ranks if rank.phase == "running"]
    if state.is_terminal or len(running) < 2:
        return frozenset()
    waited_for = _waited_for(running, now_s)
    if waited_for:
        return waited_for
    late = late_by_now({rank.rank: rank.waits for rank in running}, now_s)
    if late is not None:
        return frozenset(late.ranks)
    steps = {rank.rank: float(rank.steps) for rank in running if rank.steps}
    if len(steps) > len(running) / 2:
        return _behind({rank.rank: float(rank.steps) for rank in running}, _STEPS_BEHIND)
    done = {rank.rank: done for rank in running if (done := progress(rank)) is not None}
    return _behind(done, _PROGRESS_BEHIND)


def is_waiting(rank: RankState, now_s: float) -> bool:
    """Tell whether the rank is inside a collective for longer than keeping step takes."""
    return bool(rank.waiting_in) and now_s - rank.waiting_since_s >= _WAIT_S


def progress(rank: RankState) -> float | None:
    """Return how much of its work the rank has done, 0 to 1; None without a bar that tells.

    The outermost open bar with a total counts, and of the bars inside of it what they add to its
    present unit: 1 of 4 epochs and 30 of 60 batches are 0.375.
    """
    bars = _telling(rank.bars.values())
    if not bars:
        bars = [bar for bar in rank.bars.values() if _tells(bar)][-1:]
    done = 0.0
    for bar in reversed(bars):
        done = min(1.0, max(0.0, (bar.n + done) / (bar.total or 1.0)))
    return done if bars else None


def remaining_s(rank: RankState, now_s: float) -> float | None:
    """Return when the rank's outermost bar will be full if it goes on as before; None: unknown."""
    bars = _telling(rank.bars.values())
    done = progress(rank)
    if not bars or not done or rank.is_over:
        return None
    updated_s = max(bar.updated_s for bar in bars)
    elapsed_s = updated_s - bars[0].started_s
    if elapsed_s < _FAST_ENOUGH_S:
        return None
    return max(0.0, elapsed_s * (1 - done) / done - max(0.0, now_s - updated_s))


def _waited_for(running: Sequence[RankState], now_s: float) -> frozenset[int]:
    """Return the ranks that are not in the collective where others wait; these must be fewer."""
    waiting = [rank for rank in running if is_waiting(rank, now_s)]
    absent = [rank for rank in running if not rank.waiting_in]
    is_some = bool(waiting) and 2 * len(absent) <= len(running)
    return frozenset(rank.rank for rank in absent) if is_some else frozenset()


def _behind(done: dict[int, float], at_least: float) -> frozenset[int]:
    if len(done) < 2:
        return frozenset()
    middle = statistics.median(done.values())
    limit = middle - max(at_least, _BEHIND * middle)
    return frozenset(rank for rank, value in done.items() if value < limit)


def _tells(bar: Bar) -> bool:
    return math.isfinite(bar.n) and 0 < (bar.total or 0.0) < math.inf


def _telling(bars: Iterable[Bar]) -> list[Bar]:
    """Return the open bars with a total, outermost first."""
    return [bar for bar in bars if not bar.closed and _tells(bar)]
