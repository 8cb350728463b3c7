"""The names that a cell uses from the notebook, and those that it assigns.

Order matters: a cell that assigns ``model`` before it reads it does not need the notebook's ``model``,
which may be large, stale, or unpicklable.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hydrogen_magic.capture.lines import assigning_code, binds_unknown_names, names_in_magic
from hydrogen_magic.capture.modules import imported_by
from hydrogen_magic.core import syntax
from hydrogen_magic.serialization.code_names import (
    DefiniteAssignment,
    GlobalRead,
    code_objects,
    global_loads,
    names_bound_by,
    read_below_stores,
)

_CATCHES_NAME_ERROR = {"NameError", "Exception", "BaseException"}
_BINDS_UNKNOWN_NAMES = {"exec", "globals", "locals"}
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class ScopeAnalysis:
    """A cell's use of global names."""

    reads: tuple[GlobalRead, ...]
    """By line."""
    possible_reads: tuple[GlobalRead, ...]
    """Others, that happen only if unknown code calls a function at once, suppresses an exception, or
    evaluates a text."""
    unsure: frozenset[str]
    """Names that the cell reads only below an assignment: the notebook's value is read if that is not
    reached, as in a loop over nothing."""
    guarded: frozenset[tuple[int, str]]
    """Lines and names of reads that may lack the name: a NameError is caught there, or the cell only defines
    the function."""
    assigned: frozenset[str]
    """Every name that the cell may assign."""
    has_unknown_names: bool
    """It may assign names that its code does not show: by ``import *``, ``exec`` or ``%run``."""
    modules: tuple[str, ...]
    """Full names of the modules that it imports itself."""
    attributes: frozenset[str]
    """Every name in the cell's code, attributes included."""


def analyse(
    tree: ast.Module,
    code: types.CodeType,
    called: Callable[[str], Iterable[str]] = lambda name: (),
) -> ScopeAnalysis:
    """Return the names that a cell uses from the notebook. ``tree``, ``code``: the cell, compiled.

    ``called(name)``: global names that the notebook's object ``name`` reads when it is used.
    """
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    magics = {node.lineno: words for node in calls if (words := names_in_magic(node))}
    reads, possible = (
        DefiniteAssignment(is_cautious=is_cautious, called=called, magics=magics)
        for is_cautious in (False, True)
    )
    reads.run(code, used=_used_by_others(nodes))
    possible.run(code)
    used = {(read.line, read.name) for read in reads.reads[: reads.n_used]}
    only_defined = {(read.line, read.name) for read in reads.reads[reads.n_used :]} - used
    guarded_lines = {*_guarded_lines(nodes)}
    caught = {(read.line, read.name) for read in reads.reads if read.line in guarded_lines}
    certain = [read for read in reads.reads if not read.is_text]
    own_lines = {(line, name) for name, line in global_loads(code)}
    elsewhere = {read.name for read in certain if (read.line, read.name) not in own_lines}
    names = frozenset(name for inner in code_objects(code) for name in inner.co_names)
    return ScopeAnalysis(
        tuple(sorted(certain, key=lambda read: read.line)),
        tuple(_uncovered(possible.reads, certain)),
        read_below_stores(code) - elsewhere,
        frozenset(caught | only_defined),
        frozenset(_assigned_by(code, calls)),
        not _BINDS_UNKNOWN_NAMES.isdisjoint(names)
        or _imports_star(nodes)
        or any(map(binds_unknown_names, calls)),
        tuple(imported_by(nodes)),
        names,
    )


def _used_by_others(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the functions that the cell defines for others: ``predict``, and what decorators get."""
    yield "predict"
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from [node.name] if node.decorator_list else []


def _uncovered(possible: Sequence[GlobalRead], reads: Sequence[GlobalRead]) -> Iterator[GlobalRead]:
    """Yield the reads that happen with fewer assigned names than those of the same name in ``reads``."""
    known: dict[str, list[frozenset[str]]] = {}
    for read in reads:
        known.setdefault(read.name, []).append(read.assigned)
    for read in possible:
        if not any(assigned <= read.assigned for assigned in known.get(read.name, ())):
            yield read


def assigned_in(sources: Iterable[str]) -> Iterator[str]:
    """Yield the global names that cells assign, also in ``%time x = f()`` or a ``%%time`` cell."""
    for source in sources:
        try:
            tree = syntax.parse(source.strip(), flags=_FLAGS)
            with syntax.without_warnings():
                code = compile(tree, "<cell>", "exec", _FLAGS, dont_inherit=True)
        except (SyntaxError, ValueError):  # such a cell has not run
            continue
        yield from _assigned_by(code, ast.walk(tree))


def _assigned_by(code: types.CodeType, nodes: Iterable[ast.AST]) -> Iterator[str]:
    yield from names_bound_by(code)
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from assigned_in(assigning_code(node))


def reads_in_source(source: str, *, at_end: bool = True) -> list[str]:
    """Return the names that ``source``, definitions of the notebook, reads.

    ``at_end``: including the functions that it defines and does not call.
    """
    reads = DefiniteAssignment()
    with syntax.without_warnings():
        code = compile(source, "<definition>", "exec", dont_inherit=True)
    reads.run(code, at_end)
    return [read.name for read in reads.reads]


def _imports_star(nodes: Iterable[ast.AST]) -> bool:
    imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
    return any(alias.name == "*" for node in imports for alias in node.names)


def _guarded_lines(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines inside ``try`` that catch NameError, and those of functions called there."""
    functions: dict[str, list[ast.AST]] = {}
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            functions.setdefault(node.name, []).append(node)
    todo = [
        statement
        for node in nodes
        if isinstance(node, _TRY) and _catches_name_error(node)
        for statement in node.body
    ]
    while todo:
        guarded = todo.pop()
        yield from range(guarded.lineno, (guarded.end_lineno or guarded.lineno) + 1)
        for node in ast.walk(guarded):
            todo += functions.pop(node.id, []) if isinstance(node, ast.Name) else []


_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))


def _catches_name_error(node: ast.Try) -> bool:
    for handler in node.handlers:
        if handler.type is None:
            return True
        names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
        if names & _CATCHES_NAME_ERROR:
            return True
    return False
