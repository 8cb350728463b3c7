"""Whether the import of a local module only defines names, or has other effects."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydrogen_magic.capture.modules import imported_modules, is_main_guard, local_paths
from hydrogen_magic.core import syntax
from hydrogen_magic.serialization.importable import names_of

_WITHOUT_EFFECT = {
    "abc": "abstractmethod",
    "builtins": "bool bytes classmethod complex dict float frozenset int len list object "
    "enumerate property range round set slice staticmethod str sum tuple zip",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "contextlib": "asynccontextmanager contextmanager",
    "dataclasses": "dataclass field",
    "enum": "auto unique",
    "functools": "cache cached_property lru_cache singledispatch total_ordering wraps",
    "logging": "getLogger",
    "os": "cpu_count getcwd getenv",
    "os.path": "abspath basename dirname exists expanduser isdir isfile join realpath splitext",
    "pathlib": "Path PurePath",
    "re": "compile",
    "torch": "device inference_mode no_grad",
    "torch.cuda": "device_count is_available",
    "typing": "NewType ParamSpec TypeVar final overload runtime_checkable",
}
"""Module -> functions and classes that modules call at their top level without effects on anything else."""
TRUSTED = {*sys.stdlib_module_names, "pydantic", "sklearn", "torch"}
"""Packages whose bases and metaclasses change nothing but the class that is defined."""
_HOOKS = {"__init_subclass__", "__pydantic_init_subclass__"}
"""Methods of a base that are called when a class is derived from it."""
_ACCESSORS = {"getter", "setter", "deleter"}
"""Decorators that a property has."""
_METHODS = {"absolute", "expanduser", "format", "join", "resolve", "split"}
"""Methods of texts and paths without effects, as in ``"a b".split()`` and ``Path(__file__).resolve()``."""


def only_defines(module: str) -> bool:
    """Whether the import of a local module has no effect but the names that it defines.

    The top level of its files, and of the local modules that it imports, has only constants, functions and
    classes. Bases that observe their subclasses are those of :data:`TRUSTED`; decorators and calls are those
    of :data:`_WITHOUT_EFFECT`. Effects of installed modules do not count.
    """
    is_local = functools.cache(local_paths)
    todo, seen = [module], set[str]()
    while todo:
        name = todo.pop()
        if name in seen or sys.modules.get(name) is None or not is_local(name.partition(".")[0]):
            continue  # what the kernel's own import has not loaded, a rank's does not load either
        seen.add(name)
        spec = names_of(name).get("__spec__")
        if spec is None:
            return False  # another object has the module's place
        if spec.origin is None:
            continue  # a package without a file
        try:
            version = os.stat(spec.origin).st_mtime_ns
            imported = _imported_by_definitions(name, spec.origin, version)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
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
    if not all(map(_LoadedModule(name).only_binds, tree.body)):
        return None
    is_package = Path(path).name == "__init__.py"
    return tuple(imported_modules(tree, name if is_package else name.rpartition(".")[0]))


class _LoadedModule:
    """Recognizes statements at the top level of a loaded module that only bind names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._contents = names_of(name)

    def only_binds(self, statement: ast.stmt) -> bool:
        """Return whether the statement has no effect on anything but the module's own names."""
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(ast.Constant()):
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                decorators, arguments = statement.decorator_list, statement.args
                return self._may_decorate(decorators) and self._calls_harmless(arguments)
            case ast.ClassDef(decorator_list=decorators, body=body):
                if any(map(_is_derived, body)):
                    return False  # a class in a class has no name by which it is found here
                is_harmless = not _is_derived(statement) or self._has_harmless_bases(statement)
                return is_harmless and self._may_decorate(decorators) and self._all_bind(body)
            case ast.Assign(targets=targets):
                return not _sets_attribute_or_item(targets) and self._calls_harmless(statement)
            case ast.AnnAssign(target=ast.Name()):
                return self._calls_harmless(statement)
            case ast.If() if is_main_guard(statement):
                return self._all_bind(statement.orelse)
            case ast.If(test=test, body=body, orelse=other):
                return self._calls_harmless(test) and self._all_bind([*body, *other])
            case ast.Try(body, handlers, other, final):
                handled = (each for handler in handlers for each in handler.body)
                return self._all_bind([*body, *handled, *other, *final])
        return False

    def _all_bind(self, statements: Iterable[ast.stmt]) -> bool:
        return all(map(self.only_binds, statements))

    def _may_decorate(self, decorators: Iterable[ast.expr]) -> bool:
        return all(map(self._is_harmless_decorator, decorators))

    def _is_harmless_decorator(self, decorator: ast.expr) -> bool:
        match decorator:
            case ast.Attribute(ast.Name(), attribute) if attribute in _ACCESSORS:
                return True
            case ast.Name() | ast.Attribute():
                return self._is_known(decorator)
        return self._calls_harmless(decorator)

    def _calls_harmless(self, node: ast.AST) -> bool:
        """Return whether ``node`` calls nothing else than harmless functions."""
        return all(self._is_harmless(call.func) for call in _calls_in(node))

    def _is_harmless(self, function: ast.expr) -> bool:
        match function:
            case ast.Attribute(ast.Constant() | ast.Call(), attribute) if attribute in _METHODS:
                return True
        return self._is_known(function)

    def _is_known(self, function: ast.expr) -> bool:
        found = self._referent(function)
        return any(found is known for known in _without_effect())

    def _referent(self, node: ast.expr) -> Any:
        """Return what a dotted name refers to, None if that is unknown."""
        if isinstance(node, ast.Name):
            return self._contents.get(node.id, vars(builtins).get(node.id))
        if isinstance(node, ast.Attribute):
            return inspect.getattr_static(self._referent(node.value), node.attr, None)
        return None

    def _has_harmless_bases(self, statement: ast.ClassDef) -> bool:
        """Return whether no base or metaclass of a class runs code of others than :data:`TRUSTED`."""
        found: Any = self._contents.get(statement.name)
        if not issubclass(type(found), type) or found.__module__ != self._name:
            return False
        hooks = [base for base in found.__mro__[1:] if not _HOOKS.isdisjoint(vars(base))]
        packages = {str(each.__module__).partition(".")[0] for each in (type(found), *hooks)}
        given = [*statement.bases, *statement.keywords]
        return packages <= TRUSTED and all(map(self._calls_harmless, given))


def _is_derived(statement: ast.stmt) -> bool:
    """Whether it defines a class with bases or a metaclass."""
    return isinstance(statement, ast.ClassDef) and bool(statement.bases or statement.keywords)


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that ``node`` makes; the body of a lambda function runs later."""
    todo = [node]
    while todo:
        each = todo.pop()
        if isinstance(each, ast.Call):
            yield each
        todo += [each.args] if isinstance(each, ast.Lambda) else ast.iter_child_nodes(each)


def _sets_attribute_or_item(targets: Iterable[ast.expr]) -> bool:
    parts = (part for target in targets for part in ast.walk(target))
    return any(isinstance(part, (ast.Attribute, ast.Subscript)) for part in parts)


def _without_effect() -> Iterator[Any]:
    for module, names in _WITHOUT_EFFECT.items():
        loaded = sys.modules.get(module)
        yield from (getattr(loaded, name) for name in names.split() if hasattr(loaded, name))
