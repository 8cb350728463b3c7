"""The line of a write: rows, tasks and the time left."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from itertools import count

import pytest

from hydrogen_magic.views.row_progress import RowProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(n_rows: int | None, step_s: float, *, with_tasks: bool = False) -> str:
    """Return what a terminal shows while a hundred rows are written, ten in each step."""
    ticks = count()
    writing = RowProgress(n_rows, clock=lambda: next(ticks) * step_s)
    with redirect_stdout(Terminal()) as shown, writing as progress:
        for done in range(1, 11):
            progress.add(10)
            if with_tasks:
                progress.tasks(done, 10, None)
    return shown.getvalue()


def test_rows_and_the_time_left() -> None:
    text = drawn(100, 1.0)
    assert "\rWriting the dataset: 30 of 100 rows, 7.0 s left\x1b[K" in text
    assert text.endswith("\rWriting the dataset: 100 of 100 rows\x1b[K\n")


def test_rows_of_unknown_number_by_tasks() -> None:
    assert "3 of 10 tasks, 30 rows, " in drawn(None, 1.0, with_tasks=True)


def test_tasks_of_unknown_number_are_hidden() -> None:
    ticks = count()
    writing = RowProgress(None, clock=lambda: next(ticks))
    with redirect_stdout(Terminal()) as shown, writing as progress:
        progress.tasks(1, 1, None)
        progress.hide_tasks()
        progress.add(10)
        progress.tasks(2, 2, None)
    text = shown.getvalue()
    assert "1 of 1 task," in text and "10 rows" in text and "2 of 2" not in text


@pytest.mark.parametrize("output", [Terminal, io.StringIO])
def test_what_rows_wait_for_is_a_line_of_its_own(output: type[io.StringIO]) -> None:
    ticks = count()
    writing = RowProgress(None, clock=lambda: next(ticks))
    with redirect_stdout(output()) as shown, writing as progress:
        for reason in ("job 0 holds 4 slots", "job 0 holds 4 slots", ""):
            progress.waits_for(reason)
            progress.tasks(0, 1, None)
        progress.tasks(1, 1, 9)
    lines = re.sub(r"\x1b\[K", "", shown.getvalue()).split("\n")
    assert lines[0].lstrip("\r") == "Writing the dataset: waiting for slots: job 0 holds 4 slots"
    assert lines[1].endswith("Writing the dataset: 1 of 1 task, 9 rows") and len(lines) == 3


def test_short_work_shows_nothing() -> None:
    assert drawn(100, 0.001) == ""


def test_a_file_gets_the_last_line_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = count()
    with RowProgress(20, clock=lambda: next(ticks)) as progress:
        progress.add(10)
        progress.add(10)
    assert capsys.readouterr().out == "Writing the dataset: 20 of 20 rows\n"
