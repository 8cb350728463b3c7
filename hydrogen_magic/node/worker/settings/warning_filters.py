"""Filters of warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import dropwhile
from typing import Any

from hydrogen_magic.node.worker.settings.provider import Provider, Stays, Undo
from hydrogen_magic.serialization.closure import Setting

_PYTHONS_FILTERS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def _read_warnings(module: Any) -> Iterator[Setting | Stays]:
    # The last one that is added is the first that is asked.
    filters: list[Any] = list(warnings.filters)
    for action, message, category, where, line in dropwhile(_is_pythons, reversed(filters)):
        if _pattern(where) == "__main__" or category.__module__.startswith("IPython."):
            continue  # IPython's own
        is_main = category.__module__ == "__main__"
        kind = category if is_main else (category.__module__, category.__qualname__)
        home = "warnings" if is_main or category.__module__ == "builtins" else category.__module__
        if home in sys.modules:
            value = (action, _pattern(message), kind, _pattern(where), line)
            name = f"{category.__module__}.{category.__qualname__}"
            key = f"{action}:{value[1]}:{name}:{value[3]}:{line}"  # as Python's option -W has it
            yield Setting("warnings", home, key, value)


def _is_pythons(entry: Any) -> bool:
    """Whether Python begins with this filter; a notebook that sets it moves it before all others."""
    action, message, category, where, _ = entry
    return action == "ignore" and category in _PYTHONS_FILTERS and not (message or where)


def _pattern(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


def _apply_warnings(module: Any, key: str, value: Any) -> Undo:
    action, message, kind, where, line = value
    if isinstance(kind, tuple):
        kind = getattr(sys.modules[kind[0]], kind[1])
    before = warnings.filters[:]
    warnings.filterwarnings(action, message, kind, where, line)
    return partial(_remove_filters, [added for added in warnings.filters if added not in before])


def _remove_filters(added: Sequence[Any]) -> None:
    left = [each for each in warnings.filters if each not in added]
    warnings.filters[:] = left  # type: ignore[index]  # typed as a Sequence; it is a list
    warnings.simplefilter("default", _NoWarning)  # makes the module forget what it has cached
    del warnings.filters[0]  # type: ignore[attr-defined]


class _NoWarning(Warning):
    """Never raised."""


PROVIDERS = {"warnings": Provider(_read_warnings, _apply_warnings)}
