"""Whether the import of a local module only defines names, or has other effects."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydrogen_magic.capture.modules import (
    find_without_importing,
    imported_modules,
    local_paths,
)
from hydrogen_magic.core import syntax

_WITHOUT_EFFECT = {
    "abc": "abstractmethod",
    "builtins": "bool bytes classmethod complex dict float frozenset int len list max min object "
    "property range round set slice staticmethod str sum tuple",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "contextlib": "asynccontextmanager contextmanager",
    "dataclasses": "dataclass field",
    "enum": "auto unique",
    "functools": "cache cached_property lru_cache partial total_ordering wraps",
    "logging": "getLogger",
    "os": "getenv",
    "pathlib": "Path PurePath",
    "re": "compile",
    "torch": "device inference_mode no_grad",
    "typing": "NewType ParamSpec TypeVar final overload runtime_checkable",
}
"""Module -> functions and classes that modules call at their top level without effects on anything else."""
_ACCESSORS = {"getter", "setter", "deleter"}


def only_defines(module: str) -> bool:
    """Whether the import of a local module has no effect but the names that it defines.

    The top level of its files, and of the local modules that it imports, has only constants, functions and
    classes. Classes may have bases that do not observe their subclasses; decorators and calls are limited to
    :data:`_WITHOUT_EFFECT`. Effects of installed modules do not count.
    """
    todo, seen = [module], set()
    while todo:
        name = todo.pop()
        if name in seen or not local_paths(name.partition(".")[0]):
            continue
        seen.add(name)
        spec = find_without_importing(name)
        if spec is None or spec.origin is None:
            continue  # not a module, or one without a file
        try:
            version = os.stat(spec.origin).st_mtime_ns
            imported = _imported_by_definitions(name, spec.origin, version)
        except (OSError, SyntaxError, ValueError):
            return False
        if imported is None:
            return False
        todo += [*imported, *filter(None, [name.rpartition(".")[0]])]
    return True


@functools.lru_cache(maxsize=1024)
def _imported_by_definitions(name: str, path: str, version: int) -> tuple[str, ...] | None:
    """Return what a module imports, None if its import does more. ``version``: of its file."""
    with tokenize.open(path) as file:
        tree = syntax.parse(file.read())
    if not all(map(_Definitions(name).contain, tree.body)):
        return None
    is_package = Path(path).name == "__init__.py"
    return tuple(imported_modules(tree, name if is_package else name.rpartition(".")[0]))


class _Definitions:
    """Recognizes the statements of a loaded module that only bind its names."""

    def __init__(self, module: str) -> None:
        loaded = sys.modules.get(module)
        self._module = module
        self._names: Mapping[str, Any] = (
            object.__getattribute__(loaded, "__dict__") if loaded is not None else {}
        )

    def contain(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Pass():
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return self._are_harmless(statement.decorator_list) and self._calls(statement.args)
            case ast.ClassDef():
                is_plain = not statement.bases and not statement.keywords
                if not is_plain and _observes_definition(self._defined(statement)):
                    return False
                decorators_fit = self._are_harmless(statement.decorator_list)
                return decorators_fit and all(map(self.contain, statement.body))
            case ast.Assign(targets=targets):
                return not _has_owner(targets) and self._calls(statement)
            case ast.AnnAssign(target=ast.Name()):
                return self._calls(statement)
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                return all(map(self.contain, statement.orelse))
            case ast.If():
                inner = [*statement.body, *statement.orelse]
                return self._calls(statement.test) and all(map(self.contain, inner))
            case ast.Try():
                handled = (part for handler in statement.handlers for part in handler.body)
                inner = [*statement.body, *handled, *statement.orelse, *statement.finalbody]
                return all(map(self.contain, inner))
        return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)

    def _calls(self, node: ast.AST) -> bool:
        """Whether all calls in ``node`` are without effects."""
        calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
        return all(self._is_harmless(call.func) for call in calls)

    def _are_harmless(self, decorators: list[ast.expr]) -> bool:
        return all(
            self._calls(each) if isinstance(each, ast.Call) else self._is_harmless(each)
            for each in decorators
        )

    def _is_harmless(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute) and function.attr in _ACCESSORS:
            return isinstance(function.value, ast.Name)  # ``@size.setter`` of a property
        found = self._object(function)
        return any(found is known for known in _without_effect())

    def _object(self, node: ast.expr) -> Any:
        """Return what a dotted name refers to, None if that is unknown."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, vars(builtins).get(node.id))
        if isinstance(node, ast.Attribute):
            return inspect.getattr_static(self._object(node.value), node.attr, None)
        return None

    def _defined(self, statement: ast.ClassDef) -> Any:
        """Return the class that a statement at the top level of the module has defined."""
        found = self._names.get(statement.name)
        is_same = isinstance(found, type) and found.__module__ == self._module
        return found if is_same else None


def _has_owner(targets: list[ast.expr]) -> bool:
    """Whether something is assigned to an attribute or an item."""
    parts = (part for target in targets for part in ast.walk(target))
    return any(isinstance(part, (ast.Attribute, ast.Subscript)) for part in parts)


def _without_effect() -> Iterator[Any]:
    for module, names in _WITHOUT_EFFECT.items():
        loaded = sys.modules.get(module)
        yield from (getattr(loaded, name) for name in names.split() if hasattr(loaded, name))


def _observes_definition(found: Any) -> bool:
    """Whether a base or metaclass of a class may run code of libraries or users when it is defined."""
    if found is None:
        return True
    hooks = (base for base in found.__mro__[1:] if "__init_subclass__" in vars(base))
    return not {_root(type(found)), _root(next(hooks, object))} <= {*sys.stdlib_module_names}


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]
