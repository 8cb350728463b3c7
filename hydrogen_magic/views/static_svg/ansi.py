"""Text of ranks as HTML: escaped, with SGR colours as spans and other sequences removed."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hydrogen_magic.driver.state.output_lines import clean, clean_name
from hydrogen_magic.views.static_svg.colours import on_background, readable

_SGR = re.compile(r"\x1b\[([0-9;:]*)m")
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


@dataclass(frozen=True)
class _Style:
    """Style of the text after an SGR sequence; colours as ``#rrggbb``, empty: the page's."""

    colour: str = ""
    background: str = ""
    bold: bool = False
    italic: bool = False
    underlined: bool = False
    inverse: bool = False

    def css(self) -> str:
        colour, background = self.colour, self.background
        if self.inverse:
            colour, background = background, colour or "#707070"
        if background and not colour:
            colour = on_background(background)
        rules = [
            f"color:{colour if background else readable(colour)}" if colour else "",
            f"background-color:{background}" if background else "",
            "font-weight:bold" if self.bold else "",
            "font-style:italic" if self.italic else "",
            "text-decoration:underline" if self.underlined else "",
        ]
        return ";".join(rule for rule in rules if rule)


def escaped(text: str) -> str:
    """Return ``text`` for HTML and XML, without characters that either of them forbids."""
    return html.escape(_NOT_XML.sub("", text))


def name_html(text: str, most: int = 60) -> str:
    """Return a name (metric, span, device) as one escaped line of limited length."""
    name = _NOT_XML.sub("", clean_name(text))
    return escaped(name if len(name) <= most else f"{name[: most - 1]}…")


def to_html(line: str) -> str:
    """Return one line of a rank, with colours as ``<span style>``."""
    style = _Style()
    written = []
    for number, part in enumerate(_SGR.split(clean(line))):
        if number % 2:
            style = _after(style, part)
        elif part:
            css = style.css()
            written.append(f'<span style="{css}">{escaped(part)}</span>' if css else escaped(part))
    return "".join(written)


def _after(style: _Style, sequence: str) -> _Style:
    codes = iter([int(code) if len(code) < 4 else 0 for code in _codes(sequence)])
    for code in codes:
        style = _one(style, code, codes)
    return style


def _codes(sequence: str) -> list[str]:
    # 38:2::r:g:b has an empty field for an unused colour space.
    plain = re.sub(r"([34]8:2):[0-9]*:(?=[0-9]*:[0-9]*:[0-9])", r"\1:", sequence)
    return [code or "0" for code in re.split("[;:]", plain)]


def _one(style: _Style, code: int, following: Iterator[int]) -> _Style:
    if code == 0:
        return _Style()
    if code in _FLAGS:
        return _FLAGS[code](style)
    if code in (38, 48):
        colour = _extended(following)
        return replace(style, colour=colour) if code == 38 else replace(style, background=colour)
    for first, offset in ((30, 0), (90, 8)):
        if first <= code < first + 8:
            return replace(style, colour=_BASIC[code - first + offset])
        if first + 10 <= code < first + 18:
            return replace(style, background=_BASIC[code - first - 10 + offset])
    return {39: replace(style, colour=""), 49: replace(style, background="")}.get(code, style)


_FLAGS: Mapping[int, Callable[[_Style], _Style]] = {
    1: lambda style: replace(style, bold=True),
    3: lambda style: replace(style, italic=True),
    4: lambda style: replace(style, underlined=True),
    7: lambda style: replace(style, inverse=True),
    22: lambda style: replace(style, bold=False),
    23: lambda style: replace(style, italic=False),
    24: lambda style: replace(style, underlined=False),
    27: lambda style: replace(style, inverse=False),
}


def _extended(following: Iterator[int]) -> str:
    """Return the colour of ``5;n`` or ``2;r;g;b``; empty if it is incomplete or out of range."""
    kind = next(following, 0)
    parts = [next(following, 0) for _ in range({5: 1, 2: 3}.get(kind, 0))]
    if not parts or max(parts) > 255:
        return ""
    return _of_256(parts[0]) if kind == 5 else "#{:02x}{:02x}{:02x}".format(*parts)


def _of_256(number: int) -> str:
    if number < 16:
        return _BASIC[number]
    if number >= 232:
        return f"#{8 + 10 * (number - 232):02x}" + f"{8 + 10 * (number - 232):02x}" * 2
    red, rest = divmod(number - 16, 36)
    levels = (0, 95, 135, 175, 215, 255)
    return f"#{levels[red]:02x}{levels[rest // 6]:02x}{levels[rest % 6]:02x}"
