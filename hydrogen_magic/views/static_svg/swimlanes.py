"""The timeline: activities of ranks over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import hydrogen_magic.views.static_svg.svg as svg
from hydrogen_magic.core.events import TRACKS
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.state.culprit import shown_phase
from hydrogen_magic.driver.state.formatting import duration
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import clean_name
from hydrogen_magic.driver.state.span_tracks import PHASES, SpanTrack, SpanTracks
from hydrogen_magic.views.static_svg.colours import EITHER, ERROR, INK
from hydrogen_magic.views.static_svg.scales import Scale, seconds_ticks
from hydrogen_magic.views.static_svg.times import Times, list_html

_WIDTH, _LEFT, _RIGHT = 880, 62, 868
_MOST_BOXES = 1600
"""Number of spans drawn one by one, in all rows; 120 per row are still as wide as high."""
_MOST_CELLS = 10_000
"""Number of stacked pieces in all rows, if spans are too many or too narrow: 8 bytes each."""
_MOST_RANKS_WITH_ALL_TRACKS = 8
_SHORT_S = 0.1
"""The phases of a shorter gang are not worth a picture."""
_PHASES = {
    "waiting": (0.15, INK),
    "starting": (0.4, EITHER[4]),
    "loading": (0.7, EITHER[6]),
    "running": (0.25, EITHER[0]),
    "finishing": (1.0, EITHER[2]),
}
"""Opacity in the strip below spans, which have the colours; full colour if there are no spans."""


def timeline_html(
    state: GangState, tracks: SpanTracks, times: Times, ranks: Sequence[int]
) -> list[str]:
    """Return caption, picture and list as lines of HTML, only of ``ranks``; empty without spans."""
    rows = _rows(tracks, ranks)
    if not rows or (state.now_s < _SHORT_S and all(row.track == PHASES for row in rows)):
        return []
    picture = _Picture(state, tracks.names, times, rows)
    some = f" · {len(ranks)} of {len(state.ranks):,} ranks" if len(ranks) < len(state.ranks) else ""
    skipped = sum(spans.skipped for spans in tracks.tracks().values())
    lost = f" · {counted(skipped, 'span')} dropped: too many came at once" if skipped else ""
    caption = f"<p><b>Timeline</b> since the launch{some}{lost}</p>"
    return [caption, f"<p>{picture.image()}</p>", *list_html(times)]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _TrackRow:
    """A track and its position; the first of a rank is the highest and has its name."""

    rank: int
    track: str
    spans: SpanTrack
    is_first: bool
    height: int


def _rows(tracks: SpanTracks, ranks: Sequence[int]) -> list[_TrackRow]:
    by_rank: dict[int, dict[str, SpanTrack]] = {rank: {} for rank in ranks}
    for (rank, track), spans in tracks.tracks().items():
        if rank in by_rank and len(spans.starts_s):
            by_rank[rank][track] = spans
    has_all = len(ranks) <= _MOST_RANKS_WITH_ALL_TRACKS
    return [row for rank in ranks for row in _rows_of(rank, by_rank[rank], has_all)]


def _rows_of(rank: int, spans: Mapping[str, SpanTrack], has_all: bool) -> list[_TrackRow]:
    others = sorted(set(spans) - {*TRACKS, PHASES})
    tracks = [track for track in (*TRACKS, *others) if track in spans]
    tracks = [*(tracks if has_all else tracks[:1]), *([PHASES] if PHASES in spans else [])]
    heights = [18, *(3 if track == PHASES else 7 for track in tracks[1:])]
    return [
        _TrackRow(rank, track, spans[track], number == 0, heights[number])
        for number, track in enumerate(tracks)
    ]


# ── the picture ──────────────────────────────────────────────────────────────────────────────────


class _LegendEntry(NamedTuple):
    """One colour of the legend."""

    colour: str
    opacity: float
    text: str


class _Picture:
    """The rows from top to bottom, over one axis of seconds."""

    def __init__(
        self, state: GangState, names: Sequence[str], times: Times, rows: Sequence[_TrackRow]
    ) -> None:
        self._state = state
        self._names = names
        self._times = times
        self._rows = rows
        # Not the latest end of a span: a rank with a wrong clock would squeeze all others.
        self._until_s = max(state.now_s, 1e-3)
        self._x = Scale(0.0, self._until_s, _LEFT, _RIGHT)
        self._most_boxes = min(120, _MOST_BOXES // len(rows))
        n_stacks = sum(map(self._is_stacked, rows)) * (len(times.colours) + 1)
        self._columns = max(60, min(268, _MOST_CELLS // max(1, n_stacks)))

    def image(self) -> str:
        entries = self._entries()
        parts, top = _key(entries)
        y = top
        drawn: list[str] = []
        for row in self._rows:
            y += 6 if row.is_first else 1
            drawn += self._track(row, y) + (self._heading(row.rank, y) if row.is_first else [])
            y += row.height
        parts += self._axis(top, y + 4)
        return svg.image([*parts, *drawn], _WIDTH, y + 24, self._in_words())

    def _heading(self, rank: int, y: float) -> list[str]:
        """Return the rank's name, and a cross if it failed."""
        parts = [svg.label(_LEFT - 8, y + 13, f"rank {rank}", text_anchor="end")]
        shown = self._state.ranks[rank]
        has_failed = shown_phase(shown, self._state.culprit) == "failed"
        if has_failed and shown.exited is not None:
            x = float(self._x(shown.exited.at_s))
            cross = f"M{x - 4:.4g} {y + 5:.4g}l8 8m0 -8l-8 8"
            parts.append(svg.path(cross, stroke=ERROR, stroke_width=2.5))
        return parts

    def _axis(self, top: float, bottom: float) -> list[str]:
        parts = [svg.rule(_LEFT, bottom, _RIGHT, bottom, 0.6)]
        for at_s, text in seconds_ticks(self._until_s, 8):
            x = float(self._x(at_s))
            anchor = "end" if x > _RIGHT - 12 else "middle"
            parts.append(svg.rule(x, top, x, bottom + 3, 0.18))
            parts.append(svg.label(x, bottom + 15, text, text_anchor=anchor, font_size=10))
        return parts

    def _is_stacked(self, row: _TrackRow) -> bool:
        return row.track != PHASES and len(row.spans.starts_s) > self._most_boxes

    def _track(self, row: _TrackRow, y: float) -> list[str]:
        return self._stacked(row, y) if self._is_stacked(row) else self._boxes(row, y)

    # ── few spans: every one a box ──

    def _boxes(self, row: _TrackRow, y: float) -> list[str]:
        """Return the spans, inner ones thinner, with names that fit."""
        spans = row.spans
        left = self._x(spans.starts_s)
        width = np.maximum(self._x(spans.starts_s + spans.durations_s) - left, 0.6)
        drawn: dict[tuple[int, str], list[str]] = {}
        words: list[str] = []
        deepest = 2 if row.is_first and row.track != PHASES else 0
        for index in np.flatnonzero(spans.depths <= deepest)[:120].tolist():
            name, depth = self._names[spans.names[index]], int(spans.depths[index])
            top, height = y + depth * row.height / 3, row.height * (1 - depth / 3)
            drawn.setdefault((depth, name), []).append(
                svg.box(left[index], top, width[index], height)
            )
            has_words = row.is_first and (row.track != PHASES or not self._times.colours)
            if has_words and not depth and width[index] > svg.text_width(name) + 8:
                words.append(svg.label(left[index] + 4, top + 13, name, font_size=10, fill="#fff"))
        return [
            self._filled(row.track, name, boxes) for (_, name), boxes in sorted(drawn.items())
        ] + words

    def _filled(self, track: str, name: str, boxes: Sequence[str]) -> str:
        drawn = "".join(boxes)
        if track == PHASES:
            colour, opacity = self._of_phase(name)
            return svg.path(drawn, fill=colour, fill_opacity=opacity)
        colour = self._times.colours.get(name, INK)
        return svg.path(drawn, fill=colour, stroke="#fff", stroke_opacity=0.4, stroke_width=0.5)

    def _of_phase(self, name: str) -> tuple[str, float]:
        opacity, colour = _PHASES.get(name, (0.25, INK))
        return (INK, opacity) if self._times.colours else (colour, 1.0)

    # ── many spans: the share of each name in each interval ──

    def _stacked(self, row: _TrackRow, y: float) -> list[str]:
        """Return one area per colour, with the name that takes longest at the bottom.

        Each area extends to the bottom and is covered by the next, so one edge is sufficient.
        """
        layers = self._layers(row.spans)
        if not layers:
            return []
        column_s = self._until_s / self._columns
        reached: NDArray[np.float64] = np.cumsum([seconds for _, seconds in layers], axis=0)
        full = np.maximum(reached[-1], column_s)
        bottom = y + row.height
        tops = np.round(bottom - row.height * reached / full, 1)
        areas = [
            svg.path(self._area(top, bottom), fill=colour)
            for (colour, _), top in zip(layers, tops, strict=True)
        ]
        return areas[::-1]

    def _layers(self, spans: SpanTrack) -> list[tuple[str, NDArray[np.float64]]]:
        """Return colour -> seconds per column of the outermost spans; INK for all other names."""
        edges = np.linspace(0.0, self._until_s, self._columns + 1)
        # An outer span is known at its end: a rank that was killed in it has the inner ones alone.
        outermost = spans.depths == spans.depths.min()
        numbers = [self._names.index(name) for name in self._times.colours]
        masks = [outermost & (spans.names == number) for number in numbers]
        masks.append(outermost & ~np.isin(spans.names, numbers))
        return [
            (colour, _covered(spans.starts_s[mask], spans.durations_s[mask], edges))
            for colour, mask in zip((*self._times.colours.values(), INK), masks, strict=True)
            if mask.any()
        ]

    def _area(self, tops: NDArray[np.float64], bottom: float) -> str:
        """Return steps along ``tops`` and back along the bottom; equal neighbours are merged."""
        wide = (_RIGHT - _LEFT) / self._columns
        starts = [0, *(np.flatnonzero(np.diff(tops)) + 1).tolist(), len(tops)]
        steps = [f"V{tops[a]:.4g}H{_LEFT + b * wide:.4g}" for a, b in pairwise(starts)]
        return f"M{_LEFT} {bottom:.4g}{''.join(steps)}V{bottom:.4g}z"

    # ── text ──

    def _entries(self) -> list[_LegendEntry]:
        named = [
            _LegendEntry(colour, 1.0, f"{clean_name(name)[:28]} {self._times.share(name)}")
            for name, colour in self._times.colours.items()
        ]
        others = len(self._times.seconds) > len(self._times.colours)
        phases = [row.spans.names for row in self._rows if row.track == PHASES]
        known = {self._names[number] for names in phases for number in names}
        return [
            *named,
            *([_LegendEntry(INK, 1.0, "others")] if others else []),
            *(_LegendEntry(*self._of_phase(phase), phase) for phase in _PHASES if phase in known),
        ]

    def _in_words(self) -> str:
        shares = [f"{clean_name(n)[:40]} {self._times.share(n)}" for n in self._times.colours]
        listed = f": {', '.join(shares)}" if shares else ""
        ranks = counted(len(self._state.ranks), "rank")
        return f"Timeline of {ranks} over {duration(self._until_s)}{listed}"


def _key(entries: Sequence[_LegendEntry]) -> tuple[list[str], float]:
    """Return the legend in as many lines as it needs, and its height."""
    parts, x, y = [], float(_LEFT), 4.0
    for entry in entries:
        wide = 34 + svg.text_width(entry.text)
        if x + wide > _WIDTH and x > _LEFT:
            x, y = float(_LEFT), y + 18
        square = svg.box(x, y, 11, 11)
        parts.append(svg.path(square, fill=entry.colour, fill_opacity=entry.opacity))
        parts.append(svg.label(x + 16, y + 10, entry.text))
        x += wide
    return parts, y + 16


def _covered(
    starts_s: NDArray[np.float64], durations_s: NDArray[np.float64], edges_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds of spans between each two edges; overlapping ones all count."""
    at = np.concatenate([starts_s, starts_s + durations_s])
    order = np.argsort(at, kind="stable")
    n_open = np.repeat([1.0, -1.0], len(starts_s))[order].cumsum()
    at = at[order]
    seconds = np.concatenate([[0.0], np.cumsum(n_open[:-1] * np.diff(at))])
    return np.asarray(np.diff(np.interp(edges_s, at, seconds)))
