"""Plain tables: captured objects, the plan of ranks, and lists of gangs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from hydrogen_magic.core.job import Plan, Slot
from hydrogen_magic.core.masking import Mask, secret_values
from hydrogen_magic.core.units import counted, first_of, size_text
from hydrogen_magic.driver.state.formatting import duration, number
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import clean_name

if TYPE_CHECKING:
    from hydrogen_magic.capture import CapturedItem
    from hydrogen_magic.driver.session import RankSession

_MOST_CHARS = 300
"""Of a cell in HTML."""
_MOST_PER_RUN = 6
"""Metrics, and captured values, of one run in a list."""


@dataclass(frozen=True)
class Table:
    """Rows below a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> list[str]:
        """Return it as text."""
        return table(self.header, self.rows)

    def html(self) -> str:
        """Return it for any page; long cells wrap."""
        from hydrogen_magic.views.static_svg.ansi import name_html, table_html

        titles = [name_html(title) for title in self.header]
        rows = [[name_html(text, _MOST_CHARS) for text in row] for row in self.rows]
        # MathJax would render text between two dollar signs.
        attributes = ' class="tex2jax_ignore mathjax_ignore"'
        return "".join(table_html(titles, rows, len(titles), attributes))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return aligned lines, two spaces between the columns."""
    lines = [list(header), *([clean_name(text) for text in row] for row in rows)]
    widths = [max(cell_len(line[i]) for line in lines) for i in range(len(header))]
    padded = (map(set_cell_size, line, widths) for line in lines)
    return ["  ".join(cells).rstrip() for cells in padded]


def inventory_table(items: Sequence[CapturedItem], total_bytes: int) -> list[str]:
    """Return the objects that a cell captures, the largest first, and the total."""
    biggest_first = sorted(items, key=lambda item: -item.nbytes)
    rows = [(i.name, i.kind, size_text(i.nbytes), i.why) for i in biggest_first]
    total = f"{counted(len(rows), 'name')}, {size_text(total_bytes)} in all"
    return [*table(("name", "kind", "size", "why"), rows), total]


def plan_table(plan: Plan) -> list[str]:
    """Return the host of each rank, the notes of the plan, and forwarded variables."""
    rows = [_plan_row(slot) for slot in plan.slots]
    hidden = Mask(secret_values(dict(plan.forwarded)))
    forwarded = [(name, hidden.text(value)) for name, value in plan.forwarded]
    more = ["", *table(("forwarded variable", "value"), forwarded)] if forwarded else []
    notes = [*filter(None, [plan.hosts_note]), *plan.notes]
    return [*table(("rank", "host", "local_rank", "device"), rows), *notes, *more]


def sessions_table(sessions: Iterable[RankSession]) -> Table:
    """Return the live sessions, and what their ranks hold."""
    header = ("session", "ranks", "on", "started", "idle for", "memory", "names")
    return Table(header, [*map(_session_row, sessions)])


def _session_row(one: RankSession) -> tuple[str, ...]:
    idle = "running" if one.is_running else duration(time.monotonic() - one.idle_since_s)
    started = time.strftime("%H:%M:%S", time.localtime(one.since))
    ranks, memory = str(one.spec.np), size_text(one.memory_bytes)
    if one.gpu_memory_bytes:
        memory += f", GPU {size_text(one.gpu_memory_bytes)}"
    return one.title, ranks, one.place, started, idle, memory, one.shown_names


def _plan_row(slot: Slot) -> tuple[str, str, str, str]:
    local_rank = str(slot.local_rank) if slot.address else "?"
    device = "CPU" if slot.gpu is None else f"GPU {slot.gpu}"
    return str(slot.rank), slot.host, local_rank, device


def sweep_table(states: Sequence[GangState], n_at_once: int) -> list[str]:
    """Return one line for each run of a sweep that has not started, with its values."""
    names = list(states[0].params)
    rows = [(str(n), *(str(s.params[name]) for name in names)) for n, s in enumerate(states, 1)]
    return [*table(("run", *names), rows), f"{counted(len(rows), 'run')}, {n_at_once} at once"]


def gangs_table(states: Sequence[GangState]) -> Table:
    """Return one row for each gang, the newest last."""
    now = time.time()
    rows = [
        (
            state.gang,
            state.name,
            state.state,
            str(len(state.ranks)),
            state.placement,
            f"{duration(now - state.wall_time)} ago",
            duration(state.length_s(now)),
            _some(f"{name} {number(value)}" for name, value in state.last_metrics.items()),
            _some(f"{name}={value}" for name, value in state.params.items()),
        )
        for state in states
    ]
    header = ("gang", "name", "state", "np", "on", "started", "took", "last metrics", "values")
    return Table(header, rows)


def _some(texts: Iterable[str]) -> str:
    """Return the first few of ``texts``, and how many more there are."""
    return first_of(texts, _MOST_PER_RUN)
