"""Import statements of earlier cells: which of them a closure needs, and in which form."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydrogen_magic.capture.import_effects import only_defines
from hydrogen_magic.capture.lines import code_in, names_read_by_ranks, python_lines
from hydrogen_magic.capture.modules import local_paths
from hydrogen_magic.core import syntax
from hydrogen_magic.serialization.importable import importable_name, names_of

IMPORTED_ON_FIRST_USE = {"torch.optim": "torch._dynamo", "torch.nn.parallel": "torch._dynamo"}
"""Module -> what it imports when it is used: optimizers and ``DistributedDataParallel`` do that when they
are created, for over a second in each rank."""

_MISSING = object()

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_FRONT_ENDS = {"IPython", "ipykernel", "ipywidgets", "jupyter", "nbformat", "hydrogen_magic"}
"""Imports for the notebook itself; a rank never needs their side effects."""


@dataclass(frozen=True)
class Statement:
    """One imported name."""

    text: str
    """A statement that imports only this name."""
    name: str
    """The name that it binds; ``*`` for all names of a module."""
    module: str
    """Full name of the imported module."""
    attribute: str = ""
    """The name imported from the module, empty if the module itself is bound."""
    is_root: bool = False
    """``import a.b``: binds ``a``."""

    def gives(self, name: str, value: Any) -> bool:
        """Whether this statement, run in the kernel now, would bind ``name`` to ``value``."""
        if self.name not in (name, "*"):
            return False
        module = sys.modules.get(self.module.partition(".")[0] if self.is_root else self.module)
        if module is None:  # the import has failed, and another statement binds None
            return False
        if not self.attribute:
            return module is value
        return _attribute(module, self.attribute_of(name)) is value

    def attribute_of(self, name: str) -> str:
        """Return the attribute of the module that it binds to ``name``."""
        return name if self.name == "*" else self.attribute

    def value(self) -> Any:
        """Return what it binds to its name, None if that is not loaded."""
        if not self.attribute:
            return sys.modules.get(self.module.partition(".")[0] if self.is_root else self.module)
        submodule = sys.modules.get(f"{self.module}.{self.attribute}")
        return names_of(self.module).get(self.attribute, submodule)

    def names(self) -> Iterable[str]:
        """Return the names that it binds."""
        if self.name != "*":
            return (self.name,)
        defined = names_of(self.module)
        public = [name for name in defined if not name.startswith("_")]
        return [name for name in defined.get("__all__", public) if isinstance(name, str)]

    def of_submodule(self) -> Statement:
        """Return it as one of the submodule that it binds, ``from sklearn import svm``; else unchanged."""
        submodule = f"{self.module}.{self.attribute}"
        if not self.attribute or not _is_module(submodule):
            return self
        return replace(self, module=submodule, attribute="")


@dataclass(frozen=True)
class _Cell:
    """What is read in the source of a cell, or of code in one of its magics."""

    statements: tuple[Statement, ...]
    """At the top level."""
    futures: tuple[str, ...]
    loaded: frozenset[str]
    """Names that it reads, or that a cell for ranks reads."""
    definitions: Mapping[str, str]
    """Sources of the functions and classes at the top level."""


class Imports:
    """The import statements of a notebook's earlier cells."""

    def __init__(self, history: Iterable[str]) -> None:
        self.futures: list[str] = []
        self._statements: dict[str, Statement] = {}
        self._loaded: set[str] = set()
        self._definitions: dict[str, str] = {}
        self.sources = list(history)
        for source in self.sources:
            self._add(source)

    def _add(self, source: str) -> None:
        for found in map(_read_cell, code_in(source)):
            self.futures += found.futures
            self._loaded |= found.loaded
            self._definitions |= found.definitions
            for statement in found.statements:
                self._statements.setdefault(statement.text, statement)

    def definition(self, name: str) -> str | None:
        """Return the source of the last function or class of that name at the top level of a cell."""
        return self._definitions.get(name)

    def giving(self, name: str, value: Any) -> list[Statement]:
        """Return the statements that bind ``name`` to ``value``; none if it was rebound since."""
        found = [s for s in self._statements.values() if s.gives(name, value)]
        roots = [s for s in found if s.is_root]
        return roots if roots else found[-1:]

    def for_side_effects(
        self, used: Iterable[str], imported: Iterable[str] = ()
    ) -> list[Statement]:
        """Return imports whose names no code reads: most likely they are needed for their side effects.

        ``used``: names that the cell reads. ``imported``: modules that it imports itself. Imports that
        failed in the notebook are left out, those of modules that it removed since, names from local
        modules, which no cell has used yet, and local modules that only define names.
        """
        read, own = self._loaded.union(used), set(imported)
        return [
            s
            for s in (each.of_submodule() for each in self._statements.values())
            if read.isdisjoint(s.names())
            and s.module not in own
            and s.module in sys.modules
            and s.module.partition(".")[0] not in _FRONT_ENDS
            and not _is_unused_code(s)
        ]

    def order(self, statements: Iterable[Statement]) -> list[Statement]:
        """Return ``statements`` in the order of the notebook; unknown ones first."""
        places = {text: place for place, text in enumerate(self._statements)}
        return sorted(statements, key=lambda s: places.get(s.text, -1))


