"""Sources of the notebook's functions and classes, and whether these would make the same objects now."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hydrogen_magic.core import syntax
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.importable import is_main

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


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
    """Raise CaptureError if it was wrapped since, or a name in its definition has another value now."""
    made = next(iter(syntax.parse(source).body), None)
    decorators = getattr(made, "decorator_list", None)
    if decorators is not None and _is_wrapped_since(value, len(decorators), namespace):
        raise CaptureError(
            f"`{name}` cannot be saved: it was wrapped after its definition; write the wrapper as a "
            "decorator, `@…` above the definition"
        )
    if changed := _changed_name(value, made, namespace):
        raise CaptureError(
            f"`{name}` cannot be saved: a default or an attribute is not the present value of `{changed}`; "
            f"run the cell that defines `{name}` again"
        )


def _is_wrapped_since(value: Any, n_decorators: int, namespace: Mapping[str, Any]) -> bool:
    """Whether a function or class has more wrappers than its definition has given it."""
    wrappers: list[Any] = []
    inner = inspect.unwrap(value, stop=wrappers.append)  # which is called for each wrapper
    present = namespace.get(value.__name__)
    if present is value:  # its decorators may have made several
        return bool(wrappers) and not n_decorators
    return len(wrappers) > n_decorators or any(each is present for each in [*wrappers, inner][1:])


def _changed_name(value: Any, made: ast.stmt | None, namespace: Mapping[str, Any]) -> str | None:
    """Return a name that was evaluated by the definition, and has another value now; None without one."""
    known = {**vars(builtins), **namespace}
    for expression, before in _evaluated(value, made):
        name = getattr(expression, "id", "")
        if name and not _is_same(known.get(name, known), before):
            return str(name)
    return None


def _evaluated(value: Any, made: ast.stmt | None) -> Iterable[tuple[ast.expr, Any]]:
    """Return expressions that were evaluated by the definition, and their values."""
    return _attributes(value, made) if isinstance(made, ast.ClassDef) else _defaults(value, made)


def _attributes(cls: Any, made: ast.ClassDef) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the expressions of a class's attributes or fields, and the values that these have."""
    values = {
        name: each.default for name, each in vars(cls).get("__dataclass_fields__", {}).items()
    }
    is_dataclass = bool(values)
    if type(cls) is type and not made.decorator_list:  # else they may be anything
        values = dict(vars(cls))
    # A name of the class itself, as in `b = a`, is none of the notebook; `a = a` is.
    own, bound = vars(cls).keys(), Counter(_bound_in(made))
    for each in made.body:
        match each:
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as expression):
                pass
            case ast.Assign(targets=[ast.Name(name)], value=expression) if not is_dataclass:
                pass
            case _:
                continue
        is_certain = name in values and bound[name] == 1 and not name.startswith("__")
        if is_certain and getattr(expression, "id", name) not in own - {name}:
            yield expression, values[name]


def _bound_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that a class body assigns, each as often as it does."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
            yield child.id
        elif not isinstance(child, _FUNCTIONS | ast.ClassDef | ast.Lambda):
            yield from _bound_in(child)


def _defaults(value: Any, made: ast.stmt | None) -> Iterable[tuple[ast.expr, Any]]:
    """Return the defaults of a function, and their values."""
    function = inspect.unwrap(value)
    if not isinstance(made, _FUNCTIONS) or not isinstance(function, types.FunctionType):
        return ()
    defaults = [*made.args.defaults, *filter(None, made.args.kw_defaults)]
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    # Otherwise the definition is that of a wrapper.
    is_its_own = function.__name__ == made.name and len(defaults) == len(values)
    return zip(defaults, values, strict=True) if is_its_own else ()


def _is_same(now: Any, default: Any) -> bool:
    return now is default or (is_plain(now) and is_plain(default) and bool(now == default))
