"""Curves of metrics as small charts: mean, range from lowest to highest, and a few ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import hydrogen_magic.views.static_svg.svg as svg
from hydrogen_magic.driver.state.formatting import number, ranks_text
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.views.curve_tips import n_before_end
from hydrogen_magic.views.curves import ALL_RANKS, CurveChange, Curves
from hydrogen_magic.views.point_buckets import Buckets
from hydrogen_magic.views.short_names import short_names
from hydrogen_magic.views.static_svg.ansi import name_html
from hydrogen_magic.views.static_svg.colours import EITHER, ERROR, INK, dashes_of, of_rank
from hydrogen_magic.views.static_svg.scales import Scale, value_scale
from hydrogen_magic.views.text_table import MOST_ROWS

_MOST_CHARTS = 12
_MOST_LINES = 8
"""Ranks with their own line: as many as there are colours."""
_MOST_POINTS = 12_000
"""Points of all lines of all charts: about 150 kB in a notebook."""
_LEFT, _TOP = 46, 30
"""Where a chart's axes begin, in pixels; further right if the labels of values are long."""
_GAP = 5
"""Pixels between a label and its axis."""
_MOST_TICKS = 6
_APART = 1.5
"""Minimum distance in pixels at which a rank is visibly different from the mean."""
_NAMES_IN_NOTE = 12
_LONGEST_NAME = 28
"""Characters beside a value."""


@dataclass(frozen=True)
class _Size:
    """Of a chart, in pixels; its axes end at ``right`` and ``bottom``."""

    width: int
    height: int

    @property
    def right(self) -> int:
        return self.width - 8

    @property
    def bottom(self) -> int:
        return self.height - 22


_SMALL, _LARGE = _Size(290, 168), _Size(440, 240)
_MOST_LARGE = 2
"""Charts that are large: both fit beside each other on a wide page, and one on a narrow page."""


