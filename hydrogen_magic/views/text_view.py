"""The text view: for terminals, for notebooks without a widget, and for logs.

:class:`TextView` decides what to show; a *surface* knows how to show it: above a block redrawn in place
(terminal), as stream output beside one display (Jupyter kernel), or as lines (a pipe).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import IO, cast

from hydrogen_magic.core.events import SHOW, Display, Event
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import OutputLine, OutputLines
from hydrogen_magic.views import ATTENDED_S, kernel_here
from hydrogen_magic.views.elapsed import GangClock
from hydrogen_magic.views.output_stream import OutputStream
from hydrogen_magic.views.outputs import NotebookOutput, PlainOutput, TerminalOutput, TextOutput


class TextView:
    """Output with the rank as prefix of every line, and the gang's state.

    ``quiet``: only output. ``clock`` returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        surface: TextOutput,
        *,
        quiet: bool = False,
        interval_s: float = ATTENDED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        self._surface = surface
        self._quiet = quiet
        self._clock = GangClock(clock)
        self._output = OutputLines()

    def update(self, state: GangState, fresh: Sequence[Event]) -> None:
        """Show ``state``, and write the lines that ``fresh`` completes."""
        if not self._quiet:  # first, because in a notebook the block stays where it was first shown
            self._surface.show(state, self._clock.now_s(state))
        for is_display, events in groupby(fresh, lambda event: isinstance(event, Display)):
            if is_display:
                shown = [event for event in events if isinstance(event, Display)]
                for rank in {display.rank for display in shown if display.action == SHOW}:
                    self._write(state, self._output.flush(rank))
                self._surface.display(shown, len(state.ranks))
            else:
                self._write(state, self._output.feed(events, state.gang))

    def withdraw_input(self) -> None:
        """A terminal has one input line for all, and other front ends of text cannot be told."""

    def close(self, state: GangState) -> None:
        """Write incomplete lines, then show the end."""
        self.write_rest(state)
        self._surface.close(None if self._quiet else state, state.now_s)

    def write_rest(self, state: GangState) -> None:
        """Write incomplete lines."""
        self._write(state, self._output.flush())

    def _write(self, state: GangState, lines: Sequence[OutputLine]) -> None:
        if lines:
            self._surface.write(lines, len(state.ranks))


def pick_surface(*, detached: bool = False, stdout: OutputStream | None = None) -> TextOutput:
    """Return the surface for this process: Jupyter kernel, terminal, or plain lines.

    ``stdout``: that of a terminal or of lines; None: gangs go on if it cannot be written.
    """
    if kernel_here() is not None:
        return NotebookOutput()
    # A block redrawn by a thread would interfere with the user's prompt.
    stdout = stdout or OutputStream(optional=True)
    if stdout.isatty() and not detached:
        from rich.console import Console

        console = Console(file=cast("IO[str]", stdout), highlight=False)
        if console.is_terminal and not console.is_dumb_terminal:  # on others, Rich redraws nothing
            return TerminalOutput(console)
    return PlainOutput(stdout)
