"""Quantities as text, always in the same unit."""

from __future__ import annotations


def size_text(n_bytes: float) -> str:
    """Return a size in decimal units: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            digits = 0 if unit == "B" or n_bytes >= 100 else 1
            return f"{n_bytes:.{digits}f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"
