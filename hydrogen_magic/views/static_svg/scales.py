"""Maps values to pixels, and chooses the labels of an axis."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hydrogen_magic.driver.state.formatting import duration, number

_MOST_DECADES_LINEAR = 3
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_ROUND_FEW = (1.0, 2.0, 5.0, 10.0)
_ROUND_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return pixels; values outside are drawn at the edge."""
        inside = np.clip(np.asarray(values, np.float64), self.low, self.high)
        low, high = self.low, self.high
        if self.is_log:
            inside, low, high = np.log10(inside), math.log10(low), math.log10(high)
        span = high - low  # none if the numbers are too large to differ
        share = (inside - low) / (span or 1.0)
        return np.asarray(self.start + share * (self.end - self.start))

    def ticks(self, most: int, are_whole: bool = False) -> list[tuple[float, str]]:
        """Return about this many round values with their labels; ``are_whole``: only integers."""
        if self.is_log:
            return [(value, number(value)) for value in _decades(self.low, self.high, most)]
        at_least = (self.high - self.low) / most
        step = max(1.0, _round_step(at_least, _ROUND_FEW)) if are_whole else _round_step(at_least)
        values = _multiples(step, self.low, self.high)
        return list(zip(values, _labels(values, step), strict=True))


def value_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Return a scale with some margin around the values; logarithmic over more than 3 decades."""
    if low > 0 and high / low > 10**_MOST_DECADES_LINEAR:
        return Scale(low, high, start, end, is_log=True)
    # A constant gets a tenth around it, and zero one; a range too small for its labels is widened.
    least = max(abs(low), abs(high)) * (1e-9 if high > low else 0.1) or 1.0
    room = max((high - low) * 0.05, least, 1e-300)
    return Scale(low - room, high + room, start, end)


def seconds_ticks(until_s: float, most: int) -> list[tuple[float, str]]:
    """Return round times from 0 on: ``0.5 s``, ``20 s``, ``2:00``; below a second in ms."""
    step = next((s for s in _ROUND_S if s * most >= until_s), math.ceil(until_s / most))
    if until_s <= most * 0.5:
        fine = _round_step(until_s / most, _ROUND_FEW)
        unit, name = (1000, "ms") if until_s < 1 else (1, "s")
        values = _multiples(fine, 0.0, until_s)
        labels = _labels([value * unit for value in values], fine * unit)
        return [(value, f"{label} {name}") for value, label in zip(values, labels, strict=True)]
    return [(at, duration(at) if at >= 10 else f"{at:g} s") for at in _multiples(step, 0, until_s)]


def _round_step(at_least: float, choices: tuple[float, ...] = _ROUND) -> float:
    """Return the next of ``choices`` times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least)) if at_least > 1e-300 else 1e-300
    enough = (c * power for c in choices if c * power >= at_least * (1 - 1e-9))
    return float(next(enough, 10 * power))


def _multiples(step: float, low: float, high: float) -> list[float]:
    first, last = math.ceil(low / step), math.floor(high / step)
    return [count * step for count in range(first, min(last, first + 50) + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    every = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, every)]


def _labels(values: Sequence[float], step: float) -> list[str]:
    """Return ``values``, which are ``step`` apart, in one notation, with enough digits to differ."""
    largest = max(map(abs, values), default=0.0)
    decimals = next((d for d in range(12) if math.isclose(round(step, d), step)), 12)
    if decimals <= (10 if largest >= 1e-3 else 6) and largest < 1e10:
        return [f"{value + 0.0:.{decimals}f}" for value in values]
    return [_scientific(value, step) for value in values]


def _scientific(value: float, step: float) -> str:
    if value == 0:
        return "0"
    digits = math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9) + 1
    return re.sub(r"\.?0*(e[+-])", r"\1", f"{value:.{min(12, max(0, digits))}e}")
