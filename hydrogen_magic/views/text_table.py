"""A gang as lines of text: pure functions of its state, a time and a width."""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from hydrogen_magic.core.events import STOP_REASONS
from hydrogen_magic.core.units import clipped, counted, size_text
from hydrogen_magic.driver.state.collective_waits import late_by_now
from hydrogen_magic.driver.state.culprit import failed_ranks, shown_phase
from hydrogen_magic.driver.state.formatting import (
    closure_text,
    duration,
    late_text,
    number,
    progress_text,
    ranks_text,
)
from hydrogen_magic.driver.state.gang_state import GangState, ProgressBar, RankState
from hydrogen_magic.driver.state.output_lines import clean_name
from hydrogen_magic.driver.state.waiting_ranks import waits, waits_at_stop
from hydrogen_magic.views.metric_order import by_importance
from hydrogen_magic.views.short_names import short_names

MOST_ROWS = 16
"""Ranks with their own row; more are only counted."""
_MOST_METRICS = 4
_LONGEST_METRIC = 20
_LONGEST_PHASE = 48
_BAR_CELLS = 12
_SLOW_START_S = 15.0
_LONG_COLLECTIVE_S = 10.0
_NO_PROGRESS_S = 60.0
_NARROWEST = 20
"""Cells. Messages are not wrapped to less, but cut."""


@dataclass(frozen=True)
class Warned:
    """A possible problem, according to the state."""

    key: str
    """The same as long as the problem is the same, so that a log reports it once."""
    text: str


def gang_lines(state: GangState, now_s: float, width: int) -> list[str]:
    """Return the gang as lines of at most ``width`` cells: headline, ranks, warnings.

    ``now_s`` is the time since the launch, in seconds.
    """
    lines = [headline(state, now_s)]
    if state.rows is not None:
        lines.append(progress_text(state.rows, state.is_terminal))
    if len(state.ranks) <= MOST_ROWS:
        lines += _table(state, state.ranks, now_s, width)
    else:
        lines += _folded(state, now_s, width)
    messages = [f"! {warned.text}" for warned in warnings(state, now_s)]
    messages += [_notice_text(notice.level, notice.text) for notice in state.notices[-3:]]
    lines += (line for message in messages for line in _wrapped(message, width))
    return [_fit(line, width) for line in lines]


def headline(state: GangState, now_s: float) -> str:
    """Return one line about the whole gang."""
    attempt = f" · attempt {state.attempt + 1}" if state.attempt else ""
    return f"{name_and_size(state)} · {_state_text(state, now_s)}{attempt}"


def name_and_size(state: GangState) -> str:
    """Return ``gang 3f2a · 4 ranks``."""
    return f"gang {state.gang} · {counted(len(state.ranks), 'rank')}"


def text_while_running(state: GangState) -> str:
    """Return one line that stays true in a saved notebook, where nothing updates it."""
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.wall_time))
    return f"{name_and_size(state)} · started {started}; was running when this notebook was saved"


def as_of(now: float) -> str:
    """Return the time of a table that may be saved while gangs run; ``now`` is Unix time."""
    return f"as of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}"


def status_line(state: GangState, now_s: float) -> str:
    """Return one line about the gang's progress, for logs."""
    parts = [headline(state, now_s), phase_counts(state)]
    if state.rows is not None:
        parts.append(progress_text(state.rows, state.is_terminal))
    leader = slowest([rank for rank in state.ranks if not rank.is_over] or state.ranks)
    if leader:
        cells = _cells(leader[0], state.culprit, now_s)[_PROGRESS:]
        parts.append(f"rank {leader[0].rank}: {'  '.join(cell for cell in cells if cell)}")
    return " · ".join(part for part in parts if not part.endswith(": ") and part)


