"""The order of a rank's metrics where only the first few are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LEARNING_RATE = re.compile(r"(?<![a-z])lr(?![a-z])|learning.?rate")


def by_importance(names: Iterable[str]) -> list[str]:
    """Return losses first, learning rates last, and otherwise the order of ``names``."""
    return sorted(names, key=_place)


def _place(name: str) -> int:
    name = name.lower()
    return 0 if "loss" in name else 2 if _LEARNING_RATE.search(name) else 1
