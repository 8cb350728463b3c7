"""Text of ranks as HTML: escaped, with SGR colours as spans and other sequences removed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hydrogen_magic.core.units import clipped
from hydrogen_magic.driver.state.output_lines import clean, clean_name
from hydrogen_magic.views.static_svg.colours import on_background, readable

if TYPE_CHECKING:
    from rich.color import Color
    from rich.style import Style

_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_COLOUR_SPACE = re.compile(r"([34]8:2):[0-9]*:(?=[0-9]*:[0-9]*:[0-9])")
"""38:2::r:g:b has a field for it, which is empty."""
_NOT_XML = re.compile(
    "[^\x09\x20-\x7e\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010ffff]"
    # marks that change the direction of neighbouring text
    "|[\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069]"
)

_BASIC = (
    "#808080",
    "#d02030",
    "#008a20",
    "#a06a00",
    "#3d7bf0",
    "#c000c0",
    "#00808a",
    "#808080",
    "#8a8a8a",
    "#f04050",
    "#20a040",
    "#b08000",
    "#5090ff",
    "#d060d0",
    "#20a0a8",
    "#8a8a8a",
)
"""The 16 terminal colours; black and white depend on the page's theme, so they are grey here."""


def escaped(text: str) -> str:
    """Return ``text`` for HTML and XML, without characters that either of them forbids."""
    return html.escape(_NOT_XML.sub("", text))


def name_html(text: str, most: int = 60) -> str:
    """Return a name (metric, span, device) as one escaped line of limited length."""
    return escaped(clipped(_NOT_XML.sub("", clean_name(text)), most))


def table_html(
    titles: Sequence[str], rows: Iterable[Sequence[str]], n_left: int, attributes: str = ""
) -> list[str]:
    """Return a table of cells in HTML, a line for each row.

    The first ``n_left`` columns are aligned at the left, the others at the right.
    """
    head = _row_html("th", titles, n_left)
    body = [_row_html("td", row, n_left) for row in rows]
    return [f"<table{attributes}>{head}", *body, "</table>"]


def _row_html(tag: str, contents: Sequence[str], n_left: int) -> str:
    sides = ["left" if column < n_left else "right" for column in range(len(contents))]
    # The attribute is for GitHub, the style for JupyterLab, whose style sheet overrides attributes.
    cells = [
        f'<{tag} align="{side}" style="text-align:{side}">{content}</{tag}>'
        for side, content in zip(sides, contents, strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>"


def to_html(line: str) -> str:
    """Return one line of a rank, with colours as ``<span style>``."""
    line = clean(line)
    if "\x1b" not in line:
        return escaped(line)
    from rich.ansi import AnsiDecoder  # takes 50 ms, and few lines have colours

    text = AnsiDecoder().decode_line(_with_semicolons(line))
    written, end = [], 0
    for span in text.spans:
        css = "" if isinstance(span.style, str) else _css(span.style)
        shown = escaped(text.plain[span.start : span.end])
        written += [
            escaped(text.plain[end : span.start]),
            f'<span style="{css}">{shown}</span>' if css else shown,
        ]
        end = span.end
    return "".join([*written, escaped(text.plain[end:])])


def _with_semicolons(line: str) -> str:
    """Return a line with ``38;2;r;g;b`` for ``38:2::r:g:b``, which rich does not know."""
    return _SGR.sub(lambda found: _COLOUR_SPACE.sub(r"\1:", found[0]).replace(":", ";"), line)


def _css(style: Style) -> str:
    colour, background = _hex(style.color), _hex(style.bgcolor)
    if style.reverse:
        colour, background = background, colour or "#707070"
    if background and not colour:
        colour = on_background(background)
    rules = [
        f"color:{colour if background else readable(colour)}" if colour else "",
        f"background-color:{background}" if background else "",
        "font-weight:bold" if style.bold else "",
        "font-style:italic" if style.italic else "",
        "text-decoration:underline" if style.underline else "",
    ]
    return ";".join(rule for rule in rules if rule)


def _hex(colour: Color | None) -> str:
    """Return a colour as ``#rrggbb``, empty for the page's."""
    if colour is None or colour.is_default:
        return ""
    is_basic = colour.number is not None and colour.number < len(_BASIC)
    return _BASIC[colour.number or 0] if is_basic else colour.get_truecolor().hex