def _state_text(state: GangState, now_s: float) -> str:
    if state.state == "SUCCEEDED":
        return f"succeeded in {duration(now_s)}"
    if state.is_terminal:
        reason = clean_name(state.reason)
        ended = f"{state.state.lower()} after {duration(now_s)}"
        if reason.startswith("stopped by "):
            return f"{ended} {reason.removeprefix('stopped ')}"
        return f"{ended}: {reason.removeprefix('stopped: ')}" if reason else ended
    if state.stop_reason:
        how = "killing" if state.killed else "stopping"
        why, _ = STOP_REASONS.get(state.stop_reason, (state.stop_reason, ""))
        return f"{how} ({why}) · {duration(now_s)}"
    if state.queued is not None:
        have, wanted = state.queued
        return f"queued, {have} of {counted(wanted, 'slot')} · {duration(now_s)}"
    if state.closure is not None:
        return f"{closure_text(state.closure)} · {duration(now_s)}"
    where = f" · {clean_name(state.reason)}" if state.reason else ""  # on another machine
    return f"{'starting' if state.state == 'PENDING' else 'running'} · {duration(now_s)}{where}"


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────

_NAME, _DEVICE, _PHASE, _PROGRESS, _RATE, _METRICS, _MEMORY = range(7)
_LAYOUTS = [
    (_MOST_METRICS, ()),
    (_MOST_METRICS, (_MEMORY,)),
    *((n_metrics, (_MEMORY, _DEVICE)) for n_metrics in range(_MOST_METRICS, -1, -1)),
    (0, (_MEMORY, _DEVICE, _RATE)),
    (0, (_MEMORY, _DEVICE, _RATE, _PROGRESS)),
]
"""Number of metrics, and columns left out, from the complete table to the shortest one."""


def _table(state: GangState, ranks: Sequence[RankState], now_s: float, width: int) -> list[str]:
    """Return one line per rank, in the fullest layout that fits."""
    lines: list[str] = []
    has_hosts = len({rank.host for rank in ranks if rank.host}) > 1
    for n_metrics, dropped in _LAYOUTS:
        rows = [_cells(rank, state.culprit, now_s, n_metrics, has_hosts) for rank in ranks]
        lines = _aligned([[c for i, c in enumerate(row) if i not in dropped] for row in rows])
        if all(cell_len(line) <= width for line in lines):
            break
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of equally wide columns; empty columns take no space."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    kept = [index for index, width in enumerate(widths) if width]
    return ["  ".join(set_cell_size(row[i], widths[i]) for i in kept).rstrip() for row in rows]


def _cells(
    rank: RankState,
    culprit: int | None,
    now_s: float,
    n_metrics: int = _MOST_METRICS,
    has_hosts: bool = False,
) -> list[str]:
    """Return the columns of one rank; empty without a value."""
    host = [clean_name(rank.host)] if has_hosts and rank.host else []
    return [
        f"rank {rank.rank}",
        " · ".join([*host, rank.device]),
        phase_text(rank, now_s, shown_phase(rank, culprit)),
        _bar_cell(rank.bar),
        _rate_text(rank, now_s),
        _metrics_cell(rank, n_metrics),
        size_text(rank.rss_bytes) if rank.rss_bytes and not rank.is_over else "",
    ]


def phase_text(rank: RankState, now_s: float, phase: str) -> str:
    """Return the rank's activity, or how it ended; ``phase`` is its :func:`shown_phase`."""
    if rank.is_over:
        return _failure_text(rank) if phase == "failed" else phase
    if rank.process_state == "T":
        return "stopped (SIGSTOP)"
    if rank.input_request is not None:
        return "waiting for input"
    if rank.waiting_in:
        waited = now_s - rank.waiting_since_s
        since = f", {duration(waited)}" if waited >= 1 else ""
        return clean_name(f"in {rank.waiting_in}") + since
    doing = clean_name(f"{rank.phase}: {rank.detail}" if rank.detail else rank.phase)
    return clipped(doing, _LONGEST_PHASE)


