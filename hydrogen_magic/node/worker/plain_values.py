"""``is_plain``: whether a value is small and of Python's own types, so that any process can unpickle it."""

from __future__ import annotations

from typing import Any

_ATOMS = (int, float, complex, bool, type(None))
_SIZED = (str, bytes, list, tuple, dict)
_MAX_LENGTH = 10_000
"""Characters or items; longer values travel with the notebook's other values, whose size is limited."""
_MAX_ITEMS = 100_000
"""At one depth; a list may be in another one many times, and is looked at each time."""
_MAX_DEPTH = 8


def is_plain(value: Any, with_sets: bool = False) -> bool:
    """Whether ``value`` is small and of Python's own types, so that any process can unpickle it.

    Sets only count ``with_sets``: their order differs from process to process.
    """
    kinds = (*_SIZED, set) if with_sets else _SIZED
    values = [value]
    for _ in range(_MAX_DEPTH + 1):
        items: list[Any] = []
        for each in values:
            kind = type(each)
            if kind in _ATOMS:
                continue
            if kind not in kinds or len(each) > _MAX_LENGTH:
                return False
            if kind not in (str, bytes):
                items += [*each.keys(), *each.values()] if kind is dict else each
            if len(items) > _MAX_ITEMS:
                return False
        if not items:
            return True
        values = items
    return False
