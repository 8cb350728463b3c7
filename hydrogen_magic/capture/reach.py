"""Finds the global names that notebook functions and classes read, without calling any code."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.capture.scopes import QUERIES, variables_in_query
from hydrogen_magic.serialization.pickler import global_names, is_main

__all__ = ["GlobalRead", "code_objects", "imported_names", "reads_of", "stored_names"]

_MAX_OBJECTS = 5000
"""A longer search would be slower than pickling, which finds the rest."""
_MAX_CONTAINER = 200
"""Number of items of a list or dict that are searched: data sets contain no functions."""


@dataclass(frozen=True)
class GlobalRead:
    """A global name that a notebook function reads."""

    name: str
    function: str
    """Display name: ``normalize()``, ``Net.forward()``."""
    code: types.CodeType
    guarded: bool
    """The function mentions NameError: it handles undefined names."""

    @property
    def filename(self) -> str:
        return self.code.co_filename

    @property
    def line(self) -> int:
        """Line of the first read in the function's file."""
        return _line_of(self.code, self.name) or self.code.co_firstlineno


def reads_of(value: Any) -> Iterator[GlobalRead]:
    """Yield the names read by notebook functions that ``value`` is or contains."""
    for function in _functions_in(value):
        code = function.__code__
        guarded = "NameError" in code.co_names
        label = f"{function.__qualname__.replace('<locals>.', '')}()"
        for name in global_names(code):
            yield GlobalRead(name, label, code, guarded)
        for name in _names_in_queries(code):
            yield GlobalRead(name, label, code, guarded=True)


def _names_in_queries(code: types.CodeType) -> Iterator[str]:
    for own in code_objects(code):
        if not QUERIES.isdisjoint(own.co_names):
            for constant in own.co_consts:
                yield from set(variables_in_query(constant)).difference(own.co_varnames)


def stored_names(value: Any) -> Iterator[str]:
    """Yield the global names that those functions assign."""
    for function in _functions_in(value):
        yield from _operands(function.__code__, "STORE_GLOBAL")


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    seen: dict[int, Any] = {}
    todo = [value]
    while todo and len(seen) < _MAX_OBJECTS:
        obj = todo.pop()
        if id(obj) in seen or issubclass(type(obj), _LEAVES):
            continue
        seen[id(obj)] = obj  # kept alive, so that no id is reused
        if type(obj) is types.FunctionType and obj.__globals__.get("__name__") == "__main__":
            yield obj
        todo.extend(_parts(obj))


_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), types.ModuleType)


def _parts(obj: Any) -> Iterable[Any]:
    """Return objects that may lead from ``obj`` to notebook functions."""
    kind = type(obj)
    if kind is types.FunctionType:
        return _function_parts(obj)
    if issubclass(kind, type):
        return [*vars(obj).values(), *obj.__bases__, kind] if is_main(obj) else []
    if kind in (staticmethod, classmethod, types.MethodType):
        return [obj.__func__, getattr(obj, "__self__", None)]
    if kind is property:
        return [obj.fget, obj.fset, obj.fdel]
    if kind is functools.partial:
        return [obj.func, *obj.args, *obj.keywords.values()]
    if kind in (dict, list, tuple, set, frozenset):
        items = obj.values() if kind is dict else obj
        return list(items) if len(obj) <= _MAX_CONTAINER else []
    return [kind, *_attributes(obj)] if _travels_by_attributes(kind) else [kind]


def _travels_by_attributes(kind: type) -> bool:
    """Whether pickle saves every attribute of such objects; for others, pickling finds their needs."""
    hooks = ("__reduce__", "__reduce_ex__", "__getstate__")
    return all(getattr(kind, name, None) is getattr(object, name, None) for name in hooks)


def _function_parts(function: types.FunctionType) -> list[Any]:
    if function.__globals__.get("__name__") != "__main__" and not (
        function.__closure__ or function.__dict__
    ):
        return []
    parts = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    parts += function.__dict__.values()
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    return parts


def _attributes(obj: Any) -> Iterable[Any]:
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return []
    if type(attributes) is not dict or len(attributes) > _MAX_CONTAINER:
        return []
    return list(attributes.values())


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield ``code`` and the code of every function inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


def imported_names(code: types.CodeType) -> Iterator[str]:
    """Yield the full names of modules that ``code`` imports when it runs."""
    return filter(None, _operands(code, "IMPORT_NAME"))


def _operands(code: types.CodeType, operation: str) -> Iterator[str]:
    for own in code_objects(code):
        for instruction in dis.get_instructions(own):
            if instruction.opname == operation:
                yield str(instruction.argval or "")


def _line_of(code: types.CodeType, name: str) -> int | None:
    offsets = [
        i.offset
        for i in dis.get_instructions(code)
        if i.opname.startswith("LOAD_") and i.argval == name
    ]
    if offsets:
        for start, end, line in code.co_lines():
            if start <= offsets[0] < end:
                return line
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return next((line for line in (_line_of(c, name) for c in inner) if line), None)
