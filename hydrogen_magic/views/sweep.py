"""A sweep under its cell: a table of its runs with their curves in a notebook, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from hydrogen_magic.core.units import counted, first_of
from hydrogen_magic.driver.state.formatting import duration, number
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import clean_name
from hydrogen_magic.views import draws_html, report_fault
from hydrogen_magic.views.comparison import Comparison, Run
from hydrogen_magic.views.metric_order import by_importance
from hydrogen_magic.views.output_stream import OutputStream
from hydrogen_magic.views.static_svg.ansi import escaped
from hydrogen_magic.views.widget.display import CellOutput

_INTERVAL_S = 1.0
"""Interval between updates for up to eight runs: their picture is some 100 kB."""
_RUNS_PER_INTERVAL = 8
_MOST_METRICS = 4
_MOST_RUNS = 3
_MOST_WARNINGS = 5


class RunningSweep(Protocol):
    """What a view reads of a sweep."""

    @property
    def progress(self) -> str: ...
    @property
    def runs(self) -> Sequence[Run]: ...


def pick_sweep_view(
    runs: Sequence[Run], planned: Sequence[GangState], *, quiet: bool = False
) -> SweepView:
    """Return the view for the output of this process. ``planned``: the runs before they have started."""
    if quiet:
        return _NoView()
    comparison = Comparison(runs, planned)
    return (
        _NotebookSweep(comparison, len(runs)) if draws_html() else _TextSweep(comparison, planned)
    )


class _NoView:
    def update(self, sweep: RunningSweep) -> None: ...
    def close(self, sweep: RunningSweep) -> None: ...


class _NotebookSweep:
    """One output of the cell, updated in place; the last one stays in the saved notebook."""

    def __init__(self, comparison: Comparison, n_runs: int) -> None:
        self._comparison = comparison
        self._interval_s = _INTERVAL_S * (1 + n_runs // _RUNS_PER_INTERVAL)
        self._next_s = 0.0
        self._display = CellOutput()
        self._is_broken = False

    def update(self, sweep: RunningSweep) -> None:
        if time.monotonic() >= self._next_s:
            self.close(sweep)
            self._next_s = time.monotonic() + self._interval_s

    def close(self, sweep: RunningSweep) -> None:
        self._comparison.read()
        now = time.time()
        title = f"sweep of {counted(len(sweep.runs), 'run')}: {sweep.progress}"
        noted = _warnings(self._comparison.states)
        lines = "".join(f"<p>{escaped(line)}</p>\n" for line in noted)
        table = self._comparison.lines(now)
        html = f"<p><b>{escaped(title)}</b></p>\n{lines}{self._drawn(now, table)}"
        text = "\n".join([title, *noted, *table])
        self._display.show({"text/html": html, "text/plain": text})

    def _drawn(self, now: float, table: Sequence[str]) -> str:
        try:
            return self._comparison.html(now)
        except Exception as error:  # a fault of ours: the runs matter more
            if not self._is_broken:
                report_fault("the comparison of the runs cannot be drawn", error)
            self._is_broken = True
            return f"<pre>{escaped(chr(10).join(table))}</pre>"


class _TextSweep:
    """A line for each run that ends, and the table at the end: also for terminals and logs."""

    def __init__(self, comparison: Comparison, planned: Sequence[GangState]) -> None:
        self._comparison = comparison
        self._names = [state.name for state in planned]
        self._printed: set[int] = set()
        self._stdout = OutputStream(optional=True)

    def update(self, sweep: RunningSweep) -> None:
        self._comparison.read()
        for place, state in enumerate(self._comparison.states):
            has_run = state.is_terminal and (state.gang or state.state == "FAILED")
            if has_run and place not in self._printed:
                self._printed.add(place)
                self._print(f"{self._names[place]}: {_ended(state)} ({sweep.progress})")

    def close(self, sweep: RunningSweep) -> None:
        self.update(sweep)
        noted = _warnings(self._comparison.states)
        self._print("\n".join([*noted, *self._comparison.lines(time.time())]))

    def _print(self, text: str) -> None:
        print(text, file=self._stdout, flush=True)


SweepView = _NoView | _NotebookSweep | _TextSweep
"""Shows a sweep from its first run to its end; the last state stays."""


def _warnings(states: Sequence[GangState]) -> list[str]:
    """Return the warnings of all runs, the same one of several runs once, with the names of some."""
    runs: dict[str, dict[str, None]] = {}
    for state in states:
        for note in state.notices:
            if note.level != "info":
                runs.setdefault(clean_name(note.text), {})[clean_name(state.name)] = None
    shown = [
        f"{'' if len(names) == len(states) else f'{first_of(names, _MOST_RUNS)}: '}warning: {text}"
        for text, names in list(runs.items())[:_MOST_WARNINGS]
    ]
    if rest := len(runs) - len(shown):
        shown.append(counted(rest, "more warning"))
    return shown


def _ended(state: GangState) -> str:
    last = state.last_metrics
    shown = by_importance(last)[:_MOST_METRICS]
    metrics = "".join(f" · {name} {number(last[name])}" for name in shown)
    why = "" if state.state == "SUCCEEDED" else f": {state.reason}"
    return f"{state.state.lower()} in {duration(state.now_s)}{why}{metrics}"
