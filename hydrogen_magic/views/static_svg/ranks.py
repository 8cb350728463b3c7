"""The table of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hydrogen_magic.core.units import size_text
from hydrogen_magic.driver.state.culprit import shown_phase
from hydrogen_magic.driver.state.formatting import number
from hydrogen_magic.driver.state.gang_state import GangState, RankState
from hydrogen_magic.views.metric_order import by_importance
from hydrogen_magic.views.short_names import short_names
from hydrogen_magic.views.static_svg.ansi import name_html, table_html
from hydrogen_magic.views.static_svg.colours import of_rank
from hydrogen_magic.views.text_table import phase_counts, phase_text

_MOST_METRICS = 6
_LONGEST_TITLE = 24
_TEXT_COLUMNS = 4
"""The first columns; the others are numbers in most cases."""
_MOST_COLOURS = 8
"""Ranks up to which a colour means one rank, as in the curves."""


def ranks_html(state: GangState, ranks: Sequence[int]) -> list[str]:
    """Return the rows of ``ranks`` as lines of HTML, and the number of all ranks."""
    shown = [state.ranks[rank] for rank in ranks if rank < len(state.ranks)]
    has_hosts = len({rank.host for rank in state.ranks if rank.host}) > 1
    names = list(dict.fromkeys(name for rank in state.ranks for name in rank.last_metrics))
    names = by_importance(names)[:_MOST_METRICS]
    titles = dict(zip(names, short_names(names, _LONGEST_TITLE), strict=True))
    rows = [_cells(rank, state, titles, has_hosts) for rank in shown]
    if not rows:
        return []
    columns = [n for n in range(len(rows[0])) if any(row[n][1] for row in rows)]
    head = [name_html(rows[0][n][0], _LONGEST_TITLE) for n in columns]
    body = [[row[n][1] for n in columns] for row in rows]
    n_left = sum(n < _TEXT_COLUMNS for n in columns)
    return [*_folded(state, len(rows)), *table_html(head, body, n_left)]


def _folded(state: GangState, n_shown: int) -> list[str]:
    if n_shown == len(state.ranks):
        return []
    counts = name_html(phase_counts(state), 200)
    return [
        f"<p><b>{len(state.ranks):,} ranks</b>: {counts} · shown: the first, the failed, the slowest</p>"
    ]


def _cells(
    rank: RankState, state: GangState, metrics: Mapping[str, str], has_hosts: bool
) -> list[tuple[str, str]]:
    """Return titles, and values as HTML, which are empty where there is none."""
    swatch = f'<span style="color:{of_rank(rank.rank)}">&#9632;</span>&nbsp;'
    name = f"rank&nbsp;{rank.rank}"
    phase, gpu_bytes = shown_phase(rank, state.culprit), rank.gpu_memory_bytes
    return [
        ("rank", swatch + name if len(state.ranks) <= _MOST_COLOURS else name),
        ("state", name_html(phase_text(rank, state.now_s, phase))),
        ("device", name_html(rank.device, 24)),
        ("host", name_html(rank.host, 40) if has_hosts else ""),
        ("progress", _progress(rank)),
        ("rate", _rate(rank)),
        ("steps", f"{rank.steps}" if rank.steps else ""),
        *(_metric(rank, name, title) for name, title in metrics.items()),
        ("memory", size_text(rank.rss_bytes) if rank.rss_bytes else ""),
        ("GPU memory", size_text(gpu_bytes) if gpu_bytes else ""),
    ]


def _metric(rank: RankState, name: str, title: str) -> tuple[str, str]:
    value = rank.last_metrics.get(name)
    return title, "" if value is None else number(value)


def _progress(rank: RankState) -> str:
    bar = rank.bar
    if bar is None:
        return ""
    counted = f"{number(bar.n)}/{number(bar.total)}" if bar.total else f"{_count(bar.n)} {bar.unit}"
    return f"{name_html(bar.desc, 40)} {name_html(counted, 24)}".strip()


def _rate(rank: RankState) -> str:
    """Return the rate of a bar without a total: there is no other measure of the rank's speed."""
    bar = rank.bar
    if bar is None or bar.total or not bar.per_s:
        return ""
    return name_html(f"{_count(bar.per_s)} {bar.unit}/s", 48)


def _count(value: float) -> str:
    """Return ``1,234,567``; smaller numbers with their significant digits."""
    return f"{value:,.0f}" if 1000 <= value < math.inf else number(value)
