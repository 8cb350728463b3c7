"""Links, images and headings of Markdown and of notebooks, as a renderer finds them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

_PARSER = MarkdownIt("commonmark").enable("table")
_HTML_TARGET = re.compile(r'\b(?:src|href)="([^"]+)"')


def read(page: Path) -> str:
    """Return the Markdown of a page; of a notebook, that of all its cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "markdown")


def targets(text: str) -> list[str]:
    """Return where links lead, and the addresses of images."""
    found: list[str] = []
    for block in _PARSER.parse(text):
        for token in (block, *(block.children or ())):
            found += (str(token.attrs[name]) for name in ("href", "src") if name in token.attrs)
            if token.type.startswith("html"):
                found += _HTML_TARGET.findall(token.content)
    return found


def headings(text: str) -> list[str]:
    """Return headings as written."""
    tokens = pairwise(_PARSER.parse(text))
    return [inline.content for opening, inline in tokens if opening.type == "heading_open"]
