"""Classes that ranks make by their statement; :mod:`hydrogen_magic.capture.class_statements` finds it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from hydrogen_magic.serialization.bindings import UNBOUND, Binding, bind
from hydrogen_magic.serialization.instances import ATOMS

Defaults = dict[Any, Any]
"""Default values of arguments, by position or keyword."""

BASES, METACLASS = ".bases", ".metaclass"
"""Names in the code of a class statement that no other code has."""


def restore_class_by_statement(
    code: types.CodeType,
    name: str,
    given: dict[str, Any],
    names: dict[str, Any],
    binding: Binding,
    contains_itself: list[str],
) -> Any:
    """Make a class by its statement. ``given``: its bases and metaclass. ``names``: globals that it reads.

    ``contains_itself``: not empty if one of them refers to the class, which exists by now.
    """
    if contains_itself:
        return None  # pickle drops it
    main, own = vars(sys.modules["__main__"]), dict(given)
    before = {each: main.get(each, UNBOUND) for each in names}
    main.update(names)
    try:
        exec(code, main, own)
    finally:
        main.update(before)
        for each in [each for each, value in before.items() if value is UNBOUND]:
            del main[each]
    cls = own[name]
    bind(cls, binding)
    return cls


def restore_later_state(
    cls: Any,
    state: tuple[Callable[..., Any], dict[str, Any], dict[str, Any], dict[str, list[Defaults]]],
) -> None:
    """Set what a statement has not given its class: attributes, names that its methods read, and defaults."""
    set_state, attributes, names, defaults = state
    for name, value in names.items():
        vars(sys.modules["__main__"]).setdefault(name, value)
    own = vars(cls)
    differing = {
        name: value for name, value in attributes.items() if not _is_equal(own.get(name), value)
    }
    set_state(cls, (differing, {}))
    for name, of_functions in defaults.items():
        for function, values in zip(functions_in(own.get(name)), of_functions, strict=False):
            _set_defaults(function, values)


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions in a method, class method or property."""
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, (staticmethod, classmethod)):
        parts = [value.__func__]
    yield from (each for each in parts if type(each) is types.FunctionType)


def _set_defaults(function: types.FunctionType, values: Defaults) -> None:
    positional, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    function.__defaults__ = tuple(values.get(n, one) for n, one in enumerate(positional)) or None
    keywords.update({name: values[name] for name in keywords if name in values})


def _is_equal(one: Any, other: Any) -> bool:
    """Whether both are equal values of Python's own types."""
    return type(one) is type(other) and type(one) in ATOMS and bool(one == other)
