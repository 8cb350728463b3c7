"""The line of a write: rows, tasks and the time left."""

from __future__ import annotations

import io
from itertools import count

from rich.console import Console

from hydrogen_magic.views.row_progress import RowProgress


def drawn(n_rows: int | None, step_s: float, *, with_tasks: bool = False) -> str:
    """Return what a console shows while a hundred rows are written, ten in each step."""
    ticks = count()
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = RowProgress(n_rows, clock=lambda: next(ticks) * step_s, console=console)
    with progress:
        for done in range(1, 11):
            progress.add(10)
            if with_tasks:
                progress.tasks(done, 10, None)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_rows_and_the_time_left() -> None:
    text = drawn(100, 1.0)
    assert "30 of 100 rows" in text and "100 of 100 rows" in text and "0:00:" in text


def test_rows_of_unknown_number_by_tasks() -> None:
    assert "3 of 10 tasks, 30 rows" in drawn(None, 1.0, with_tasks=True)


def test_tasks_of_unknown_number_are_hidden() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    ticks = count()
    with RowProgress(None, clock=lambda: next(ticks), console=console) as progress:
        progress.tasks(1, 1, None)
        progress.hide_tasks()
        progress.add(10)
        progress.tasks(2, 2, None)
    shown = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert "1 of 1 task " in shown and "10 rows" in shown and "2 of 2" not in shown


def test_short_work_shows_nothing() -> None:
    assert drawn(100, 0.001) == ""
