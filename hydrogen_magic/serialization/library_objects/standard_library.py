"""Objects of Python's standard library: exceptions, parsers of arguments, caches, parts of types."""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Set
from typing import Any

from hydrogen_magic.serialization.instances import (
    Reduced,
    find_on_type,
    is_reduced_as,
    restore_object,
)
from hydrogen_magic.serialization.library_objects.handlers import Handler, Handlers

_CONSTANTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (sys, ("version_info", "flags", "float_info", "int_info", "hash_info", "thread_info")),
    (dataclasses, ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")),
)
_OF_CONSTANTS: dict[type, Handler] = {
    type(getattr(module, name)): lambda obj, module=module, name=name: (getattr, (module, name))  # type: ignore[misc]  # defaults
    for module, names in _CONSTANTS
    for name in names
    if type(getattr(module, name)).__module__ != "builtins"  # a sentinel of Python 3.15
}
"""Reduces the only objects of their classes: the classes of ``sys`` have no name to be found by, and the
constants of ``dataclasses`` are compared by identity."""


def _reduce_exception(error: Any) -> Any:
    """Reduce an exception without a call of its class, whose ``__init__`` may take other arguments."""
    kind = type(error)
    own = find_on_type(kind, "__reduce__"), find_on_type(kind, "__reduce_ex__")
    is_default = not any(isinstance(one, types.FunctionType) for one in own)
    if not (is_default and isinstance(find_on_type(kind, "__init__"), types.FunctionType)):
        return NotImplemented
    reduced = error.__reduce__()
    return (restore_exception, (kind, *reduced[1]), *reduced[2:])


def restore_exception(kind: type[BaseException], *args: Any) -> BaseException:
    """Make an exception with the arguments that Python keeps; the state has its other attributes."""
    error = kind.__new__(kind, *args)
    initial = (vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base))
    next(one for one in initial if not isinstance(one, types.FunctionType))(error, *args)
    return error


def _reduce_of_parser(obj: Any) -> Any:
    """Reduce a parser of arguments, or one of its actions."""
    kind = type(obj)
    if not is_reduced_as(object, kind):
        return NotImplemented
    suppress = Reduced((getattr, (argparse, "SUPPRESS")))  # parsers compare it by identity
    state = {
        name: suppress if value is argparse.SUPPRESS else value for name, value in vars(obj).items()
    }
    return restore_object, (kind,), state


CachedFunction = type(functools.lru_cache(len))
_SET_BY_CACHE = {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters"}
_SET_BY_DISPATCH = {"__wrapped__", "_clear_cache", "dispatch", "register", "registry"}


def _attributes_except(obj: Any, names: Set[str]) -> dict[str, Any] | None:
    return {name: value for name, value in vars(obj).items() if name not in names} or None


def _reduce_cached_property(obj: Any) -> Any:
    # Before Python 3.12 it contains a lock.
    return restore_cached_property, (obj.func, obj.attrname)


def restore_cached_property(func: Any, name: str | None) -> Any:
    """Make a ``cached_property`` with its name."""
    restored: Any = functools.cached_property(func)
    restored.attrname = name
    return restored


def reduce_cached_function(obj: Any) -> Any:
    """Reduce a function of ``functools.lru_cache`` without what is in its cache."""
    args = obj.__wrapped__, obj.cache_parameters()
    return restore_cached_function, args, _attributes_except(obj, _SET_BY_CACHE)


def restore_cached_function(function: Any, parameters: dict[str, Any]) -> Any:
    """Make a function of ``functools.lru_cache`` with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def reduce_single_dispatch(func: Any) -> Any:
    """Reduce a function of ``functools.singledispatch``.

    Its variables hold weak references, which cannot be pickled.
    """
    registry = dict(func.registry)
    return (
        functools.singledispatch,
        (registry[object],),
        (registry, _attributes_except(func, _SET_BY_DISPATCH)),
        None,
        None,
        restore_registry,
    )


def restore_registry(function: Any, state: tuple[dict[type, Any], dict[str, Any] | None]) -> None:
    """Give a function of ``functools.singledispatch`` its other implementations and attributes."""
    registry, attributes = state
    for kind, implementation in registry.items():
        function.register(kind, implementation)
    vars(function).update(attributes or {})


def _reduce_part(part: Any) -> Any:
    """Reduce the ``args`` or ``kwargs`` of a ParamSpec: since Python 3.12 pickle refuses them."""
    return type(part), (part.__origin__,)


PICKLED_BY_NAME: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    getattr(typing, kind): parameters
    for kind, parameters in {
        "NewType": (("name", "supertype"), ()),
        "ParamSpec": (("name",), ("bound", "covariant", "contravariant")),
        "TypeVarTuple": (("name",), ()),  # since Python 3.11
        "TypeAliasType": (("name", "value"), ("type_params",)),  # since Python 3.12
    }.items()
    if hasattr(typing, kind)
}
"""Classes whose objects are pickled by name -> attributes that are their arguments, without and with keyword.

cloudpickle has the same for ``TypeVar`` alone.
"""
if sys.version_info >= (3, 15):
    PICKLED_BY_NAME[vars(builtins)["sentinel"]] = ("name",), ()


def arguments_of(obj: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that make such an object."""
    names, keywords = PICKLED_BY_NAME[type(obj)]
    args = tuple(getattr(obj, f"__{each}__") for each in names)
    return args, {each: getattr(obj, f"__{each}__") for each in keywords}


OF_CLASSES: dict[type, Handler] = {
    functools.cached_property: _reduce_cached_property,
    typing.ParamSpecArgs: _reduce_part,
    typing.ParamSpecKwargs: _reduce_part,
    **_OF_CONSTANTS,
}
"""What reduces objects of these very classes, not those of subclasses."""
HANDLERS: Handlers = (
    ("argparse", "Action", _reduce_of_parser),
    ("argparse", "_ActionsContainer", _reduce_of_parser),
    ("builtins", "BaseException", _reduce_exception),
    ("struct", "Struct", lambda form: (type(form), (form.format,))),
)
