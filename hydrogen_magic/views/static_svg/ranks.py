"""The table of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydrogen_magic.core.units import size_text
from hydrogen_magic.driver.state.formatting import number
from hydrogen_magic.driver.state.gang_state import GangState, RankState
from hydrogen_magic.views.short_names import short_names
from hydrogen_magic.views.static_svg.ansi import cell, name_html
from hydrogen_magic.views.static_svg.colours import of_rank
from hydrogen_magic.views.text_table import phase_counts, phase_text

_MOST_METRICS = 6
_LONGEST_TITLE = 24
_MOST_COLOURS = 8
"""Ranks up to which a colour means one rank, as in the curves."""


def ranks_html(state: GangState, ranks: Sequence[int]) -> list[str]:
    """Return the rows of ``ranks`` as lines of HTML, and the number of all ranks."""
    shown = [state.ranks[rank] for rank in ranks if rank < len(state.ranks)]
    has_hosts = len({rank.host for rank in state.ranks if rank.host}) > 1
    names = list(dict.fromkeys(name for rank in state.ranks for name in rank.last_metrics))
    names = names[:_MOST_METRICS]
    titles = dict(zip(names, short_names(names, _LONGEST_TITLE), strict=True))
    rows = [_cells(rank, state, titles, has_hosts) for rank in shown]
    if not rows:
        return []
    columns = [n for n in range(len(rows[0])) if any(row[n].content for row in rows)]
    head = "".join(rows[0][n].header() for n in columns)
    body = ["<tr>" + "".join(row[n].html() for n in columns) + "</tr>" for row in rows]
    return [*_folded(state, len(rows)), f"<table><tr>{head}</tr>", *body, "</table>"]


def _folded(state: GangState, n_shown: int) -> list[str]:
    if n_shown == len(state.ranks):
        return []
    counts = name_html(phase_counts(state.ranks), 200)
    return [f"<p><b>{len(state.ranks):,} ranks</b>: {counts} · shown: the failed, the slowest</p>"]


@dataclass(frozen=True)
class _Cell:
    """One value under its title; ``content`` is HTML, empty without a value."""

    title: str
    content: str
    side: str = "right"

    def header(self) -> str:
        return cell("th", name_html(self.title, _LONGEST_TITLE), self.side)

    def html(self) -> str:
        return cell("td", self.content, self.side)


def _cells(
    rank: RankState, state: GangState, metrics: Mapping[str, str], has_hosts: bool
) -> list[_Cell]:
    swatch = f'<span style="color:{of_rank(rank.rank)}">&#9632;</span>&nbsp;'
    name = f"rank&nbsp;{rank.rank}"
    gpu_bytes = rank.gpu_memory_bytes
    return [
        _Cell("rank", swatch + name if len(state.ranks) <= _MOST_COLOURS else name, "left"),
        _Cell("state", name_html(phase_text(rank, state.now_s)), "left"),
        _Cell("device", name_html(rank.device, 24), "left"),
        _Cell("host", name_html(rank.host, 40) if has_hosts else "", "left"),
        _Cell("progress", _progress(rank)),
        _Cell("rate", _rate(rank)),
        _Cell("steps", f"{rank.steps}" if rank.steps else ""),
        *(_metric(rank, name, title) for name, title in metrics.items()),
        _Cell("memory", size_text(rank.rss_bytes) if rank.rss_bytes else ""),
        _Cell("GPU memory", size_text(gpu_bytes) if gpu_bytes else ""),
    ]


def _metric(rank: RankState, name: str, title: str) -> _Cell:
    value = rank.last_metrics.get(name)
    return _Cell(title, "" if value is None else number(value))


def _progress(rank: RankState) -> str:
    bar = rank.bar
    if bar is None:
        return ""
    if not bar.total:
        return name_html(f"{bar.desc} {_count(bar.n)} {bar.unit}".strip(), 48)
    return name_html(f"{bar.desc} {number(bar.n)}/{number(bar.total)}", 48)


def _rate(rank: RankState) -> str:
    """Return the rate of a bar without a total: there is no other measure of the rank's speed."""
    bar = rank.bar
    if bar is None or bar.total or not bar.per_s:
        return ""
    return name_html(f"{_count(bar.per_s)} {bar.unit}/s", 48)


def _count(value: float) -> str:
    """Return ``1,234,567``; smaller numbers with their significant digits."""
    return f"{value:,.0f}" if 1000 <= value < math.inf else number(value)
