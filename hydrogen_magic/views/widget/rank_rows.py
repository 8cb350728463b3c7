"""A gang's state as JSON of the protocol: header, rows of ranks, and a summary of all ranks.

To show another value of a rank, add it to :func:`rank_row` and to ``Rank`` in ``front/src/protocol.ts`` (tsc
names the places that create one). Add a column to ``front/src/view/figures.ts``, for text to
``views/text_table.py``, and for the picture that a notebook keeps to ``views/static_svg/ranks.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hydrogen_magic.core.events import RowsDone
from hydrogen_magic.driver.state.culprit import failed_ranks, shown_phase
from hydrogen_magic.driver.state.formatting import closure_text, progress_text
from hydrogen_magic.driver.state.gang_state import GangState, ProgressBar, RankState
from hydrogen_magic.driver.state.stragglers import is_waiting, outermost_text, progress, remaining_s
from hydrogen_magic.views.curves import metric_name
from hydrogen_magic.views.metric_order import by_importance
from hydrogen_magic.views.text_table import MOST_ROWS, phase_text, slowest, warnings
from hydrogen_magic.views.widget.json_values import figure, finite, plain

MARKS = ("", "straggler", "stopped", "dead", "waiting")
"""Highlights of a row, in the order of the protocol."""

_MOST_FAILED = 4
_MOST_SLOW = 4
_MOST_METRICS = 16
"""Last values in a row; all metrics have curves."""
_MOST_NOTICES = 50
_MOST_WARNINGS = 10
_LONGEST_NOTICE = 600
_UNKNOWN = 255
_LEVELS = ("info", "warning", "error")
_LONGEST_REMAINING_S = 1e9
"""Thirty years: a bar that never ends."""

_ENDS = {"SUCCEEDED": "done", "FAILED": "failed", "STOPPED": "stopped"}
_PHASES = (
    *("waiting", "starting", "loading", "running", "finishing"),
    *("done", "failed", "stopped", "idle"),
)


def gang_row(state: GangState, now_s: float) -> dict[str, Any]:
    """Return the gang as a ``Gang``."""
    running = [rank for rank in state.ranks if rank.phase == "running"]
    rates = [rate for rank in running if (rate := rank.steps_per_s(now_s)) is not None]
    notices = state.notices[-_MOST_NOTICES:]
    has_bars = state.rows is None and not state.is_terminal
    return {
        "id": plain(state.gang, 40),
        "title": plain(state.title, 300),
        "np": len(state.ranks),
        "state": _state_text(state),
        "reason": plain(state.reason, _LONGEST_NOTICE),
        "stop_reason": state.stop_reason,
        "attempt": state.attempt,
        "outlives": state.outlives,
        "placement": plain(state.placement, 40),
        "rendezvous": plain(state.rendezvous, 40),
        "sending": "" if state.closure is None else closure_text(state.closure),
        "queued": None if state.queued is None else list(state.queued),
        "ended_s": round(state.now_s, 3) if state.is_terminal else None,
        "rows": None if state.rows is None else _rows(state.rows, state.is_terminal),
        "outermost": plain(outermost_text(running), 60) if has_bars else "",
        "remaining_s": _slowest_remaining_s(running, now_s) if has_bars else None,
        "steps_per_s": _three_digits(min(rates)) if rates and not state.is_terminal else None,
        "notices": [
            {"level": _level(n.level), "text": plain(n.text, _LONGEST_NOTICE)} for n in notices
        ],
        "warnings": [plain(w.text, _LONGEST_NOTICE) for w in warnings(state, now_s)][
            :_MOST_WARNINGS
        ],
        "recording": state.is_recording,
        "profiling": plain(state.profiling, 20),
        "profiled_since_s": state.profiled_since_s,
    }


def _rows(rows: RowsDone, is_over: bool) -> dict[str, Any]:
    return {"share": _share(rows), "text": progress_text(rows, is_over)}


def _share(rows: RowsDone) -> float | None:
    """Return the finished part of the rows or else of Spark's tasks; None: unknown."""
    if rows.total is not None:
        return min(1.0, rows.done / rows.total) if rows.total else 1.0
    return (rows.tasks_done or 0) / rows.tasks if rows.tasks else None


def rank_row(rank: RankState, mark: str, now_s: float, why: str = "") -> dict[str, Any]:
    """Return a rank as a ``Rank``; ``mark`` is the result of :func:`marks`, ``why`` the reason."""
    phase = _phase(rank, mark)
    rate = rank.steps_per_s(now_s)
    shown = by_importance(rank.last_metrics)[:_MOST_METRICS]
    return {
        "rank": rank.rank,
        "host": plain(rank.host, 80),
        "device": plain(rank.device, 40),
        "phase": plain(phase, 20),
        "doing": plain(phase_text(rank, now_s, phase), 80),
        "bar": _bar(rank.bar),
        "steps": rank.steps,
        "steps_per_s": None if rate is None else _three_digits(rate),
        "metrics": {metric_name(name): figure(rank.last_metrics[name]) for name in shown},
        "rss_bytes": rank.rss_bytes,
        "gpu_percent": finite(rank.gpu_percent),
        "gpu_memory_bytes": rank.gpu_memory_bytes,
        "mark": mark,
        "why": plain(why, 80),
    }


