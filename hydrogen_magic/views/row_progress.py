"""A line that shows how many rows are written, and the time left: in notebooks and terminals."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import TYPE_CHECKING

from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.state.formatting import duration
from hydrogen_magic.driver.state.output_lines import clean_name
from hydrogen_magic.views import draws_html
from hydrogen_magic.views.output_stream import OutputStream

if TYPE_CHECKING:
    from hydrogen_magic.views.widget.display import CellOutput

_SHOWN_AFTER_S = 0.5
"""Shorter work shows nothing."""
_REFRESH_S = 0.1


class RowProgress(AbstractContextManager["RowProgress"]):
    """The progress of writing a dataset; a context manager, whose end completes the line.

    ``n_rows``: None if it is not known; then :meth:`tasks` shows the time left, if it is called. Output that
    is neither a notebook's nor a terminal's gets the last line, and what rows wait for.
    """

    def __init__(self, n_rows: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._n_rows = n_rows
        self._rows = 0
        self._tasks: tuple[int, int] | None = None
        self._shows_tasks = True
        self._waits_for = self._shown_wait = ""
        self._clock = clock
        self._began_s = clock()
        self._due_s = self._began_s + _SHOWN_AFTER_S
        self._is_shown = False
        self._output: CellOutput | None = None
        self._stdout = OutputStream(optional=True)
        self._context = copy_context()
        """In it, ipykernel knows the cell, also in a thread that writes."""

    def add(self, n_rows: int) -> None:
        """Count rows that were written."""
        self._rows += n_rows
        self._show()

    def tasks(self, done: int, total: int, rows: int | None) -> None:
        """Set the tasks that write the rows, and the rows that they have written, if known."""
        self._tasks = (done, total) if self._shows_tasks else None
        self._rows = rows or self._rows
        self._show()

    def hide_tasks(self) -> None:
        """Show rows alone from now on: the number of all tasks is not known."""
        self._shows_tasks, self._tasks = False, None

    def waits_for(self, reason: str) -> None:
        """Show what the next rows wait for, instead of the rows; empty: they do not wait."""
        self._waits_for = clean_name(reason)
        self._show()

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            self._draw(self.text(), is_last=True)

    def text(self) -> str:
        """Return the rows, and the tasks if these are known."""
        n, total = self._rows, self._n_rows
        rows = counted(n, "row") if total is None else f"{n:,} of {counted(total, 'row')}"
        if self._tasks is None:
            return rows
        done, n_tasks = self._tasks
        return f"{done} of {counted(n_tasks, 'task')}{f', {rows}' if self._rows else ''}"

    def _show(self) -> None:
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + _REFRESH_S
            self._is_shown = True
            self._show_now(now_s)

    def _show_now(self, now_s: float) -> None:
        if not self._waits_for:
            self._draw(f"{self.text()}{self._left_text(now_s)}")
        elif self._waits_for != self._shown_wait:
            # A line of its own: a long one, drawn again, would fill a narrow terminal.
            self._draw(f"waiting for slots: {self._waits_for}", is_last=True)
        self._shown_wait = self._waits_for

    def _left_text(self, now_s: float) -> str:
        done, total = self._tasks or (self._rows, self._n_rows)
        if not done or total is None:
            return ""
        return f", {duration((total - done) * (now_s - self._began_s) / done)} left"

    def _draw(self, text: str, *, is_last: bool = False) -> None:
        text = f"Writing the dataset: {text}"
        if draws_html():
            from hydrogen_magic.views.widget.display import CellOutput

            self._output = self._output or CellOutput()
            self._context.copy().run(self._output.show_text, text)
        elif self._stdout.isatty():
            end = "\n" if is_last else ""
            # The escape sequence clears the rest of a longer text.
            print(f"\r{text}\x1b[K", end=end, flush=True, file=self._stdout)
        elif is_last:
            print(text, file=self._stdout)
