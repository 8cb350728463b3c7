"""The order of a rank's printed output and its displays, which arrive by different ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from hydrogen_magic.core import display_marks
from hydrogen_magic.core import events as ev

_MOST_TURNS = 40
"""Calls of ``emit_ready`` that wait for one display, two seconds: programs may have printed a mark."""


class DisplayOrder:
    """Emits output and displays of one rank; displays where the output has their marks."""

    def __init__(self, emit: Callable[[ev.Event], None]) -> None:
        self._emit = emit
        self._displays: deque[ev.Display] = deque()
        self._newest_mark = 0
        """That of the last display."""
        self._output: deque[ev.Output | int] = deque()
        """Output and marks that wait for a display."""
        self._n_turns = 0

    def add_display(self, display: ev.Display) -> None:
        """Add a display; :meth:`emit_ready` emits it."""
        self._displays.append(display)
        self._newest_mark = max(self._newest_mark, display.mark)

    def add_output(self, output: ev.Output) -> None:
        """Add output, without its marks; :meth:`emit_ready` emits it."""
        for part in display_marks.split(output.text):
            if isinstance(part, int):
                self._output.append(part)
            elif part or output.skipped_bytes:
                self._output.append(replace(output, text=part))
                output = replace(output, skipped_bytes=0, skipped_lines=0)

    def emit_ready(self, *, is_final: bool = False) -> None:
        """Emit all output up to the mark of a display that has not arrived; all, if nothing more will."""
        self._n_turns += 1
        while self._output and (is_final or not self._must_wait(self._output[0])):
            first = self._output.popleft()
            self._n_turns = 0
            self._emit_displays(first) if isinstance(first, int) else self._emit(first)
        if not self._output:
            self._n_turns = 0
            self._emit_displays(self._newest_mark)  # their marks may be among omitted output

    def _must_wait(self, part: ev.Output | int) -> bool:
        is_early = isinstance(part, int) and part > self._newest_mark
        return is_early and self._n_turns < _MOST_TURNS

    def _emit_displays(self, until: int) -> None:
        while self._displays and self._displays[0].mark <= until:
            self._emit(self._displays.popleft())