@functools.lru_cache(maxsize=4096)
def _read_cell(source: str) -> _Cell:
    """Read a cell without its magics, or the code in one of them; a notebook's cells are read once."""
    tree = syntax.parsed(source)
    nodes, top = list(ast.walk(tree)), list(_module_level(tree))
    futures = [n for n in top if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    loaded = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    calls = (node for node in nodes if isinstance(node, ast.Call))
    loaded.update(name for call in calls for name in names_read_by_ranks(call))
    return _Cell(
        tuple(statement for node in top for statement in _statements(node)),
        tuple(alias.name for node in futures for alias in node.names),
        frozenset(loaded),
        {node.name: _segment(source, node) for node in tree.body if isinstance(node, _DEFINITIONS)},
    )


def _is_unused_code(statement: Statement) -> bool:
    """Whether an import that no cell uses gives code of a local module, and has no other effect."""
    if not local_paths(statement.module.partition(".")[0]):
        return False
    return bool(statement.attribute) or only_defines(statement.module)


@functools.lru_cache(maxsize=4096)
def import_statements(source: str) -> tuple[Statement, ...]:
    """Return the import statements anywhere in ``source``: those of functions and of magics, too."""
    nodes = (node for code in code_in(source) for node in ast.walk(syntax.parsed(code)))
    return tuple(statement for node in nodes for statement in _statements(node))


def imported_names(tree: ast.AST) -> frozenset[str]:
    """Return the names that import statements at the top level bind."""
    found = (statement for node in _module_level(tree) for statement in _statements(node))
    return frozenset(statement.name for statement in found)


def _segment(source: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the source of a definition with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(python_lines(source)[first - 1 : node.end_lineno]) + "\n"


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``node`` that are not inside of functions and classes."""
    todo = [*ast.iter_child_nodes(node)][::-1]  # no recursion: an expression may have 2,900 parts
    while todo:
        child = todo.pop()
        if not isinstance(child, (*_DEFINITIONS, ast.Lambda)):
            yield child
            todo += [*ast.iter_child_nodes(child)][::-1]


def _statements(node: ast.AST) -> Iterator[Statement]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                text = f"import {alias.name} as {alias.asname}"
                yield Statement(text, alias.asname, alias.name)
            else:
                root = alias.name.partition(".")[0]
                yield Statement(f"import {alias.name}", root, alias.name, is_root=True)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if node.module == "__future__":
            return
        for alias in node.names:
            name = alias.asname or alias.name
            text = f"from {node.module} import {alias.name}"
            text += f" as {alias.asname}" if alias.asname else ""
            yield Statement(text, name, node.module, alias.name)


def _attribute(module: types.ModuleType, name: str) -> Any:
    """Return an attribute or submodule, without triggering lazy loading."""
    namespace = object.__getattribute__(module, "__dict__")
    if name in namespace:
        return namespace[name]
    submodule = sys.modules.get(f"{namespace.get('__name__')}.{name}")
    if submodule is not None:
        return submodule
    try:
        return getattr(module, name, _MISSING)
    except Exception:  # a module's __getattr__ may raise anything: then there is no attribute
        return _MISSING


def module_name(value: Any) -> str | None:
    """Return the name under which ``value`` can be imported, None if it is no such module."""
    return importable_name(value) if issubclass(type(value), types.ModuleType) else None


def used_submodules(roots: Sequence[str], attributes: Iterable[str]) -> tuple[str, ...]:
    """Return imported submodules of ``roots`` that code with these attribute names can access."""
    names = sorted(set(attributes))
    found: list[str] = []
    parents = [*roots]
    for parent in parents:
        below = [full for full in (f"{parent}.{name}" for name in names) if full in sys.modules]
        parents += below
        found += filter(_is_module, below)
    return tuple(dict.fromkeys(found))


def slow_on_first_use(roots: Iterable[str], attributes: Iterable[str]) -> Iterator[str]:
    """Yield the modules of :data:`IMPORTED_ON_FIRST_USE` that code with these imports and attributes uses.

    Whether they are imported here or not.
    """
    tops, names = {root.partition(".")[0] for root in roots}, {*attributes}
    for module in IMPORTED_ON_FIRST_USE:
        if module.partition(".")[0] in tops and module.rpartition(".")[2] in names:
            yield module


def _is_module(name: str) -> bool:
    return names_of(name).get("__spec__") is not None


def sources_of(namespace: Mapping[str, Any], imports: Imports) -> list[str]:
    """Return the notebook's earlier cells; a call has them if IPython runs it."""
    return imports.sources or input_cells(namespace)


def input_cells(namespace: Mapping[str, Any]) -> list[str]:
    """Return the texts of IPython's ``In``; none if the notebook has a variable of that name."""
    cells = namespace.get("In")
    return [cell for cell in cells if isinstance(cell, str)] if isinstance(cells, list) else []
