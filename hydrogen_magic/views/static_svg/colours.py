"""Colours of ranks and names, and calculations with colours.

The palette is the result of a search: among eight colours, it maximizes the smallest CIE76 distance for
normal, protan, deutan and tritan vision (Machado's matrices) under the required contrast.
"""

from __future__ import annotations

EITHER = (
    "#5090ff",
    "#e07010",
    "#7040ff",
    "#d02030",
    "#507070",
    "#d070c0",
    "#a09070",
    "#c000c0",
)
"""On white, on #111 and on #1e1e1e: contrast at least 3, distance at least 23.

A picture in a notebook cannot adapt to its background: the browser's colour scheme is that of the system,
not of JupyterLab or GitHub. The live view uses the same colours in ``theme.ts``, so that a rank keeps its
colour across themes and in the saved notebook.
"""

DASHES = ("", "6 3", "2 2", "8 3 2 3")
"""Patterns of lines of the same colour: for ranks 0 to 7, 8 to 15 and so on, as in the live view."""

INK = "#7a7a7a"
"""Axes and text on any of these backgrounds: contrast at least 4 on white and on #111."""
ERROR = "#d02030"

_DARKEST, _LIGHTEST = 0.142, 0.294
"""Relative luminance between which a colour has a contrast of 3 on white and on #1e1e1e."""


def of_rank(rank: int) -> str:
    """Return the colour of a rank in a picture; they repeat after eight."""
    return EITHER[rank % len(EITHER)]


def dashes_of(line: int) -> str:
    """Return the dash pattern that distinguishes a line from those of the same colour."""
    return DASHES[max(0, line) // len(EITHER) % len(DASHES)]


def contrast(colour: str, background: str) -> float:
    """Return the contrast of two ``#rrggbb`` colours as WCAG defines it: 1 to 21."""
    darker, lighter = sorted(_luminance(_linear(each)) for each in (colour, background))
    return (lighter + 0.05) / (darker + 0.05)


def on_background(background: str) -> str:
    """Return black or white, whichever has more contrast to ``background``."""
    return max(("#000000", "#ffffff"), key=lambda colour: contrast(colour, background))


def readable(colour: str) -> str:
    """Return ``colour``, made darker or lighter until it is readable on white and on black."""
    linear = _linear(colour)
    luminance = _luminance(linear)
    if luminance > _LIGHTEST:
        linear = [part * _LIGHTEST / luminance for part in linear]
    elif luminance < _DARKEST:
        towards_white = (_DARKEST - luminance) / (1 - luminance)
        linear = [part + towards_white * (1 - part) for part in linear]
    return "#" + "".join(f"{round(255 * _gamma(part)):02x}" for part in linear)


def _linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def _gamma(part: float) -> float:
    return part * 12.92 if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055


def _luminance(linear: list[float]) -> float:
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
