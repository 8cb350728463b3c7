"""Sources of the notebook's functions and classes, and whether they would make the same objects again."""

from __future__ import annotations

import abc
import ast
import dataclasses
import enum
import inspect
import textwrap
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from hydrogen_magic.core import syntax
from hydrogen_magic.core.lazy_annotations import annotations_of
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.code_names import code_objects, names_bound_by
from hydrogen_magic.serialization.pickler import is_main
from hydrogen_magic.serialization.reducers import functions_in

_READ_ALONE = (
    *(ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.Load),
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
    *(ast.List, ast.Dict, ast.Set),
)
"""Parts of expressions whose values are those of names and literals."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
_Kept: TypeAlias = tuple[str, ast.expr, Any]
"""The attribute that is assigned, if any, the expression, and the value that was kept of it."""
_BINDING = {"exec", "locals", "vars"}
"""By these, the body of a class may bind names that are not in its code."""


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
    if not isinstance(made, (*_FUNCTIONS, ast.ClassDef)):
        return
    if _is_wrapped_since(value, len(made.decorator_list), namespace):
        raise CaptureError(
            f"`{name}` cannot be saved: it was wrapped after its definition; write the wrapper as a "
            "decorator, `@…` above the definition"
        )
    for expression, then in _values_at_definition(made, value, namespace):
        try:
            code = compile(ast.Expression(expression), "<definition>", "eval")
            now = eval(code, dict(namespace))
        # A name that the notebook has deleted since.
        except Exception:
            continue
        if not _is_same_value(expression, then, now):
            raise CaptureError(
                f"`{name}` cannot be saved: `{ast.unparse(expression)}` and what `{name}` has of it "
                "differ; run the cell of its definition again"
            )
    attribute = next(_attributes_set_since(made, value, namespace), None)
    if attribute is not None:
        raise CaptureError(
            f"`{name}` cannot be saved: `{name}.{attribute}` was set after its definition; set it in the "
            "definition, and run that cell again"
        )


def _is_wrapped_since(value: Any, n_decorators: int, namespace: Mapping[str, Any]) -> bool:
    """Whether a function or class has more wrappers than its definition has given it."""
    wrappers: list[Any] = []
    inner = inspect.unwrap(value, stop=wrappers.append)  # which is called for each wrapper
    present = namespace.get(value.__name__)
    if present is value:  # its decorators may have made several
        return bool(wrappers) and not n_decorators
    return len(wrappers) > n_decorators or any(each is present for each in [*wrappers, inner][1:])


def _values_at_definition(
    made: ast.stmt, value: Any, namespace: Mapping[str, Any]
) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the expressions that a definition has evaluated, and the values that it has kept of them.

    They are defaults of arguments, and attributes of a class: literals, names, their attributes, and sums of
    them.
    """
    found: list[_Kept] = []
    bound: Counter[str] = Counter()
    is_alone = True
    if isinstance(made, ast.ClassDef):
        bound = Counter(names_bound_by(_body_code(made)))
        is_alone = _is_made_alone(made, value, namespace)
        found += _class_values(made, vars(value), bound)
        for method, kept in _methods(made, value, bound) if is_alone else ():
            found += _defaults(method, kept)
    elif isinstance(made, _FUNCTIONS):
        found += _defaults(made, value)
    for name, expression, then in found:
        nodes = list(ast.walk(expression))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        is_global = names.isdisjoint(bound.keys() - {name})
        if is_global and (names or is_alone) and all(isinstance(n, _READ_ALONE) for n in nodes):
            yield expression, then


def _class_values(
    made: ast.ClassDef, known: Mapping[str, Any], bound: Counter[str]
) -> Iterator[_Kept]:
    for each in made.body:
        match each:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as given)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as given)
            ):
                # Fields of enums, named tuples and classes with slots become other objects.
                kept = known.get(name)
                is_kept = not (isinstance(kept, enum.Enum) or hasattr(type(kept), "__get__"))
                if name in known and bound[name] == 1 and is_kept:
                    yield name, given, kept


