"""SVG elements, and an SVG as a self-contained ``<img>``.

Notebooks that are not trusted lose inline SVG, but keep an image from a ``data:`` address.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydrogen_magic.views.static_svg.ansi import escaped, name_html
from hydrogen_magic.views.static_svg.colours import INK

_FONT = "system-ui,-apple-system,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif"


def image(parts: Iterable[str], width: float, height: float, alt: str) -> str:
    """Return ``parts`` as an ``<img>`` of this size in pixels; ``alt`` describes it in words."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="{_FONT}" font-size="11" '
        f'fill="{INK}">{"".join(parts)}</svg>'
    )
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    return (
        f'<img width="{width:g}" height="{height:g}" alt="{escaped(alt)}" '
        f'src="data:image/svg+xml;base64,{data}">'
    )


def label(x: float, y: float, text: str, most: int = 60, **attributes: Any) -> str:
    """Return a text element at its baseline; ``text`` is escaped here."""
    return f'<text x="{x:.4g}" y="{y:.4g}"{_attributes(attributes)}>{name_html(text, most)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    """Return a hairline of an axis."""
    return path(f"M{x1:.4g} {y1:.4g}L{x2:.4g} {y2:.4g}", stroke=INK, stroke_opacity=opacity)


def path(drawn: str, **attributes: Any) -> str:
    """Return a path of the coordinates ``drawn``; names with ``_`` stand for those with ``-``."""
    return f'<path d="{drawn}"{_attributes(attributes)}/>'


def line(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> str:
    """Return a polyline's coordinates, to a tenth of a pixel, relative to the previous ones."""
    tenths = np.rint(np.column_stack([xs, ys]) * 10).astype(np.int64)
    moves = " ".join(f"{move / 10:g}" for move in np.diff(tenths, axis=0).ravel().tolist())
    start_x, start_y = tenths[0] / 10
    return f"M{start_x:g} {start_y:g}" + (f"l{moves}" if moves else "")


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle's coordinates, for a path of many."""
    return f"M{x:.4g} {y:.4g}h{width:.4g}v{height:.3g}h-{width:.4g}z"


def text_width(text: str) -> float:
    """Return an upper estimate of the width of ``text`` in pixels."""
    return 6.1 * len(text)


def _attributes(attributes: dict[str, Any]) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{value}"'
        for name, value in attributes.items()
        if value != ""
    )