def _failure_text(rank: RankState) -> str:
    if rank.failure is not None:
        kind = clean_name(rank.failure.error.type).rpartition(".")[2]
        return clipped(f"failed: {kind}", _LONGEST_PHASE)
    if rank.exited is not None:
        return f"failed: {rank.exited.signal_name or f'exit status {rank.exited.exit_code}'}"
    return rank.phase


def _bar_cell(bar: ProgressBar | None) -> str:
    if bar is None:
        return ""
    desc = set_cell_size(clean_name(bar.desc), min(16, cell_len(clean_name(bar.desc))))
    fraction = bar.fraction
    if fraction is None or not math.isfinite(fraction):
        return f"{desc} {number(bar.n)} {clean_name(bar.unit)[:12]}".strip()
    full = int(max(0.0, fraction) * _BAR_CELLS)
    drawn = "█" * full + "░" * (_BAR_CELLS - full)
    return f"{desc} {drawn} {number(bar.n)}/{number(bar.total or 0)}".strip()


def _rate_text(rank: RankState, now_s: float) -> str:
    """Return the rank's rate, after its end its number of steps; empty if unknown."""
    if rank.is_over:
        return counted(rank.steps, "step") if rank.steps else ""
    rate = rank.steps_per_s(now_s)
    if rate is not None:
        return f"{number(rate)} steps/s"
    bar = rank.bar
    if bar is not None and bar.per_s and not bar.closed:
        return f"{number(bar.per_s)} {clean_name(bar.unit)[:12]}/s"
    return ""


def _metrics_cell(rank: RankState, n_metrics: int) -> str:
    last = rank.last_metrics
    shown = by_importance(last)[:n_metrics]
    names = short_names(list(map(clean_name, shown)), _LONGEST_METRIC)
    texts = [f"{name} {number(last[raw])}" for name, raw in zip(names, shown, strict=True)]
    more = len(last) - len(shown) if shown else 0
    return "  ".join([*texts, *([f"+{more}"] if more else [])])


# ── many ranks ───────────────────────────────────────────────────────────────────────────────────


def _folded(state: GangState, now_s: float, width: int) -> list[str]:
    """Return counts, then the rows of failed ranks and of the slowest."""
    ranks = state.ranks
    lines = [phase_counts(state)]
    lines += _table(state, failed_ranks(state)[:4], now_s, width)
    alive = [rank for rank in ranks if not rank.is_over]
    last = slowest(alive or [rank for rank in ranks if rank.phase == "stopped"])[:4]
    if last:
        lines.append("slowest:")
        lines += _table(state, last, now_s, width)
    return lines


def phase_counts(state: GangState) -> str:
    """Return ``3 running, 1 failed``; a rank that failed since a peer had failed counts as stopped."""
    counts = Counter(shown_phase(rank, state.culprit) for rank in state.ranks)
    return ", ".join(f"{number} {phase}" for phase, number in counts.items())


_PHASE_ORDER = ("waiting", "starting", "loading", "running", "finishing")


def slowest(ranks: Sequence[RankState]) -> list[RankState]:
    """Return the ranks, those with the least progress first; of those at their end, the last one."""

    def distance(rank: RankState) -> tuple[int, float, float, float]:
        phase = _PHASE_ORDER.index(rank.phase) if rank.phase in _PHASE_ORDER else 9
        fraction = (rank.bar.fraction or 0.0) if rank.bar else 0.0
        return phase, fraction, float(rank.steps), -rank.phase_since_s if rank.is_over else 0.0

    return sorted(ranks, key=distance)


# ── warnings ─────────────────────────────────────────────────────────────────────────────────────


def warnings(state: GangState, now_s: float) -> list[Warned]:
    """Return warnings about missing slots, and about stopped, late, waiting or silent ranks.

    Of a gang that was stopped: where its ranks waited then.
    """
    if state.is_terminal:
        text = waits_at_stop(state)
        return [Warned("at stop", text)] if text else []
    alive = [rank for rank in state.ranks if not rank.is_over]
    return [
        *_queued(state),
        *_stopped(alive),
        *_asking(alive),
        *_late(alive, now_s),
        *_in_collectives(state, now_s),
        *_waited_for(alive, now_s),
        *_silent(state.gang, alive, now_s),
    ]


