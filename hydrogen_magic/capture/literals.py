"""Values that a script writes as literals."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from typing import Any

from hydrogen_magic.node.worker.plain_values import is_plain

_LONGEST_LITERAL = 2000
"""Characters; longer values are easier to read in a separate file."""
_CONTAINERS = (tuple, list, dict, set)
"""Types of literals that have others in them."""


def is_literal(value: Any) -> bool:
    try:
        if not is_plain(value, with_sets=True):
            return False
        text = repr(value)
        return len(text) <= _LONGEST_LITERAL and bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError):
        return False


def mutable_parts(value: Any) -> Iterator[Any]:
    """Yield the mutable objects in a literal, one more than once if several refer to it."""
    if type(value) in _CONTAINERS:
        if type(value) is not tuple:
            yield value
        items = chain(*value.items()) if type(value) is dict else value
        for item in items:
            yield from mutable_parts(item)
