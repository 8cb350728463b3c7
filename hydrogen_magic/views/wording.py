"""How numbers, times, sizes and ranks are put into words, wherever a gang is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["duration", "number", "ranks_text", "size_text"]


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``35 s``, ``2:05`` or ``1:02:05``."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Return at most four digits that matter: ``0.2134``, ``12.4``, ``1.2e-05``, ``nan``."""
    if not math.isfinite(value):
        return str(float(value))
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.1f}" if 10 <= abs(value) < 1e6 else f"{value:.4g}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0, 2 and 3`` or ``ranks 0 to 127``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"ranks {', '.join(shown)} and {len(ranks) - 8} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def size_text(n_bytes: float) -> str:
    """Return a size as people read it: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            digits = 0 if unit == "B" or n_bytes >= 100 else 1
            return f"{n_bytes:.{digits}f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"
