"""Numbers and texts in the forms that all messages and views share."""

from __future__ import annotations

import math
from collections.abc import Iterable


def as_float(number: float) -> float:
    """Return a float; infinity for an integer that is too large."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def size_text(n_bytes: float) -> str:
    """Return a size in decimal units: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:  # or it would be rounded to 1000
            digits = 0 if unit == "B" or n_bytes >= 99.95 else 1
            return f"{n_bytes:.{digits}f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def counted(n: int, noun: str) -> str:
    """Return ``1 rank`` or ``1,024 ranks``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def first_of(texts: Iterable[str], most: int) -> str:
    """Return the first ``most`` texts, and how many more there are: ``a, b and 12 more``."""
    every = list(texts)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more:,} more" if more > 0 else "")


def clipped(text: str, most: int) -> str:
    """Return ``text`` with at most ``most`` characters; "…" replaces the end of a longer one."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
