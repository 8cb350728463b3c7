"""Several runs side by side: their curves in the same charts, and the values in which they differ."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from typing import Any, Protocol

from hydrogen_magic.core.events import Event
from hydrogen_magic.driver.state.formatting import duration, number
from hydrogen_magic.driver.state.gang_state import GangState, fold
from hydrogen_magic.views.curves import Curves
from hydrogen_magic.views.static_svg.ansi import name_html, table_html
from hydrogen_magic.views.static_svg.charts import overlaid_html
from hydrogen_magic.views.static_svg.colours import of_rank
from hydrogen_magic.views.tables import table
from hydrogen_magic.views.text_table import as_of
from hydrogen_magic.views.widget.display import CellOutput

MOST_RUNS = 8
"""As many as there are colours."""
_MOST_DRAWN = 24
"""Runs with curves: lines of the same colour have three dash patterns."""
_SQUARES = (9632, 9636, 9633)
"""Marks of runs: filled, striped and empty, as their lines are drawn."""
_INTERVAL_S = 1.0
"""Interval between updates: a picture of eight runs is some 100 kB."""
_MOST_METRICS = 12
_LONGEST_CELL = 60
_TEXT_COLUMNS = 2
"""Columns of text, the first ones; the others are numbers in most cases."""


class Run(Protocol):
    """A gang of this kernel, or one that is only on record."""

    def events(self, start: int = 0) -> Sequence[Event]: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...


class Comparison:
    """Runs in a fixed order, each built from its own events."""

    def __init__(self, runs: Sequence[Run], planned: Sequence[GangState] = ()) -> None:
        """``planned``: states of runs that have no events yet, which are told apart by their values."""
        self._runs = runs
        self._seen = [0] * len(runs)
        """Number of processed events of each."""
        self._states = list(planned) or [GangState()] * len(runs)
        self._curves = [Curves() for _ in runs]
        self._legend = [_told_apart(state.params.items()) for state in planned]
        self._is_running = self.read()

    def display(self) -> None:
        """Show it under the cell of a notebook; a thread updates it until the runs have ended."""
        output = CellOutput()
        self._show(output)
        if self._is_running:
            run = copy_context().run  # in it, ipykernel knows the cell of the thread's output
            threading.Thread(target=run, args=(self._follow, output), daemon=True).start()

    def _follow(self, output: CellOutput) -> None:
        while self._is_running:
            time.sleep(_INTERVAL_S)
            self._is_running = self.read()
            self._show(output)

    def _show(self, output: CellOutput) -> None:
        now = time.time()
        output.show({"text/html": self.html(now), "text/plain": "\n".join(self.lines(now))})

    @property
    def states(self) -> Sequence[GangState]:
        """The states of the runs after the events that were read."""
        return self._states

    def read(self) -> bool:
        """Process new events; return whether there may be more."""
        running = [not run.wait(0) for run in self._runs]
        for place, run in enumerate(self._runs):
            fresh = run.events(self._seen[place])
            self._seen[place] += len(fresh)
            self._curves[place].feed(fresh)
            for event in fresh:
                self._states[place] = fold(self._states[place], event)
        return any(running)

    def lines(self, now: float) -> list[str]:
        """Return a table; ``now`` is Unix time."""
        header, *rows = self._rows(now)
        return [*table(header, rows), *self._as_of(now)]

    def html(self, now: float) -> str:
        """Return table and charts for any page: no script, no style sheet; ``now`` is Unix time."""
        header, *rows = self._rows(now)
        titles = [name_html(title, _LONGEST_CELL) for title in header]
        body = [_cells(row, place) for place, row in enumerate(rows)]
        lines = table_html(titles, body, _TEXT_COLUMNS)
        lines += [f"<p>{text}</p>" for text in self._as_of(now)]
        charts = overlaid_html(self._drawn(), self._legend or _legend(self._states, rows))
        # MathJax would render text between two dollar signs.
        top = '<div class="hydrogen-magic tex2jax_ignore mathjax_ignore">'
        return "\n".join([top, *lines, *charts, "</div>"])

    def _as_of(self, now: float) -> list[str]:
        """Return the time of the table while runs go on: a saved notebook keeps it."""
        if all(state.is_terminal for state in self._states):
            return []
        return [as_of(now)]

    def _drawn(self) -> list[Curves]:
        """Return the curves of the newest runs, and none of the others."""
        logged = [place for place, curves in enumerate(self._curves) if curves.metrics()]
        drawn = set(logged[-_MOST_DRAWN:])
        return [each if place in drawn else Curves() for place, each in enumerate(self._curves)]

    def _rows(self, now: float) -> list[list[str]]:
        """Return titles, then the cells of each run."""
        states = self._states
        columns = [
            ("run", list(map(self._name, states))),
            ("state", [state.state for state in states]),
            ("took", [duration(state.length_s(now)) if state.gang else "" for state in states]),
            *_differences(states),
            *_metrics(states),
        ]
        titles, cells = [title for title, _ in columns], [each for _, each in columns]
        return [titles, *(list(row) for row in zip(*cells, strict=True))]

    def _name(self, state: GangState) -> str:
        return state.gang if self._legend else f"{state.name} ({state.gang})"


def _legend(states: Sequence[GangState], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the values in which the runs differ, or their names if two runs have the same values."""
    differences = _differences(states)
    titles = [title for title, _ in differences]
    values = zip(*(cells for _, cells in differences), strict=True)
    legend = [_told_apart(zip(titles, each, strict=True)) for each in values]
    is_enough = all(legend) and len(set(legend)) == len(rows)
    return legend if is_enough else [row[0] for row in rows]


def _told_apart(values: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values if value != "")


def _differences(states: Sequence[GangState]) -> list[tuple[str, list[str]]]:
    """Return options and captured values that are not the same in all runs."""
    options = [
        ("np", [str(len(state.ranks)) for state in states]),
        ("on", [state.placement for state in states]),
        ("with", [state.rendezvous for state in states]),
    ]
    names = dict.fromkeys(name for state in states for name in state.params)
    params = [(name, [str(state.params.get(name, "")) for state in states]) for name in names]
    # Of runs that have not begun, only the values of the sweep are known.
    known = {
        name: {str(s.params.get(name, "")) for s in states if s.gang or name in s.params}
        for name in names
    }
    found = [(title, cells) for title, cells in options if len(set(cells)) > 1]
    return [*found, *((name, cells) for name, cells in params if len(known[name]) > 1)]


def _metrics(states: Sequence[GangState]) -> list[tuple[str, list[str]]]:
    """Return the last value of each metric; if there are too many, of those that most runs have."""
    last = [state.last_metrics for state in states]
    n_runs = Counter(name for each in last for name in each)  # in the order in which runs have them
    chosen = {name for name, _ in n_runs.most_common(_MOST_METRICS)}
    names = [name for name in n_runs if name in chosen]
    return [(name, [number(each[name]) if name in each else "" for each in last]) for name in names]


def _cells(row: Sequence[str], place: int) -> list[str]:
    """Return cells of HTML; the first has the colour of the run at ``place``."""
    square = _SQUARES[place // MOST_RUNS % len(_SQUARES)]
    mark = f'<span style="color:{of_rank(place)}">&#{square};</span>&nbsp;'
    name, *others = (name_html(text, _LONGEST_CELL) for text in row)
    return [f"{mark}{name}", *others]