def charts_html(curves: Curves, state: GangState) -> list[str]:
    """Return the curves' caption and pictures as lines of HTML; none without a metric."""
    # The series of a thousand ranks would cost seconds, and would not be drawn.
    known = curves.full(None if len(state.ranks) <= MOST_ROWS else ())
    shown = [replace(each, series=_drawn(each.series)) for each in known[:_MOST_CHARTS]]
    if not shown:
        return []
    series = [each.series for each in shown]
    points = min(180, _MOST_POINTS // sum(len(each) + 2 for each in series))
    ranks = sorted({rank for each in series for rank in each} - {ALL_RANKS})
    colour = INK if ranks else EITHER[0]
    names = short_names([each.metric for each in shown], _LONGEST_NAME)
    charts = [
        _Chart(
            each.metric,
            name,
            _lines(each, points),
            curves.bad_steps(each.metric),
            ranks_text,
            colour,
            _size(len(shown)),
        ).html(each.tip.mean if each.tip else None)
        for each, name in zip(shown, names, strict=True)
    ]
    has_mean = any(ALL_RANKS in each for each in series)
    key = _key({rank: f"rank {rank}" for rank in ranks}, colour if has_mean else "")
    return [_caption(curves.metrics()), f"<p>{key}</p>", "<p>", *charts, "</p>"]


def overlaid_html(runs: Sequence[Curves], names: Sequence[str]) -> list[str]:
    """Return the curves of several runs, each the mean of its ranks, in the same charts.

    ``names``: of the runs. Lines of HTML; none without a metric.
    """
    metrics = list(dict.fromkeys(metric for curves in runs for metric in curves.metrics()))
    if not metrics:
        return []
    shown = metrics[:_MOST_CHARTS]
    found = [{each.metric: each for each in curves.full(())} for curves in runs]
    n_lines = sum(map(bool, found))  # of a large sweep, some runs alone are drawn
    points = max(2, min(180, _MOST_POINTS // (len(shown) * (n_lines + 2))))

    def who(places: Sequence[int]) -> str:
        return ", ".join(names[place] for place in places)

    charts = []
    for metric, name in zip(shown, short_names(shown, _LONGEST_NAME), strict=True):
        changes = {place: run[metric] for place, run in enumerate(found) if metric in run}
        lines = {
            place: line
            for place, change in changes.items()
            for rank, line in _lines(change, points).items()
            if rank == ALL_RANKS
        }
        bad = {p: min(each.bad_steps.values()) for p, each in changes.items() if each.bad_steps}
        charts.append(_Chart(metric, name, lines, bad, who, INK, _size(len(shown))).html(None))
    # One picture per name: a narrow page breaks the line between them.
    short = short_names(names, _LONGEST_NAME)
    keys = [_key({place: short[place]}) for place, run in enumerate(found) if run]
    return [_caption(metrics), "<p>", *keys, "</p>", "<p>", *charts, "</p>"]


def _size(n_charts: int) -> _Size:
    return _LARGE if n_charts <= _MOST_LARGE else _SMALL


def _caption(metrics: Sequence[str]) -> str:
    return f"<p><b>Curves</b> by step{_left_out(metrics)}</p>"


def _left_out(metrics: Sequence[str]) -> str:
    left_out = metrics[_MOST_CHARTS:]
    if not left_out:
        return ""
    short = short_names(left_out[:_NAMES_IN_NOTE], _LONGEST_NAME)
    names = ", ".join(name_html(name, _LONGEST_NAME) for name in short)
    more = f" and {len(left_out) - _NAMES_IN_NOTE} more" if len(left_out) > _NAMES_IN_NOTE else ""
    return f" · the first {_MOST_CHARTS} of {len(metrics)} metrics; not drawn: {names}{more}"


def _drawn(series: Mapping[int, Buckets]) -> dict[int, Buckets]:
    """Return the series with a line: all ranks together (-1), and each rank if they are few."""
    # A rank without its own series is listed without points if it has a value that is not finite.
    filled = {rank: buckets for rank, buckets in series.items() if len(buckets)}
    ranks = {rank: buckets for rank, buckets in filled.items() if rank != ALL_RANKS}
    if len(ranks) == 1:
        return ranks
    together = {rank: buckets for rank, buckets in filled.items() if rank == ALL_RANKS}
    return {**together, **(ranks if len(ranks) <= _MOST_LINES else {})}


def _key(names: Mapping[int, str], colour: str = "") -> str:
    """Return a legend. ``names``: of the lines; ``colour``: of the mean, if drawn."""
    parts, x = [], 2.0
    if colour:
        band = svg.path(svg.box(x, 4, 22, 10), fill=colour, fill_opacity=0.22)
        parts.append(band + svg.path(f"M{x} 9h22", stroke=colour, stroke_width=2.4))
        words = "mean, lowest to highest"
        parts.append(svg.label(x + 28, 13, words))
        x += 44 + svg.text_width(words)
    for rank, name in names.items():
        stroke = {"stroke": of_rank(rank), "stroke_dasharray": dashes_of(rank)}
        parts.append(svg.path(f"M{x:g} 9h22", stroke_width=1.5, **stroke))
        parts.append(svg.label(x + 28, 13, name))
        x += 42 + svg.text_width(name)
    words = ", ".join(names.values())
    return svg.image(parts, x, 18, f"Legend: {words}" if words else "Legend")


# ── one chart ────────────────────────────────────────────────────────────────────────────────────


class _ChartLine:
    """A series with a limited number of points that keeps lowest and highest."""

    def __init__(self, buckets: Buckets, width: int, most: int) -> None:
        keys = np.asarray(buckets.keys, np.float64)
        counts = np.maximum(np.asarray(buckets.counts, np.float64), 1)
        each = max(1, math.ceil((keys[-1] - keys[0] + 1) / most))
        starts = np.flatnonzero(np.diff((keys - keys[0]) // each, prepend=-1))
        n = np.add.reduceat(counts, starts)
        means = np.asarray(buckets.means, np.float64)
        self.steps = np.add.reduceat(keys * counts, starts) / n * width + (width - 1) / 2
        lengths = np.diff(starts, append=len(keys))
        self.means = np.add.reduceat(means * (counts / np.repeat(n, lengths)), starts)
        self.lows = np.minimum.reduceat(np.asarray(buckets.mins, np.float64), starts)
        self.highs = np.maximum.reduceat(np.asarray(buckets.maxs, np.float64), starts)
        self.first = float(keys[0]) * width


def _lines(curve: CurveChange, points: int) -> dict[int, _ChartLine]:
    """Return the lines of one metric by rank, each with at most ``points`` points."""
    return {
        rank: _ChartLine(
            _up_to_tip(curve, buckets) if rank == ALL_RANKS else buckets, curve.width, points
        )
        for rank, buckets in sorted(curve.series.items())
        if len(buckets)
    }


def _up_to_tip(curve: CurveChange, buckets: Buckets) -> Buckets:
    """Return the buckets of all ranks that are drawn as their mean."""
    return buckets.first(n_before_end(buckets, curve.width, curve.tip))


@dataclass(frozen=True)
class _Chart:
    """One metric. ``colour`` is that of all ranks together; ``who`` names lines."""

    metric: str
    name: str
    lines: Mapping[int, _ChartLine]
    bad: Mapping[int, int]
    who: Callable[[Sequence[int]], str]
    colour: str
    size: _Size

    def html(self, last: float | None) -> str:
        """Return the chart; ``last`` is the newest mean, beside the metric's name."""
        parts = [svg.label(4, 15, self.name, _LONGEST_NAME, font_weight="bold", font_size=12)]
        if last is not None:
            parts.append(svg.label(self.size.right, 15, number(last), text_anchor="end"))
        if self.lines:
            parts += self._plot()
        if self.bad:
            note = svg.label(
                self.size.right - 6,
                42,
                self._note(),
                44,
                text_anchor="end",
                font_size=10,
                fill=ERROR,
            )
            parts.append(note)
        return svg.image(parts, self.size.width, self.size.height, self._in_words())

    def _plot(self) -> list[str]:
        lines = self.lines.values()
        lowest, highest = self._extremes()
        values = value_scale(lowest, highest, self.size.bottom, _TOP)
        first = min(line.first for line in lines)
        last = max(first + 1, *(line.steps[-1] for line in lines), *self.bad.values())
        labels = [svg.text_width(text) for _, text in values.ticks(_MOST_TICKS)]
        left = max(_LEFT, *(width + _GAP for width in labels))
        steps = Scale(first, float(last), left, self.size.right)
        shown = self._distinguishable(steps, values)
        drawn = [self._curve(rank, line, steps, values) for rank, line in shown.items()]
        return [*_axes(self.size, steps, values), *drawn, *self._bad_mark(steps)]

    def _distinguishable(self, steps: Scale, values: Scale) -> Mapping[int, _ChartLine]:
        """Return the lines to draw: only the mean if every rank coincides with it."""
        main = self.lines.get(ALL_RANKS)
        if main is None or self.bad:
            return self.lines
        xs, ys = steps(main.steps), values(main.means)
        apart = [
            np.abs(values(line.means) - np.interp(steps(line.steps), xs, ys)).max()
            for line in self.lines.values()
        ]
        return self.lines if max(apart) > _APART else {ALL_RANKS: main}

    def _curve(self, rank: int, line: _ChartLine, steps: Scale, values: Scale) -> str:
        """Return a line, with a band around its means, except for ranks beside the mean of all."""
        has_band = rank == ALL_RANKS or ALL_RANKS not in self.lines
        colour = self.colour if rank == ALL_RANKS else of_rank(rank)
        xs, ys = steps(line.steps), values(line.means)
        if len(xs) == 1:
            return f'<circle cx="{xs[0]:.4g}" cy="{ys[0]:.4g}" r="3" fill="{colour}"/>'
        drawn = ""
        if has_band:
            around = np.concatenate([xs, xs[::-1]])
            edges = np.concatenate([values(line.lows), values(line.highs)[::-1]])
            opacity = 0.12 if len(self.lines) > 1 and rank != ALL_RANKS else 0.22
            drawn = svg.path(svg.line(around, edges), fill=colour, fill_opacity=opacity)
        # Thin lines of ranks are drawn over the thick line of their mean.
        return drawn + svg.path(
            svg.line(xs, ys),
            fill="none",
            stroke=colour,
            stroke_linejoin="round",
            stroke_dasharray=dashes_of(rank),
            stroke_width=1.1 if rank >= 0 else 2.4 if len(self.lines) > 1 else 1.6,
        )

    def _bad_mark(self, steps: Scale) -> list[str]:
        if not self.bad:
            return []
        x = float(steps(float(min(self.bad.values()))))
        return [
            svg.path(f"M{x:.4g} {_TOP}V{self.size.bottom}", stroke=ERROR, stroke_dasharray="2 2")
        ]

    def _extremes(self) -> tuple[float, float]:
        lowest = min(line.lows.min() for line in self.lines.values())
        return float(lowest), float(max(line.highs.max() for line in self.lines.values()))

    def _note(self) -> str:
        first = min(self.bad.values())
        ranks = sorted(rank for rank, step in self.bad.items() if step == first)
        return f"not finite at step {first} ({self.who(ranks)})"

    def _in_words(self) -> str:
        note = f"; {self._note()}" if self.bad else ""
        if not self.lines:
            return f"{self.metric}: no finite value{note}"
        lowest, highest = self._extremes()
        main = self.lines[min(self.lines)]
        return (
            f"{self.metric}: {number(main.means[0])} to {number(main.means[-1])}, "
            f"lowest {number(lowest)}, highest {number(highest)}, "
            f"steps {number(round(main.first))} to {number(round(main.steps[-1]))}{note}"
        )


def _axes(size: _Size, steps: Scale, values: Scale) -> list[str]:
    left = steps.start
    parts = [svg.rule(left, size.bottom, size.right, size.bottom, 0.6)]
    for value, text in values.ticks(_MOST_TICKS):
        y = float(values(value))
        parts.append(svg.rule(left, y, size.right, y, 0.18))
        parts.append(svg.label(left - _GAP, y + 3.5, text, text_anchor="end", font_size=10))
    for step, text in steps.ticks(5, are_whole=True):
        x = float(steps(step))
        anchor = "end" if x + svg.text_width(text) / 2 > size.width else "middle"
        parts.append(svg.rule(x, size.bottom, x, size.bottom + 3, 0.6))
        parts.append(svg.label(x, size.bottom + 15, text, text_anchor=anchor, font_size=10))
    return parts
