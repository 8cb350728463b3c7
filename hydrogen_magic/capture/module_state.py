"""Values of local modules that their own functions have changed: they are listed, not sent."""

from __future__ import annotations

import ast
import functools
import reprlib
import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from hydrogen_magic.capture.imports import DEFINITIONS, module_level
from hydrogen_magic.capture.module_objects import CONTAINERS
from hydrogen_magic.capture.modules import is_main_guard
from hydrogen_magic.core import syntax
from hydrogen_magic.core.masking import is_secret_name
from hydrogen_magic.serialization.closure import ModuleSource
from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.pickler import names_of

_EMPTY: dict[str, Any] = {kind.__name__: kind() for kind in CONTAINERS}
"""What calls without items create, such as ``deque()`` and ``defaultdict(list)``."""
_DYNAMIC = {"exec", "globals", "locals", "vars"}
"""Builtins with which an import may assign any name."""


class Difference(NamedTuple):
    """A value of a loaded module that is not that of its file."""

    module: str
    name: str
    value: Any
    label: str
    """The user's text: it stays the same while the value changes, so that it is shown once."""


def differences(modules: Mapping[str, ModuleSource]) -> Iterator[Difference]:
    """Yield the public values of loaded modules that are other than what their files assign.

    A function of the module has changed them, or the file was edited after the import. Only names to which
    the file assigns a literal or an empty container, and nothing else, are compared. Names in code that
    importing these modules runs are left out, such as registries that decorators fill: ranks fill them, too.
    """
    sources = {name: modules[name].source for name in sorted(modules) if name in sys.modules}
    for home, source in sources.items():
        contents = names_of(home)
        for name, initial in _initial_values(source).items():
            value = contents.get(name, initial.value)
            if initial.may_become(value) and _differs(value, initial.value):
                used = _used_by_imports(tuple(sources.values()))
                if name not in used and used.isdisjoint(_DYNAMIC):
                    label = f"{home}.{name}"
                    if not is_secret_name(name):
                        label += f" ({_brief(initial.value)} in its file)"
                    yield Difference(home, name, value, label)


def _differs(value: Any, initial: Any) -> bool:
    """Compare a value to a literal, without calling methods of the user's objects."""
    kind = type(initial)
    if type(value) is not kind:
        return True
    if kind in (list, tuple, deque):
        return len(value) != len(initial) or any(map(_differs, value, initial))
    if issubclass(kind, dict):
        if len(value) != len(initial):  # before a large one is copied
            return True
        return any(map(_differs, chain(*value.items()), chain(*initial.items())))
    if kind is set and not {*map(type, value)} <= {*map(type, initial)}:
        return True
    return bool(value != initial)


def _brief(initial: Any) -> str:
    """Return a short text for a value that a file assigns."""
    if type(initial) in CONTAINERS and not initial:
        return "empty"
    with suppress(ValueError):  # an integer of more than 4,300 digits
        return reprlib.repr(initial)
    return f"<{type(initial).__name__}>"


# ── what a file assigns ──────────────────────────────────────────────────────────────────────────


class _Initial(NamedTuple):
    """The value that a file assigns to a name."""

    value: Any
    is_created: bool
    """By a call: ``Counter()`` may be of a class of the user's own."""

    def may_become(self, value: Any) -> bool:
        """Return whether ``value`` may have replaced it, and not a submodule or a definition of that name."""
        is_other_kind = self.is_created and type(value) is not type(self.value)
        return not is_other_kind and not issubclass(type(value), (types.ModuleType, *CODE))


@functools.lru_cache(maxsize=4096)
def _initial_values(source: str) -> dict[str, _Initial]:
    """Return the values of public names to which a module assigns a literal, and nothing else."""
    tree = syntax.parsed(source)
    bound = _bound_names(tree)
    found: dict[str, _Initial] = {}
    for node in [] if bound["*"] else tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(
                ast.Name(name), _, ast.expr() as value
            ):
                if bound[name] == 1 and not name.startswith("_"):
                    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                        found[name] = _Initial(_literal(value), isinstance(value, ast.Call))
    return found


def _bound_names(tree: ast.Module) -> Counter[str]:
    """Return how many times a module binds each of its names; methods count as well."""
    found = Counter(node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS))
    for node in module_level(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.alias):
            found[node.asname or node.name] += 1
    return found


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of a call that creates an empty container. Raises ValueError."""
    match node:
        case ast.Call(ast.Name("defaultdict") | ast.Attribute(_, "defaultdict"), [_], []):
            return _EMPTY["defaultdict"]
        case ast.Call(ast.Name(name) | ast.Attribute(ast.Name("collections"), name), [], []):
            return _EMPTY[name] if name in _EMPTY else ast.literal_eval(node)
    return ast.literal_eval(node)


# ── what an import runs ──────────────────────────────────────────────────────────────────────────

_ByCaller = dict[str, set[str]]
"""Names in functions, by the name of the function; "" has those in code that an import runs."""


@functools.lru_cache(maxsize=8)
def _used_by_imports(sources: tuple[str, ...]) -> set[str]:
    """Return the names in all code that importing these modules may run.

    A function may run if its name is in such code, and a special method if its class is.
    """
    by_caller: _ByCaller = defaultdict(set)
    for source in sources:
        for caller, names in _names_by_caller(source).items():
            by_caller[caller] |= names
    found, todo = set[str](), [""]
    while todo:
        new = by_caller.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


@functools.lru_cache(maxsize=4096)
def _names_by_caller(source: str) -> _ByCaller:
    """Return the names in the code of one module; a name that an import renames runs what it stands for."""
    found: _ByCaller = defaultdict(set)
    tree = syntax.parsed(source)
    _add_names(tree, "", "", found)
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and node.asname:
            found[node.asname].add(node.name.rpartition(".")[2])
    return found


def _add_names(node: ast.AST, caller: str, owner: str, found: _ByCaller) -> None:
    """Add the names below ``node``, which ``caller`` runs. ``owner``: the class that contains it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_special = child.name.startswith("__") and child.name.endswith("__")
            found[owner if is_special else child.name].update(*map(_names, child.body))
            found[caller].update(*map(_names, [*child.decorator_list, child.args]))
            if child.decorator_list:  # which may call it
                found[caller].add(child.name)
        elif isinstance(child, ast.ClassDef):
            outside = [*child.decorator_list, *child.bases, *child.keywords]
            found[caller].update(*map(_names, outside))
            _add_names(child, caller, child.name, found)
        elif is_main_guard(child):
            found[caller].update(*map(_names, child.orelse))
        else:
            found[caller] |= _names(child)


def _names(node: ast.AST) -> set[str]:
    """Return the names, attributes and keywords that code uses, and texts in calls, which may be names."""
    found: set[str] = set()
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Global(names=names):
                found.update(names)
            case ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Call(args=arguments):
                texts = (each.value for each in arguments if isinstance(each, ast.Constant))
                found.update(text for text in texts if isinstance(text, str))
    return found