def marks(state: GangState, behind: Container[int], now_s: float) -> list[str]:
    """Return the highlight of each rank, empty without one; ``behind``: the stragglers."""
    return [_mark(rank, state.culprit, rank.rank in behind, now_s) for rank in state.ranks]


def shown_ranks(
    state: GangState, watched: Sequence[int], behind: Mapping[int, str]
) -> Mapping[int, str]:
    """Return the ranks with a row, in order, and why each has one.

    A small gang shows all of them, a large one those that failed, delay others, are slowest, or were
    chosen. ``behind``: the stragglers and their reasons.
    """
    if len(state.ranks) <= MOST_ROWS:
        return {rank.rank: behind.get(rank.rank, "") for rank in state.ranks}
    alive = [rank for rank in state.ranks if not rank.is_over]
    others = [rank for rank in state.ranks if rank.phase != "failed"]
    compared = alive or others
    slow = [rank.rank for rank in slowest(compared)[:_MOST_SLOW]]
    why = "among the slowest" if alive else "least progress"
    progress = {(rank.phase, rank.steps, rank.bar and rank.bar.fraction) for rank in compared}
    if len(progress) == 1:
        why = ""
    reasons = {
        **dict.fromkeys(slow, why),
        **dict.fromkeys(watched, "chosen"),
        **dict(list(behind.items())[:_MOST_SLOW]),
        **dict.fromkeys(_failed_ranks(state), "failed"),
    }
    return dict(sorted(reasons.items()))


def followed_ranks(state: GangState, watched: Sequence[int]) -> list[int] | None:
    """Return the ranks whose curves are sent beside those of all ranks together; None: all of them.

    Not the slowest ones: these change all the time, and each would be sent with its whole history.
    """
    if len(state.ranks) <= MOST_ROWS:
        return None
    return sorted({0, *_failed_ranks(state), *watched})


def _failed_ranks(state: GangState) -> list[int]:
    return [rank.rank for rank in failed_ranks(state)[:_MOST_FAILED]]


def summary_columns(
    state: GangState, found_marks: Sequence[str], shown: Iterable[int], chosen: Iterable[int]
) -> tuple[dict[str, Any], bytes]:
    """Return all ranks as a ``RankSummary`` without its index, and its buffer."""
    words = list(map(_phase, state.ranks, found_marks))
    phases = [_PHASES.index(word) if word in _PHASES else 0 for word in words]
    columns = (phases, map(_percent, state.ranks), map(MARKS.index, found_marks))
    counts = Counter(plain(word, 20) for word in words)
    rows = {"shown": list(shown), "chosen": list(chosen)}
    head = {"counts": dict(counts), "phases": list(_PHASES), **rows}
    return head, b"".join(np.fromiter(column, np.uint8).tobytes() for column in columns)


def _state_text(state: GangState) -> str:
    if state.is_terminal:
        return _ENDS[state.state]
    if state.stop_reason:
        return "killing" if state.killed else "stopping"
    if state.queued is not None:
        return "queued"
    return "starting" if state.state == "PENDING" else "running"


def _slowest_remaining_s(running: Sequence[RankState], now_s: float) -> int | None:
    """Return the seconds until the slowest rank has finished its bars."""
    known = [left for rank in running if (left := remaining_s(rank, now_s)) is not None]
    longest_s = max(known, default=math.inf)
    return round(longest_s) if longest_s < _LONGEST_REMAINING_S else None


def _level(level: str) -> str:
    return level if level in _LEVELS else "warning"


def _three_digits(rate: float) -> float | None:
    return finite(float(f"{rate:.3g}"))


def _bar(bar: ProgressBar | None) -> dict[str, Any] | None:
    if bar is None:
        return None
    rate = finite(bar.per_s)
    return {
        "desc": plain(bar.desc, 80),
        "n": finite(bar.n) or 0,
        "total": finite(bar.total),
        "unit": plain(bar.unit, 12),
        "per_s": None if rate is None else _three_digits(rate),
    }


def _phase(rank: RankState, mark: str) -> str:
    """Return the phase for display, as :func:`shown_phase` does."""
    return "stopped" if rank.phase == "failed" and mark != "dead" else rank.phase


def _mark(rank: RankState, culprit: int | None, is_behind: bool, now_s: float) -> str:
    if rank.phase == "failed":
        return "dead" if shown_phase(rank, culprit) == "failed" else ""
    if rank.process_state == "T" and not rank.is_over:
        return "stopped"
    if is_behind:
        return "straggler"
    return "waiting" if not rank.is_over and is_waiting(rank, now_s) else ""


def _percent(rank: RankState) -> int:
    done = 1.0 if rank.phase == "done" else progress(rank)
    return _UNKNOWN if done is None else int(100 * done)
