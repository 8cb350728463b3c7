"""A line that shows how many rows are written, and the time left: in notebooks and terminals."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING

from hydrogen_magic.core.units import counted
from hydrogen_magic.views import draws_html

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from hydrogen_magic.views.widget.display import CellOutput

_SHOWN_AFTER_S = 0.5
"""Shorter work shows nothing."""
_REFRESH_S = 0.1


class RowProgress:
    """The progress of writing a dataset; a context manager, whose end completes the line.

    ``n_rows``: None if it is not known; then :meth:`tasks` shows the time left, if it is called.
    """

    def __init__(
        self,
        n_rows: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._n_rows = n_rows
        self._rows = 0
        self._tasks: tuple[int, int] | None = None
        self._shows_tasks = True
        self._clock = clock
        self._console = console
        self._due_s = clock() + _SHOWN_AFTER_S
        self._progress: Progress | None = None
        self._output: CellOutput | None = None
        """Of the cell in a notebook, where rich would make a widget that is dead in the saved notebook."""
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

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._draw()
            self._progress.stop()

    def text(self) -> str:
        """Return the rows, and the tasks if these are known."""
        n, total = self._rows, self._n_rows
        rows = counted(n, "row") if total is None else f"{n:,} of {counted(total, 'row')}"
        if self._tasks is None:
            return rows
        done, n_tasks = self._tasks
        return f"{done} of {counted(n_tasks, 'task')}{f', {rows}' if self._rows else ''}"

    def _show(self) -> None:
        if self._clock() >= self._due_s:
            self._due_s = self._clock() + _REFRESH_S
            self._progress = self._progress or self._started()
            self._draw()

    def _started(self) -> Progress:
        from rich import progress

        in_cell = self._console is None and draws_html()
        if in_cell:
            self._console, self._output = _text_console(), _cell_output()
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[text]}"),
            progress.TimeRemainingColumn(),
        )
        # No thread of its own: each update draws.
        found = progress.Progress(*columns, console=self._console, auto_refresh=False)
        found.add_task("Writing the dataset", total=None, text="")
        if not in_cell:
            found.start()
        return found

    def _draw(self) -> None:
        if self._progress is not None:
            done, total = self._tasks or (self._rows, self._n_rows)
            task = self._progress.task_ids[0]
            self._progress.update(task, completed=done, total=total, text=self.text(), refresh=True)
            if self._output is not None:
                self._context.copy().run(self._output.show_text, _as_text(self._progress))


def _text_console() -> Console:
    from rich.console import Console

    from hydrogen_magic.views.outputs import NotebookOutput

    return Console(file=io.StringIO(), force_jupyter=False, width=NotebookOutput.width)


def _cell_output() -> CellOutput:
    from hydrogen_magic.views.widget.display import CellOutput

    return CellOutput()


def _as_text(progress: Progress) -> str:
    with progress.console.capture() as captured:
        progress.console.print(progress.get_renderable())
    return captured.get().rstrip()
