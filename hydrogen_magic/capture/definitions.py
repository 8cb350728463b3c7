"""Sources of the notebook's functions and classes, and whether they would make the same objects again."""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from hydrogen_magic.core import syntax
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.pickler import is_main

_READ_ALONE = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.Load),
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
)
"""Parts of expressions whose values are those of names."""


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
    """Raise CaptureError if the source would not make the same object again."""
    (made,) = syntax.parse(source).body[:1]
    if not isinstance(made, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    if inspect.getattr_static(value, "__wrapped__", None) and not made.decorator_list:
        raise CaptureError(
            f"`{name}` cannot be saved: it was wrapped after its definition; write the wrapper as a "
            "decorator, `@…` above the definition"
        )
    for expression, then in _values_at_definition(made, value):
        try:
            code = compile(ast.Expression(expression), "<definition>", "eval")
            now = eval(code, dict(namespace))
        # A name of the class, or one that the notebook has deleted since.
        except Exception:
            continue
        if not _is_same_value(expression, then, now):
            raise CaptureError(
                f"`{name}` cannot be saved: `{ast.unparse(expression)}` and what `{name}` has of it "
                "differ; run the cell of its definition again"
            )


def _values_at_definition(made: ast.stmt, value: Any) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the names that a definition has read when it was run, and the values that it has kept of them.

    They are defaults of arguments, and attributes of a class: names, their attributes, and sums of them.
    """
    pairs: list[tuple[ast.expr | None, Any]] = []
    if isinstance(made, ast.ClassDef):
        known = vars(value)
        names = (node for node in ast.walk(made) if isinstance(node, ast.Name))
        stored = Counter(node.id for node in names if isinstance(node.ctx, ast.Store))
        for each in made.body:
            match each:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=given)
                    | ast.AnnAssign(target=ast.Name(id=name), value=given)
                ):
                    # Fields of enums, named tuples and classes with slots become other objects.
                    kept = known.get(name)
                    is_kept = not (isinstance(kept, enum.Enum) or hasattr(type(kept), "__get__"))
                    if name in known and stored[name] == 1 and is_kept:
                        pairs.append((given, kept))
    elif isinstance(made, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = inspect.unwrap(value)
        kept = getattr(function, "__defaults__", None) or ()
        pairs += zip(made.args.defaults, kept, strict=False)  # those of a decorator may differ
        keywords = getattr(function, "__kwdefaults__", None) or {}
        named = zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True)
        pairs += [(default, keywords[each.arg]) for each, default in named if each.arg in keywords]
    for expression, then in pairs:
        nodes = [] if expression is None else list(ast.walk(expression))
        if any(isinstance(node, ast.Name) for node in nodes) and all(
            isinstance(node, _READ_ALONE) for node in nodes
        ):
            assert expression is not None
            yield expression, then


def _is_same_value(expression: ast.expr, then: Any, now: Any) -> bool:
    """Whether both are one object, or exchangeable: numbers, texts, paths, devices."""
    if then is now:
        return True
    if type(then) is type(now) and (is_plain(now, True) or type(now).__hash__ is not None):
        with suppress(Exception):
            if (then == now) is True:
                return True
    # What is not a name alone may be made at each use, as a method is.
    return not (isinstance(expression, ast.Name) or (is_plain(then, True) and is_plain(now, True)))
