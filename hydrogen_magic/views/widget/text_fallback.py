"""The gang as text in a notebook, as long as no page shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydrogen_magic.core.events import Display, Event
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.views.outputs import NotebookOutput
from hydrogen_magic.views.text_view import TextView
from hydrogen_magic.views.widget.display import CellOutput
from hydrogen_magic.views.widget.rank_displays import RankDisplays


class TextFallback:
    """Prints the output of the ranks, and shows a table of them in ``display``."""

    def __init__(
        self, display: CellOutput, displays: RankDisplays, clock: Callable[[], float]
    ) -> None:
        self._display = display
        self._displays = displays
        self._clock = clock
        self._view: TextView | None = None
        self._is_complete = False

    @property
    def is_shown(self) -> bool:
        return self._view is not None

    def start(self) -> TextView:
        """Start to show text."""
        device = NotebookOutput(self._display.show_text, displays=self._displays)
        self._view = TextView(device, clock=self._clock)
        return self._view

    def update(
        self, state: GangState, fresh: Sequence[Event], all_events: Callable[[], Sequence[Event]]
    ) -> None:
        """Show ``state`` and the output in ``fresh``; if this starts, that in ``all_events``.

        Their displays are shown already.
        """
        if self._view is not None:
            self._view.update(state, fresh)
        else:
            earlier = [event for event in all_events() if not isinstance(event, Display)]
            self.start().update(state, earlier)

    def finish(self, state: GangState) -> None:
        """Print the rest, if text is shown: a picture takes the place of the table."""
        if self._view is not None:
            self._view.write_rest(state)
            self._is_complete = True

    def print_all(self, state: GangState, all_events: Callable[[], Sequence[Event]]) -> None:
        """Print what no page shows until now, to the end: there is no picture."""
        if not self._is_complete:
            self.update(state, [], all_events)
        if self._view is not None:
            self._view.close(state)

    def stop(self) -> None:
        """A page shows the gang from now on; it has the printed output."""
        self._view = None
