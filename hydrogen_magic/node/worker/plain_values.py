"""Values that any process can unpickle."""

from __future__ import annotations

from typing import Any

_ATOMS = (int, float, complex, bool, type(None))
_SIZED = (str, bytes, list, tuple, dict)
_MAX_LENGTH = 10_000
"""Characters or items; longer values travel with the notebook's other values, whose size is limited."""
_MAX_DEPTH = 8


def is_plain(value: Any, with_sets: bool = False, depth: int = _MAX_DEPTH) -> bool:
    """Whether ``value`` is small and of Python's own types, so that any process can unpickle it.

    Sets only count ``with_sets``: their order differs from process to process.
    """
    kind = type(value)
    if kind in _ATOMS:
        return True
    kinds = (*_SIZED, set) if with_sets else _SIZED
    if kind not in kinds or len(value) > _MAX_LENGTH or depth == 0:
        return False
    if kind in (str, bytes):
        return True
    items = [*value.keys(), *value.values()] if kind is dict else value
    return all(is_plain(item, with_sets, depth - 1) for item in items)
