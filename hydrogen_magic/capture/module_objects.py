"""Objects that belong to modules: what refers to them on a rank gets those of the rank, not copies."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.closure import Setting
from hydrogen_magic.serialization.importable import names_of
from hydrogen_magic.serialization.instances import attributes_alone

_CONTAINERS = (list, dict, set, deque, OrderedDict, Counter, defaultdict)
"""Mutable containers of Python's own, which a module may fill after its import."""

_PROCESS_STATE = (
    ("matplotlib", "rcParams"),
    ("numpy.random.mtrand", "_rand"),
    ("os", "environ"),
    ("random", "_inst"),
    ("torch", "default_generator"),
)
"""Objects of libraries by which a process has one state: ``np.random.rand`` is a method of one of them."""


@dataclass(frozen=True)
class ModuleObject:
    """A list, dict, set, sentinel or plain instance that is an attribute of a local module."""

    module: str
    name: str
    value: Any
    is_new: bool = False
    """The notebook has assigned it: a rank's module has another one."""

    def contents(self) -> Iterator[Setting]:
        """Yield the setting that gives the contents in the notebook to the object of a rank."""
        if self.is_new:
            yield Setting("assignment", self.module, self.name, self.value)
        elif type(self.value) in _CONTAINERS:
            yield Setting("attribute", self.module, self.name, self.value.copy())
        elif attributes := attributes_alone(self.value):
            yield Setting("attribute", self.module, f"{self.name}.__dict__", attributes.copy())


def module_objects(
    modules: Iterable[str],
    assigned: Callable[[], Container[tuple[str, str]]],
    parts: Callable[[], Iterable[Any]],
) -> list[ModuleObject]:
    """Return the objects of loaded ``modules`` that are parts of the notebook's values.

    ``assigned``: returns the modules and attributes to which the notebook has assigned other objects.
    Arrays, models and other objects with a state of their own kind are left out: what else the module
    refers to would not fit their state.
    """
    places = {
        id(value): (home, name, value)
        for home in sorted((name for name in modules if name in sys.modules), reverse=True)
        for name, value in list(names_of(home).items())
        if not name.startswith("__") and _is_shared(value)
    }
    keys = {key for key in map(id, parts()) if key in places} if places else ()
    found = [place for key, place in places.items() if key in keys]
    new = assigned() if found else ()
    return [ModuleObject(home, name, value, (home, name) in new) for home, name, value in found]


def _is_shared(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        return True
    attributes = attributes_alone(value)
    return attributes is not None and is_plain(attributes, with_sets=True)


_known: WeakKeyDictionary[type, dict[str, tuple[int, dict[int, str]]]] = WeakKeyDictionary()
"""By class and module: the number of names in the module, and its constants as names by id."""


def constants_of(kind: type) -> dict[int, tuple[str, str]]:
    """Return the places of objects of class ``kind`` that each rank has as well, by id.

    These are sentinels, which have nothing but their identity, and the states of processes. The object at a
    place may have been replaced since.
    """
    state = [place for place in _PROCESS_STATE if type(names_of(place[0]).get(place[1])) is kind]
    if state:
        return {id(names_of(module)[name]): (module, name) for module, name in state}
    found: dict[int, tuple[str, str]] = {}
    known = _known.setdefault(kind, {})
    for home in [*sys.modules] if kind is object else [kind.__module__]:
        names = names_of(home)
        if home not in known or known[home][0] != len(names):  # reading all modules takes 15 ms
            known[home] = len(names), _sentinels(kind, home, names)
        found.update((key, (home, name)) for key, name in known[home][1].items())
    return found


def _sentinels(kind: type, home: str, names: Mapping[str, Any]) -> dict[int, str]:
    if home == "__main__" or names.get("__spec__") is None:
        return {}
    values = list(names.items())
    return {
        id(one): name for name, one in values if type(one) is kind and attributes_alone(one) == {}
    }
