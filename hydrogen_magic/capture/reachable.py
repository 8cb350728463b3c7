"""Finds the global names that notebook functions and classes read, without calling any code."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.serialization.code_names import GlobalRead, assigned_names, global_reads
from hydrogen_magic.serialization.importable import is_main, own_globals
from hydrogen_magic.serialization.instances import find_on_type, own_attributes

_MAX_OBJECTS = 5000
"""A longer search would be slower than pickling, which finds the rest."""
_MAX_CONTAINER = 200
"""Number of items of a list or dict that are searched: data sets contain no functions."""

_ANNOTATE = "__annotate_func__"
"""From Python 3.14 on a class has a function that evaluates its annotations. They need not be valid."""


@dataclass(frozen=True)
class FunctionRead:
    """A global name that a notebook function reads."""

    read: GlobalRead
    function: str
    """Display name: ``normalize()``, ``Net.forward()``."""
    filename: str
    """Of the function's code."""
    guarded: bool
    """The function handles NameError."""


def reads_of(value: Any, namespace: Mapping[str, Any]) -> Iterator[FunctionRead]:
    """Yield the names that functions over ``namespace``, which ``value`` is or contains, read there."""
    for function in _functions_in(value, namespace):
        code = function.__code__
        catches = "NameError" in code.co_names
        label = f"{function.__qualname__.replace('<locals>.', '')}()"
        for read in global_reads(code):
            yield FunctionRead(read, label, code.co_filename, catches)


def stored_names(value: Any, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the global names that those functions assign."""
    for function in _functions_in(value, namespace):
        yield from assigned_names(function.__code__)


def is_notebooks(function: types.FunctionType, namespace: Mapping[str, Any]) -> bool:
    """Whether ``function`` reads the notebook's names: ``namespace``, or ``__main__`` if that differs."""
    main = vars(sys.modules["__main__"])
    return function.__globals__ is namespace or function.__globals__ is main


def _functions_in(value: Any, namespace: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    for obj in objects_in([value], namespace):
        if type(obj) is types.FunctionType and is_notebooks(obj, namespace):
            yield obj


def objects_in(values: Iterable[Any], namespace: Mapping[str, Any]) -> Iterator[Any]:
    """Yield ``values`` and the objects in them, not all of a large one."""
    seen: dict[int, Any] = {}
    todo = [*values]
    while todo and len(seen) < _MAX_OBJECTS:
        obj = todo.pop()
        if id(obj) in seen or issubclass(type(obj), _LEAVES):
            continue
        seen[id(obj)] = obj  # kept alive, so that no id is reused
        yield obj
        todo.extend(_parts(obj, namespace))


_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), types.ModuleType)


def _parts(obj: Any, namespace: Mapping[str, Any]) -> Iterable[Any]:
    """Return objects that may lead from ``obj`` to notebook functions."""
    kind = type(obj)
    if kind is types.FunctionType:
        return _function_parts(obj, namespace)
    if issubclass(kind, type):
        own = [value for name, value in vars(obj).items() if name != _ANNOTATE]
        return [*own, *obj.__bases__, kind] if is_main(obj) else []
    if kind in (staticmethod, classmethod, types.MethodType):
        return [obj.__func__, getattr(obj, "__self__", None)]
    if kind is property:
        return [obj.fget, obj.fset, obj.fdel]
    if kind is functools.partial:
        return [obj.func, *obj.args, *obj.keywords.values()]
    if kind in (dict, list, tuple, set, frozenset):
        items = obj.values() if kind is dict else obj
        return list(items) if len(obj) <= _MAX_CONTAINER else []
    return [kind, *attributes_of(obj)] if _travels_by_attributes(kind) else [kind]


def _travels_by_attributes(kind: type) -> bool:
    """Whether pickle saves every attribute of such objects; for others, pickling finds their needs."""
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__")
    return all(find_on_type(kind, name) is find_on_type(object, name) for name in hooks)


def _function_parts(function: types.FunctionType, namespace: Mapping[str, Any]) -> list[Any]:
    is_defined_here = is_notebooks(function, namespace)
    own = {} if is_defined_here else own_globals(function)
    if not (is_defined_here or own or function.__closure__ or function.__dict__):
        return []
    parts = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    parts += own.values()
    parts += function.__dict__.values()
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return parts


def attributes_of(obj: Any) -> Iterable[Any]:
    """Return the values of the attributes of an object, without its code; none if there are many."""
    attributes = own_attributes(obj)
    if type(attributes) is not dict or len(attributes) > _MAX_CONTAINER:
        return []
    return list(attributes.values())