def _defaults(made: _Function, value: Any) -> Iterator[_Kept]:
    function = inspect.unwrap(value)
    kept = getattr(function, "__defaults__", None) or ()
    for given, then in zip(
        made.args.defaults, kept, strict=False
    ):  # those of a decorator may differ
        yield "", given, then
    keywords = getattr(function, "__kwdefaults__", None) or {}
    for each, default in zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True):
        if default is not None and each.arg in keywords:
            yield "", default, keywords[each.arg]


def _methods(
    made: ast.ClassDef, cls: type, bound: Counter[str]
) -> Iterator[tuple[_Function, types.FunctionType]]:
    """Yield the methods without decorators, and the functions of the notebook that the class has of them."""
    for each in made.body:
        if isinstance(each, _FUNCTIONS) and not each.decorator_list and bound[each.name] == 1:
            kept = vars(cls).get(each.name)
            if isinstance(kept, types.FunctionType) and kept.__globals__["__name__"] == "__main__":
                yield each, kept


def _attributes_set_since(
    made: ast.stmt, value: Any, namespace: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the attributes that a function or class certainly has not of its definition.

    Private ones may be of a library, and so may those of a class that others than its statement have made.
    """
    if isinstance(made, _FUNCTIONS) and not made.decorator_list:
        yield from (name for name in vars(value) if not name.startswith("_"))
    if not isinstance(made, ast.ClassDef) or not _is_made_alone(made, value, namespace):
        return
    code = _body_code(made)
    bound = Counter(names_bound_by(code))
    for method, kept in _methods(made, value, bound):
        own = (method.name, f"{value.__qualname__}.{method.name}")
        if (kept.__code__.co_name, kept.__qualname__) != own:
            yield method.name
    if _BINDING.isdisjoint(code.co_names):
        known = {*bound, *annotations_of(value)}
        yield from (n for n, v in vars(value).items() if n not in known and _is_users(n, v))


def _is_users(name: str, value: Any) -> bool:
    """Whether an attribute of a class is neither private nor made by Python, as a slot is."""
    is_data = not hasattr(type(value), "__get__")
    return not name.startswith("_") and (is_data or any(functions_in(value)))


def _is_made_alone(made: ast.ClassDef, value: Any, namespace: Mapping[str, Any]) -> bool:
    """Whether no metaclass, base or decorator may have changed what the statement of a class has made."""
    if type(value) not in (type, abc.ABCMeta):
        return False
    hooks = [base for base in value.__mro__[1:] if "__init_subclass__" in vars(base)]
    are_pythons = {base.__module__ for base in hooks} <= {"builtins", "typing"}
    return are_pythons and all(_is_dataclass(each, namespace) for each in made.decorator_list)


def _is_dataclass(decorator: ast.expr, namespace: Mapping[str, Any]) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    match called:
        case ast.Name(id=name):
            return namespace.get(name) is dataclasses.dataclass
        case ast.Attribute(value=ast.Name(id=name), attr="dataclass"):
            return namespace.get(name) is dataclasses
    return False


def _body_code(made: ast.ClassDef) -> types.CodeType:
    with syntax.without_warnings():
        whole = compile(ast.Module([made], []), "<definition>", "exec", dont_inherit=True)
    return next(
        each
        for each in code_objects(whole)
        if each.co_name == made.name and not each.co_flags & inspect.CO_OPTIMIZED
    )


def _is_same_value(expression: ast.expr, then: Any, now: Any) -> bool:
    """Whether both are one object, or exchangeable: numbers, texts, paths, devices."""
    if then is now:
        return True
    is_literal = not any(isinstance(node, ast.Name) for node in ast.walk(expression))
    is_comparable = is_literal or is_plain(now, True) or type(now).__hash__ is not None
    if type(then) is type(now) and is_comparable:
        with suppress(Exception):
            if (then == now) is True:
                return True
    # What is not a name alone may be made at each use, as a method is.
    is_certain = is_literal or isinstance(expression, ast.Name)
    return not (is_certain or (is_plain(then, True) and is_plain(now, True)))
