"""Progress of ranks, and ranks that hold up the gang."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hydrogen_magic.driver.state.collective_waits import late_by_now
from hydrogen_magic.driver.state.formatting import number
from hydrogen_magic.driver.state.gang_state import GangState, ProgressBar, RankState

_WAIT_S = 1.0
"""Ranks in step wait for each other all the time, but not for this long."""
_BEHIND = 0.1
"""Lag behind the median, as a part of it, that counts: a smaller one is random."""
_STEPS_BEHIND = 3
"""The same in steps, for the start of a run."""
_PROGRESS_BEHIND = 5
"""And in percent of all its work, if no steps are counted."""
_FAST_ENOUGH_S = 1.0
"""A bar has to run for this long before its rate is used."""


def stragglers(state: GangState, now_s: float) -> Mapping[int, str]:
    """Return the ranks that others wait for, or that are clearly behind, each with the reason.

    They include stopped ranks if others wait. Empty if no rank is worse than the rest.
    """
    running = [
        rank
        for rank in state.ranks
        if rank.phase == "running" and not (rank.input_request or rank.debugger_request)
    ]
    if state.is_terminal or len(running) < 2:
        return {}
    waited_for = _waited_for(running, now_s)
    if waited_for:
        return waited_for
    late = late_by_now({rank.rank: rank.waits for rank in running}, now_s)
    if late is not None:
        return dict.fromkeys(late.ranks, f"peers wait {100 * late.share:.0f} % of the time")
    steps = {rank.rank: float(rank.steps) for rank in running if rank.steps}
    if len(steps) > len(running) / 2:
        done = {rank.rank: float(rank.steps) for rank in running}
        return _behind(done, _STEPS_BEHIND, "{:.0f} steps, median {:.0f}")
    words = "{:.0f} % done, median {:.0f} %"
    parts = {rank.rank: 100 * part for rank in running if (part := progress(rank)) is not None}
    # A second bar in an epoch begins at 0 again: its rank is ahead of those in the first one.
    epochs = {rank: 100 * part for rank, part in _outermost(running).items() if rank in parts}
    late_by_epochs = _behind(epochs, _PROGRESS_BEHIND, words)
    behind = _behind(parts, _PROGRESS_BEHIND, words)
    return {rank: reason for rank, reason in behind.items() if rank in late_by_epochs}


def is_waiting(rank: RankState, now_s: float) -> bool:
    """Return whether the rank has been inside a collective for longer than ranks in step."""
    return bool(rank.waiting_in) and now_s - rank.waiting_since_s >= _WAIT_S


def progress(rank: RankState) -> float | None:
    """Return the finished part of its work, 0 to 1; None without a suitable bar.

    It is computed from the outermost open bar with a total, and the bars inside of it as fractions of its
    current unit: 1 of 4 epochs and 30 of 60 batches are 0.375. Of several bars in an epoch, each counts as an
    equal part of it.
    """
    inside: float | None = None
    for bar in reversed(_telling_or_last(rank)):
        n_inside = bar.n_inside if inside is None else max(0, bar.n_inside - 1) + inside
        done = (bar.n + n_inside / max(1, bar.most_inside)) / (bar.total or 1.0)
        inside = min(1.0, max(0.0, done))
    return inside


def _outermost(ranks: Sequence[RankState]) -> dict[int, float]:
    """Return the finished part of each rank's outermost bar, or of its last one if none is open."""
    found = {rank.rank: _telling_or_last(rank) for rank in ranks}
    return {rank: bars[0].n / (bars[0].total or 1.0) for rank, bars in found.items() if bars}


def remaining_s(rank: RankState, now_s: float) -> float | None:
    """Return when the rank's outermost bar will be full at its current rate; None: unknown.

    With several bars in each epoch, whose parts of its time are not known, whole epochs count alone.
    """
    bars = _telling(rank.bars.values())
    done = progress(rank)
    if not bars or not done or rank.is_over:
        return None
    if bars[0].most_inside > 1:
        return _remaining_of_units_s(bars[0], now_s)
    updated_s = max(bar.updated_s for bar in bars)
    elapsed_s = updated_s - bars[0].started_s
    done_here = done - bars[0].began_at / (bars[0].total or 1.0)
    if elapsed_s < _FAST_ENOUGH_S or done_here <= 0:
        return None
    return max(0.0, elapsed_s * (1 - done) / done_here - max(0.0, now_s - updated_s))


def outermost_text(ranks: Sequence[RankState]) -> str:
    """Return ``epoch 3/10``: the outermost bar that is least finished, of those with other bars inside."""
    outermost = [bars[0] for rank in ranks if (bars := _telling(rank.bars.values()))]
    around = [bar for bar in outermost if bar.most_inside]
    if not around:
        return ""
    slowest = min(around, key=lambda bar: bar.n / (bar.total or 1.0))
    done = f"{number(slowest.n)}/{number(slowest.total or 0.0)}"
    return f"{slowest.desc.strip().removesuffix(':')} {done}".strip()


def _remaining_of_units_s(bar: ProgressBar, now_s: float) -> float | None:
    """Return when a bar will be full by the time that its units took.

    None: none is finished, all are, or the last one takes longer than the others.
    """
    n_done = bar.n - bar.began_at
    if n_done <= 0 or bar.advanced_s - bar.started_s < _FAST_ENOUGH_S:
        return None
    unit_s = (bar.advanced_s - bar.started_s) / n_done
    left_s = unit_s * ((bar.total or 0.0) - bar.n) - min(unit_s, now_s - bar.advanced_s)
    return max(0.0, left_s) or None


def _waited_for(running: Sequence[RankState], now_s: float) -> Mapping[int, str]:
    """Return the ranks outside of the collective where others wait; these must be the minority."""
    waiting = [rank for rank in running if is_waiting(rank, now_s)]
    absent = [rank for rank in running if not rank.waiting_in]
    is_some = bool(waiting) and 2 * len(absent) <= len(running)
    if not is_some:
        return {}
    where = Counter(rank.waiting_in for rank in waiting).most_common(1)[0][0]
    who = "1 rank waits" if len(waiting) == 1 else f"{len(waiting)} ranks wait"
    return {rank.rank: f"{who} for it in {where}" for rank in absent}


def _behind(done: Mapping[int, float], at_least: float, words: str) -> Mapping[int, str]:
    """Return the ranks that lag by ``at_least`` this much; ``words`` formats their value and the median."""
    if len(done) < 2:
        return {}
    middle = statistics.median(done.values())
    limit = middle - max(at_least, _BEHIND * middle)
    return {rank: words.format(value, middle) for rank, value in done.items() if value < limit}


def _telling(bars: Iterable[ProgressBar]) -> list[ProgressBar]:
    """Return the open bars with a total, outermost first."""
    return [bar for bar in bars if not bar.closed and bar.has_total]


def _telling_or_last(rank: RankState) -> list[ProgressBar]:
    """Return its open bars with a total, outermost first, or the last one with a total if none is open."""
    bars = list(rank.bars.values())
    return _telling(bars) or [bar for bar in bars if bar.has_total][-1:]
