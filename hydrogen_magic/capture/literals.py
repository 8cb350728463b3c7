"""Values that a script writes as literals."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

_LONGEST_LITERAL = 2000
"""Characters; longer values are easier to read in a separate file."""
_CONTAINERS = (tuple, list, dict, set)
"""Types of literals that have others in them."""


def is_literal(value: Any) -> bool:
    try:
        if not is_plain(value):
            return False
        text = repr(value)
        return len(text) <= _LONGEST_LITERAL and bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def is_plain(value: Any) -> bool:
    """Whether ``value`` and all in it have exactly such types, and are not longer than a literal."""
    if type(value) in (int, float, complex, bool, type(None)):
        return True
    if type(value) not in (str, bytes, *_CONTAINERS) or len(value) > _LONGEST_LITERAL:
        return False
    return type(value) in (str, bytes) or all(map(is_plain, _items(value)))


def _items(container: Any) -> Iterable[Any]:
    return chain(*container.items()) if isinstance(container, dict) else container


def mutable_parts(value: Any) -> Iterator[Any]:
    """Yield the mutable objects in a literal, one more than once if several refer to it."""
    if type(value) in _CONTAINERS:
        if type(value) is not tuple:
            yield value
        for item in _items(value):
            yield from mutable_parts(item)
