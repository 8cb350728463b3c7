"""The objects that a variable refers to: expressions for them, and paths to the same ones elsewhere."""

from __future__ import annotations

import functools
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from hydrogen_magic.serialization.instances import own_attributes

Path = tuple[str, ...]
_MAX_OBJECTS = 200_000
"""Maximum number of objects searched for an expression; more take over a second."""

_MAX_OBJECTS_OF_PATHS = 20_000
"""Objects that :func:`paths_to` looks at: a fraction of a second."""

_LONGEST_PATH = 100
"""Characters of an expression; a longer one, through the insides of a library, helps no user."""


def describe(obj: Any) -> str:
    """Return the name of the type of ``obj``."""
    kind = type(obj)
    if kind is types.FunctionType or issubclass(kind, type):
        return "function" if kind is types.FunctionType else f"class {obj.__qualname__}"
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return kind.__qualname__ if kind.__qualname__.startswith(module) else module + kind.__qualname__


def path_to(name: str, value: Any, wanted: Any) -> str | None:
    """Return an expression that leads from variable ``name`` to the object ``wanted``.

    None if there is none, or only a long one.
    """
    path = find_path(name, value, lambda obj: obj is wanted)
    return None if path is None or len(path) > _LONGEST_PATH else path


def find_path(name: str, value: Any, is_wanted: Callable[[Any], bool]) -> str | None:
    """Return an expression that leads from variable ``name`` to the nearest object of its kind."""
    return next((path for path, obj in walk(name, value) if is_wanted(obj)), None)


def walk(
    name: str, value: Any, is_left_out: Callable[[str], bool] = lambda path: False
) -> Iterator[tuple[str, Any]]:
    """Yield the objects that ``value`` refers to, nearest first, each with an expression for its
    path, and without those behind a path that ``is_left_out``.

    An object may be repeated with another path. Stops after :data:`_MAX_OBJECTS`.
    """
    todo = deque([(name, value)])
    seen: dict[int, Any] = {}
    while todo:
        path, obj = todo.popleft()
        yield path, obj
        if id(obj) not in seen and len(seen) <= _MAX_OBJECTS:
            seen[id(obj)] = obj
            found = (each for each in children(path, obj) if not is_left_out(each[0]))
            todo.extend(islice(found, _MAX_OBJECTS))


def children(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that ``obj`` refers to, with the expression that leads there from ``path``.

    The code of its class is not called: its ``__iter__`` may change the object.
    """
    kind = type(obj)
    if kind in (str, bytes, int, float, bool, type(None), types.ModuleType):
        return
    if issubclass(kind, dict):
        for place, (key, item) in enumerate(list(islice(dict.items(obj), _MAX_OBJECTS))):
            yield f"{path}[{_short(key, place)}]", item
    elif issubclass(kind, (list, tuple)):
        items = list.__iter__(obj) if issubclass(kind, list) else tuple.__iter__(obj)
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(items))
    elif issubclass(kind, (set, frozenset)):
        members = set.__iter__(obj) if issubclass(kind, set) else frozenset.__iter__(obj)
        yield from ((f"{path}{{{place}}}", item) for place, item in enumerate(members))
    elif kind is types.FunctionType:
        yield from _of_function(path, obj)
        return
    elif kind is types.MethodType:
        yield from ((f"{path}.__self__", obj.__self__), (f"{path}.__func__", obj.__func__))
    elif issubclass(kind, functools.partial):
        yield from ((f"{path}.{name}", getattr(obj, name)) for name in ("func", "args", "keywords"))
    if issubclass(kind, type) and obj.__module__ != "__main__":
        return
    yield from _attributes(path, obj)


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield from variables_of(path, function)
    if function.__module__ == "__main__":
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


def variables_of(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function itself holds, without those it looks up by name."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f"{path}()'s variable {name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"{path}()'s default", default) for default in defaults)
    yield from ((f"{path}.{name}", item) for name, item in function.__dict__.items())


def _attributes(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    attributes = list(own_attributes(obj).items())
    yield from ((f"{path}.{name}", item) for name, item in attributes)
    if not issubclass(type(obj), type):
        yield from _slots(path, obj)


def _slots(path: str, obj: Any) -> Iterator[tuple[str, Any]]:
    for base in type(obj).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            descriptor = base.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    yield f"{path}.{name}", descriptor.__get__(obj)
                except AttributeError:  # not assigned
                    continue


def _short(key: Any, place: int) -> str:
    is_plain = type(key) in (str, int, float, bool)
    text = repr(key) if is_plain else f"{describe(key)} {place}"
    return text if len(text) < 40 else text[:37] + "..."


def paths_to(root: Any, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[Path, Any]]:
    """Yield the wanted objects that ``root`` refers to, each with its shortest path."""
    todo = deque[tuple[Path, Any]]([((), root)])
    seen: dict[int, Any] = {}
    while todo and len(seen) < _MAX_OBJECTS_OF_PATHS:
        path, obj = todo.popleft()
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        if is_wanted(obj):
            yield path, obj
        found = islice(_steps(obj), _MAX_OBJECTS_OF_PATHS)
        todo.extend(((*path, step), child) for step, child in found)


def objects_at(root: Any, paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield the objects to which ``paths`` lead from ``root``; None for a path that leads nowhere."""
    known: dict[Path, dict[str, Any]] = {}
    for path in paths:
        obj = root
        for n, step in enumerate(path):
            if path[:n] not in known:
                known[path[:n]] = dict(_steps(obj))
            obj = known[path[:n]].get(step)
        yield path, obj


def _steps(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what ``obj`` refers to, each by a step of its own; not the items of sets, without an order."""
    n_alike = Counter[str]()
    for step, child in children("", obj):
        if step.startswith("{"):
            continue
        n_alike[step] += 1  # long keys are cut off
        yield f"{step} {n_alike[step]}", child
