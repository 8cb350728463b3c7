"""The static picture of a gang, built only from its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydrogen_magic.core.events import Event
from hydrogen_magic.driver.state import failure_report
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import (
    OutputLine,
    OutputLines,
    without_colour,
)
from hydrogen_magic.driver.state.span_tracks import SpanTracks
from hydrogen_magic.views import static_svg as pictures
from hydrogen_magic.views.curves import Curves
from hydrogen_magic.views.line_shares import kept_lines, output_summary
from hydrogen_magic.views.widget.page_updates import PageUpdates

_MOST_LINES = 1000
_MOST_CHARACTERS = 100_000
"""Of the output beside the picture, for readers without HTML."""
_CULPRIT_LINES = 10


@dataclass(frozen=True)
class StaticView:
    """The contents of the static picture, beside the gang's state."""

    curves: Curves
    tracks: SpanTracks
    lines: Sequence[OutputLine]
    """The ranks' output."""

    def plain_lines(self, state: GangState) -> Iterator[str]:
        """Yield the output as lines of plain text."""

        def render(line: OutputLine) -> str:
            return f"[{line.rank}] {without_colour(line.text)}"

        kept = kept_lines(self.lines, _MOST_LINES, _MOST_CHARACTERS, render)
        if len(kept) < len(self.lines):
            yield f"output: {output_summary(len(kept), self.lines, state)}"
        yield from kept

    def html(self, state: GangState, *, with_output: bool, is_raised: bool = False) -> str:
        """Return the picture; ``is_raised``: the cell's error has the failure's traceback."""
        lines = self.lines if with_output else ()
        report = self._report(state)
        return pictures.html(state, self.curves, self.tracks, lines, report, is_folded=is_raised)

    def _report(self, state: GangState) -> str:
        """Return the text about a failure; empty without one."""
        if state.state != "FAILED" or state.culprit is None:
            return ""
        own = [line.text for line in self.lines if line.rank == state.culprit]
        return failure_report.report(state, own[-_CULPRIT_LINES:])


def static_view(events: Sequence[Event], gang: str, known: PageUpdates | None = None) -> StaticView:
    """Return the contents for ``events``.

    ``known``: updates that have processed all of them, which saves seconds for millions of points.
    """
    output = OutputLines()
    lines = [*output.feed(events, gang), *output.flush()]
    if known is not None:
        return StaticView(known.curves, known.tracks, lines)
    curves, tracks = Curves(), SpanTracks()
    curves.feed(events)
    tracks.feed(events)
    return StaticView(curves, tracks, lines)


def static_html(state: GangState, events: Sequence[Event]) -> str:
    """Return the picture of a gang as HTML."""
    return static_view(events, state.gang).html(state, with_output=True)
