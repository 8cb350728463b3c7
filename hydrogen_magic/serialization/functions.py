"""Functions with their variables, and modules, that a stream has by value."""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

from hydrogen_magic.core.lazy_annotations import annotations_of
from hydrogen_magic.serialization.bindings import Binding, bind


def is_empty(cell: types.CellType) -> bool:
    """Whether a variable of functions has no value."""
    try:
        cell.cell_contents  # noqa: B018  # asking is the only way to know
    except ValueError:
        return True
    return False


def with_readable_annotations(func: types.FunctionType) -> types.FunctionType:
    """Return ``func``, or a copy of it if its annotations cannot be evaluated."""
    try:
        func.__annotations__  # noqa: B018  # cloudpickle reads them
    except Exception:  # they may be any expressions
        args = func.__code__, func.__globals__, func.__name__, func.__defaults__, func.__closure__
        copied = types.FunctionType(*args)
        for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__", "__dict__"):
            setattr(copied, name, getattr(func, name))
        copied.__annotations__ = annotations_of(func)
        return copied
    return func


def restore_cell() -> types.CellType:
    """Make an empty closure cell, to be filled later."""
    return types.CellType()


def restore_code(args: tuple[Any, ...], filename: str) -> types.CodeType:
    """Make a code object of that file."""
    return types.CodeType(*args).replace(co_filename=filename)


def restore_module(name: str) -> types.ModuleType:
    """Make a module that cannot be imported."""
    module = types.ModuleType(name)
    vars(module)["__builtins__"] = builtins
    return module


def restore_module_state(module: types.ModuleType, attributes: dict[str, Any]) -> None:
    """Set the attributes of a module."""
    vars(module).update(attributes)


def restore_function(
    code: types.CodeType,
    home: str | types.ModuleType,
    closure: tuple[types.CellType, ...] | None,
    binding: Binding,
) -> types.FunctionType:
    """Make a function over the globals of module ``home``."""
    if isinstance(home, types.ModuleType):
        module = home
    else:
        module = sys.modules["__main__"] if home == "__main__" else importlib.import_module(home)
    func = types.FunctionType(code, module.__dict__, code.co_name, None, closure)
    bind(func, binding)
    return func


def restore_function_state(func: types.FunctionType, state: dict[str, Any]) -> None:
    """Set the attributes and closure cells of a function, and globals that the reader lacks."""
    for name, value in state["slots"].items():
        setattr(func, name, value)
    func.__dict__.update(state["attributes"])
    _fill(state["cells"])
    for name, value in state["globals"].items():
        func.__globals__.setdefault(name, value)


def restore_copied_function(
    func: types.FunctionType,
    state: tuple[Callable[..., Any], Any, list[tuple[types.CellType, Any]]],
) -> None:
    """Set the state of a function that has globals of its own, and closure cells."""
    set_state, attributes, cells = state
    set_state(func, attributes)
    _fill(cells)


def _fill(cells: list[tuple[types.CellType, Any]]) -> None:
    for cell, contents in cells:
        cell.cell_contents = contents
