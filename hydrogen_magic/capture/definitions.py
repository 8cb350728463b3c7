"""Sources of the notebook's functions and classes, and whether these were wrapped since."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.core import syntax
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization.pickler import is_main


def has_source(value: Any) -> bool:
    """Whether ``value`` is a notebook function or class with its own name."""
    is_definition = issubclass(type(value), (types.FunctionType, type))
    if not (is_definition or inspect.getattr_static(value, "__wrapped__", None)):
        return False
    return is_main(value) and "<locals>" not in value.__qualname__


def source_of(value: Any) -> str | None:
    """Return the source of a function or class; None if it is not available, or no Python by itself."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
        syntax.parse(source)
    except (OSError, TypeError, SyntaxError):
        return None
    return source


def is_lambda_elsewhere(name: str, value: Any) -> bool:
    """Whether it is a lambda whose source is not that of an assignment to ``name``."""
    if getattr(value, "__name__", "") != "<lambda>":
        return False
    match syntax.parse(source_of(value) or "pass").body:
        case [ast.Assign(targets=targets, value=ast.Lambda()), *_]:
            return name not in [each.id for each in targets if isinstance(each, ast.Name)]
        case [ast.AnnAssign(target=ast.Name(id=target), value=ast.Lambda()), *_]:
            return bool(name != target)
    return True


def check_definition(name: str, value: Any, source: str, namespace: Mapping[str, Any]) -> None:
    """Raise CaptureError if a function or class was wrapped after its definition."""
    made = next(iter(syntax.parse(source).body), None)
    decorators = getattr(made, "decorator_list", None)
    if decorators is not None and _is_wrapped_since(value, len(decorators), namespace):
        raise CaptureError(
            f"`{name}` cannot be saved: it was wrapped after its definition; write the wrapper as a "
            "decorator, `@…` above the definition"
        )


def _is_wrapped_since(value: Any, n_decorators: int, namespace: Mapping[str, Any]) -> bool:
    """Whether a function or class has more wrappers than its definition has given it."""
    wrappers: list[Any] = []
    inner = inspect.unwrap(value, stop=wrappers.append)  # which is called for each wrapper
    present = namespace.get(value.__name__)
    if present is value:  # its decorators may have made several
        return bool(wrappers) and not n_decorators
    return len(wrappers) > n_decorators or any(each is present for each in [*wrappers, inner][1:])
