"""Texts of a cell that may be names of files or folders: those among its values, and those in its code."""

from __future__ import annotations

import re
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePath
from typing import Any

from hydrogen_magic.serialization.instances import own_attributes

_QUOTED = re.compile(r"""(["'])(.+?)\1""")
_MOST_VALUES = 10_000
"""Values in which names of files are looked for."""


def in_code(code: str) -> Iterator[str]:
    """Yield what stands between quotes on one line."""
    return (found[2] for found in _QUOTED.finditer(code))


def in_values(value: Any) -> Iterator[str]:
    """Yield texts and paths in a value, its items and attributes, and theirs; runs no code of a class.

    It looks at the first :data:`_MOST_VALUES`, those of all objects before those inside them.
    """
    queue = deque([value])
    n_left = _MOST_VALUES
    known: set[int] = set()
    while queue:
        each = queue.popleft()
        if isinstance(each, (str, PurePath)):
            yield str(each)
        elif id(each) not in known and not isinstance(each, (types.ModuleType, type)):
            known.add(id(each))
            items = list(islice(_items(each), n_left))
            n_left -= len(items)
            queue += items


def _items(value: Any) -> Iterable[Any]:
    if type(value) in (list, tuple, set, frozenset):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return value.values()
    return tuple(own_attributes(value).values())
