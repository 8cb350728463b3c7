"""Where ranks wait in collectives, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydrogen_magic.driver.state.culprit import DIFFERENT_TENSORS, left_collective
from hydrogen_magic.driver.state.formatting import duration, ranks_text
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import clean_name

_MOST_SENTENCES = 3


def waits(
    state: GangState, now_s: float, least_s: float = 0.0, *, is_past: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield what to say about ranks that have waited for more than ``least_s``.

    Each text has a key, which stays the same as long as the same ranks wait in the same collective.
    """
    alive = [rank for rank in state.ranks if not rank.is_over]
    waiting = [rank for rank in alive if rank.waiting_in and now_s - rank.waiting_since_s > least_s]
    names = list(dict.fromkeys(rank.waiting_in for rank in waiting))
    if len(names) > 1 and len(waiting) == len(alive):
        places = (f"rank {rank.rank} in {clean_name(rank.waiting_in)}" for rank in waiting[:8])
        verb = "disagreed" if is_past else "disagree"
        yield f"disagree {names}", f"ranks {verb}: {', '.join(places)}"
        return
    absent = [rank.rank for rank in alive if not rank.waiting_in]
    missing = (
        f"; missing: {ranks_text(absent)}" if absent else _left(state) or _finished(state, names)
    )
    for name in names:
        same = [rank for rank in waiting if rank.waiting_in == name]
        who = ranks_text([rank.rank for rank in same])
        waited = duration(max(now_s - rank.waiting_since_s for rank in same))
        verb = "waited" if is_past else "waits" if len(same) == 1 else "wait"
        yield f"in {name} {who}", f"{who} {verb} in {clean_name(name)} for {waited}{missing}"


def _finished(state: GangState, names: Sequence[str]) -> str:
    """Return which ranks have ended while others join, which may wait for them or be a group of their own."""
    finished = [rank.rank for rank in state.ranks if rank.has_run]
    is_joining = bool(names) and all(" #" not in name for name in names)
    verb = "has" if len(finished) == 1 else "have"
    return f"; {ranks_text(finished)} {verb} already finished" if finished and is_joining else ""


def _left(state: GangState) -> str:
    found = left_collective(state)
    return f"; {ranks_text(found.outside)} left it: {DIFFERENT_TENSORS}" if found else ""


def waits_at_stop(state: GangState) -> str:
    """Return where the ranks of a stopped gang waited when it was stopped, "" if none did."""
    before = state.before_stop
    if before is None or state.state != "STOPPED":
        return ""
    texts = [text for _, text in waits(before, before.now_s, is_past=True)]
    return f"when it was stopped, {'; '.join(texts[:_MOST_SENTENCES])}" if texts else ""
