"""Variables that still refer to a model, tensor or optimizer that another variable has replaced."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from hydrogen_magic.serialization.object_paths import children, variables_of

_OF_IPYTHON = {"In", "Out", "exit", "quit", "get_ipython"}
_LEVELS = 3
"""A list of models is one level, a dict of such lists two; the arguments of a partial are in a tuple."""
_MAX_OBJECTS = 100_000
"""Objects looked at for all variables of the notebook: a fraction of a second."""
_MAX_CHILDREN = 1000
"""Items of one container."""


def stale_references(
    before: Mapping[str, Mapping[int, Any]], renewed: Collection[str], namespace: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return the variables that refer to a part that another variable has had replaced, by its name.

    ``before``: what :func:`parts_of` returned for earlier values of variables in ``namespace``. ``renewed``:
    these variables, and others that have new contents.
    """
    now = {name: parts_of(namespace[name]) for name in before}
    current = {part for parts in now.values() for part in parts}
    wanted = {
        name: parts.keys() - current
        for name, parts in before.items()
        if not now[name]
        or now[name].keys() - parts.keys()  # nothing replaces a part that is removed
    }
    if not any(wanted.values()):
        return {}
    search = _Search(set[int]().union(*wanted.values()))
    referred = {
        other: search.found_in(value)
        for other, value in namespace.items()
        if other not in {*renewed, *_OF_IPYTHON} and other[:1] != "_"
    }
    found = {
        name: [other for other, near in referred.items() if near & parts]
        for name, parts in wanted.items()
    }
    return {name: users for name, users in found.items() if users}


def near(values: Iterable[Any], wanted: Collection[int]) -> set[int]:
    """Return those of the ``wanted`` identities that are near ``values``."""
    search = _Search({*wanted})
    return {found for value in values for found in search.found_in(value)}


class _Search:
    """Looks for objects among those that variables refer to, with a bound on the work for all of them."""

    def __init__(self, wanted: set[int]) -> None:
        self._wanted = wanted
        self._left = _MAX_OBJECTS

    def found_in(self, value: Any) -> set[int]:
        """Return the identities of the wanted objects near ``value``."""
        found: set[int] = set()
        seen: dict[int, Any] = {}
        todo = deque([(value, _LEVELS)])
        while todo and self._left > 0:
            obj, levels = todo.popleft()
            if id(obj) in self._wanted:
                found.add(id(obj))
            if id(obj) in seen or levels == 0 or isinstance(obj, type):
                continue
            self._left -= 1
            seen[id(obj)] = obj
            levels = _LEVELS if _may_refer(obj) else levels - 1
            todo.extend((one, levels) for one in islice(_held_by(obj), _MAX_CHILDREN))
        return found


def _held_by(obj: Any) -> Iterator[Any]:
    """Yield the objects that ``obj`` refers to; what a function looks up by name is another variable."""
    held = variables_of if type(obj) is types.FunctionType else children
    return (one for _, one in held("", obj))


def parts_of(obj: Any) -> dict[int, Any]:
    """Return an object that others keep references to, and its parts, by identity."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    parts = [obj]
    if isinstance(obj, torch.nn.Module):
        parts += (*obj.modules(), *obj.parameters())
    elif isinstance(obj, torch.optim.Optimizer):
        parts += (one for group in obj.param_groups for one in group["params"])
    elif not (isinstance(obj, torch.Tensor) and obj.requires_grad):
        return {}
    return {id(part): part for part in parts}


def _may_refer(value: Any) -> bool:
    """Whether everything in a value is worth a look: an object of torch's or of the notebook's classes."""
    homes = {str(base.__module__).partition(".")[0] for base in type(value).__mro__}
    return bool(homes & {"__main__", "torch"})
