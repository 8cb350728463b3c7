"""Where the time goes: seconds by name and rank, their colours, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.state.formatting import duration
from hydrogen_magic.driver.state.span_tracks import SpanTracks
from hydrogen_magic.views.static_svg.ansi import name_html, table_html
from hydrogen_magic.views.static_svg.colours import INK
from hydrogen_magic.views.static_svg.fills import fills

_MOST_NAMES = 7
"""Names with their own colour; INK is for all others."""
_MOST_ROWS = 12


@dataclass(frozen=True)
class Times:
    """The activities of ranks by time, the longest first."""

    seconds: Mapping[str, Mapping[int, float]]
    """Name -> rank -> seconds, see :meth:`SpanTracks.shares`."""
    colours: Mapping[str, str]
    recorded_s: float
    """Seconds of all ranks together."""

    def share(self, name: str) -> str:
        """Return ``48 %`` of the recorded time, as in the live view."""
        spent_s = sum(self.seconds[name].values())
        percent = 100 * spent_s / self.recorded_s if self.recorded_s else 0.0
        return f"{percent:.0f} %" if percent >= 1 or not percent else "< 1 %"


def times_of(tracks: SpanTracks) -> Times:
    """Return the names of the outermost spans of all ranks, sorted and coloured."""
    shares = tracks.shares()
    longest_first = sorted(shares, key=lambda name: -sum(shares[name].values()))
    colours = fills(longest_first[:_MOST_NAMES])
    seconds = {name: shares[name] for name in longest_first}
    return Times(seconds, colours, sum(tracks.recorded_s().values()))


def list_html(times: Times) -> list[str]:
    """Return the share of every name, and its range over the ranks, as lines of HTML."""
    if not times.seconds:
        return []
    titles = ("name", "share", "per rank", "least", "most")
    rows = [_row(times, name) for name in list(times.seconds)[:_MOST_ROWS]]
    more = len(times.seconds) - len(rows)
    note = [f"<p>and {counted(more, 'more name')}</p>"] if more > 0 else []
    caption = "<p><b>Where the time goes</b></p>"
    return [caption, *table_html(titles, rows, 1), *note]


def _row(times: Times, name: str) -> list[str]:
    by_rank = times.seconds[name]
    least, most = min(by_rank, key=by_rank.__getitem__), max(by_rank, key=by_rank.__getitem__)
    swatch = f'<span style="color:{times.colours.get(name, INK)}">&#9632;</span>'
    return [
        f"{swatch}&nbsp;{name_html(name)}",
        times.share(name),
        _seconds(sum(by_rank.values()) / len(by_rank)),
        *(f"{_seconds(by_rank[rank])} (rank&nbsp;{rank})" for rank in (least, most)),
    ]


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