def _queued(state: GangState) -> Iterable[Warned]:
    if state.waits_for and not state.stop_reason:
        yield Warned("queued", f"waiting for slots: {clean_name(state.waits_for)}")


def _stopped(alive: Sequence[RankState]) -> Iterable[Warned]:
    for rank in alive:
        if rank.process_state == "T":
            go_on = f": kill -CONT {rank.pid} resumes it" if rank.pid else ""
            yield Warned(f"T{rank.rank}", f"rank {rank.rank} is stopped (SIGSTOP){go_on}")


def _asking(alive: Sequence[RankState]) -> Iterable[Warned]:
    asking = [rank for rank in alive if rank.input_request is not None]
    if asking:
        verb = "is" if len(asking) == 1 else "are"
        yield Warned(f"input {_grouped(asking)}", f"{_grouped(asking)} {verb} waiting for input")


def _late(alive: Sequence[RankState], now_s: float) -> Iterable[Warned]:
    late = [
        rank
        for rank in alive
        if rank.phase in ("starting", "loading") and now_s - rank.phase_since_s > _SLOW_START_S
    ]
    for what in dict.fromkeys(rank.detail or rank.phase for rank in late):
        same = [rank for rank in late if (rank.detail or rank.phase) == what]
        waited = duration(max(now_s - rank.phase_since_s for rank in same))
        who = _grouped(same)
        yield Warned(f"late {what} {who}", f"waiting for {who}: {clean_name(what)}, {waited}")


def _in_collectives(state: GangState, now_s: float) -> Iterable[Warned]:
    for key, text in waits(state, now_s, _LONG_COLLECTIVE_S):
        yield Warned(key, text)


def _waited_for(alive: Sequence[RankState], now_s: float) -> Iterable[Warned]:
    late = late_by_now({rank.rank: rank.waits for rank in alive if rank.phase == "running"}, now_s)
    if late is not None:
        yield Warned(f"waited for {late.ranks}", late_text(late))


def _silent(gang: str, alive: Sequence[RankState], now_s: float) -> Iterable[Warned]:
    def is_silent(rank: RankState) -> bool:
        quiet_s = now_s - max(rank.active_s, rank.phase_since_s)
        is_compiling = rank.phase == "running" and bool(rank.detail)
        is_waiting = bool(rank.waiting_in) or rank.input_request is not None
        expected = rank.phase in ("running", "finishing") and not (is_waiting or is_compiling)
        return expected and rank.process_state != "T" and quiet_s > _NO_PROGRESS_S

    silent = [rank for rank in alive if is_silent(rank)]
    if silent:
        quiet_s = min(now_s - max(rank.active_s, rank.phase_since_s) for rank in silent)
        who = _grouped(silent)
        hint = f"%gang stacks {gang} shows where it is"
        yield Warned(f"silent {who}", f"{who}: no progress for {duration(quiet_s)}: {hint}")


def _grouped(ranks: Sequence[RankState]) -> str:
    return ranks_text([rank.rank for rank in ranks])


def _notice_text(level: str, text: str) -> str:
    return f"{'' if level == 'info' else '! '}{clean_name(text)}"


def _wrapped(message: str, width: int) -> list[str]:
    """Return ``message`` as up to three lines: most messages end with the remedy."""
    return textwrap.wrap(
        message,
        max(width, _NARROWEST),
        subsequent_indent="  ",
        break_on_hyphens=False,
        max_lines=3,
        placeholder=" …",
    )


def _fit(line: str, width: int) -> str:
    """Return ``line`` in at most ``width`` cells, cut with an ellipsis."""
    if cell_len(line) <= width:
        return line
    return set_cell_size(line, width - 1).rstrip() + "…" if width > 1 else "…"[: max(0, width)]
