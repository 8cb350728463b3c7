"""Marks in the output of a rank, at the places of its displays.

Output reaches the agent through a pipe, displays through a socket. A rank writes a numbered mark into the
pipe, and the agent shows the display there. A mark is an escape sequence that terminals ignore.
"""

from __future__ import annotations

import re

_BEGIN = "\x1b_hydrogen_magic:display:"
_MARK = re.compile(f"{_BEGIN}(\\d{{1,9}})\x1b\\\\")
_IN_BYTES = re.compile(_MARK.pattern.encode())


def mark(number: int) -> bytes:
    """Return the mark of the place ``number``."""
    return f"{_BEGIN}{number}\x1b\\".encode()


def split(text: str) -> list[str | int]:
    """Return the parts of ``text``, first and last, and as integers the places marked between them."""
    return [int(part) if index % 2 else part for index, part in enumerate(_MARK.split(text))]


def without(data: bytes) -> bytes:
    """Return output without its marks."""
    return _IN_BYTES.sub(b"", data) if _BEGIN.encode() in data else data
