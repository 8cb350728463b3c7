"""Traces the order in which a cell reads and binds names, statement by statement."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.capture.lines import assigned_in_magic, names_in_magic
from hydrogen_magic.capture.scopes import (
    COMPREHENSIONS,
    Reads,
    Scope,
    at_definition,
    bindings,
    collect,
    free_reads,
    names_in_query,
    walrus_bindings,
)

__all__ = ["Flow", "Inner", "UnboundUse"]

_CATCHES_NAME_ERROR = {"NameError", "Exception", "BaseException"}


@dataclass(frozen=True)
class UnboundUse:
    """A name that may be read before the cell has bound it."""

    name: str
    line: int
    """Line in the analysed source, from 1."""
    bound: frozenset[str]
    """Names that the cell has definitely bound by then."""
    guarded: bool = False
    """A NameError would be caught there."""
    optional: bool = False
    """Only relevant if the notebook has it: a word in a ``!`` or ``%`` line."""


Inner = Callable[[str], Iterable[str]]
"""Returns the global names that a notebook function or class reads when it is used."""


class Flow(ast.NodeVisitor):
    """Visits a cell's statements in the order of execution."""

    def __init__(self, postponed: bool, inner: Inner) -> None:
        self.postponed = postponed
        self.inner = inner
        self.uses: list[UnboundUse] = []
        self.assigned: set[str] = set()
        self.has_star = False
        self.bound: set[str] | None = set()
        """Names definitely bound here; None in unreachable code."""
        self.deferred: dict[str, Reads] = {}
        self.guarded = False
        self.seen: dict[str, frozenset[str]] = {}
        self.entered: dict[str, frozenset[str]] = {}

    def finish(self) -> None:
        """Read the bodies of functions that are defined but not used."""
        if self.bound is None:
            self.bound = set()
        for name in list(self.deferred):
            self._call_of(name)

    def block(self, statements: Iterable[ast.AST]) -> None:
        for statement in statements:
            self.visit(statement)

    def visit(self, node: ast.AST | None) -> None:
        """Visit an optional node."""
        if isinstance(node, COMPREHENSIONS):
            self._comprehension(node)
        elif node is not None:
            super().visit(node)

    # names

    def read(self, name: str, line: int, guarded: bool = False, optional: bool = False) -> None:
        if self.bound is None:
            return
        guarded = guarded or self.guarded
        if name not in self.bound:
            self._use(UnboundUse(name, line, frozenset(self.bound), guarded, optional))
        self._call_of(name)

    def _use(self, use: UnboundUse) -> None:
        before = self.seen.get(use.name)
        is_known = before is not None and before <= use.bound
        if is_known and any(u.name == use.name and u.guarded <= use.guarded for u in self.uses):
            return
        self.seen[use.name] = use.bound if before is None else before & use.bound
        self.uses.append(use)
        for name in self.inner(use.name):
            if self.bound is not None and name in self.deferred:
                self._call_of(name)

    def _call_of(self, name: str) -> None:
        """Read the names that the cell's own function ``name`` reads, once."""
        for inner_name, line, guarded in self.deferred.pop(name, ()):
            self.read(inner_name, line, guarded)

    def bind(self, name: str) -> None:
        self.assigned.add(name)
        if self.bound is not None:
            self.bound.add(name)

    # expressions

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bind(node.id)
            return
        self.read(node.id, node.lineno)
        if isinstance(node.ctx, ast.Del) and self.bound is not None:
            self.bound.discard(node.id)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        reads: Reads = []
        collect(node, reads, self.guarded)
        self._read_all(reads)

    def _comprehension(self, node: ast.AST) -> None:
        reads: Reads = []
        collect(node, reads, self.guarded)
        self._read_all(reads)
        walrus = Scope()
        walrus_bindings(node, walrus)
        for name in walrus.local:
            self.assigned.add(name)

    def _read_all(self, reads: Reads) -> None:
        for name, line, guarded in reads:
            self.read(name, line, guarded)

    def visit_Call(self, node: ast.Call) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        self.assigned.update(assigned_in_magic(node))
        for name in [*names_in_magic(node), *names_in_query(node)]:
            self.read(name, node.lineno, guarded=True, optional=True)

    # simple statements

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read(node.target.id, node.lineno)
        self.visit(node.value)
        self.visit(node.target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not self.postponed:
            self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.bind(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self.has_star = True
            else:
                self.bind(alias.asname or alias.name)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.visit(node.exc)
        self.visit(node.cause)
        self.bound = None

    def visit_Break(self, node: ast.Break) -> None:
        self.bound = None

    def visit_Continue(self, node: ast.Continue) -> None:
        self.bound = None

    def visit_Return(self, node: ast.Return) -> None:
        self.bound = None

    # definitions

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for expression in at_definition(node, self.postponed):
            self.visit(expression)
        self._defer(node.name, free_reads(node, self.guarded), node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def _defer(self, name: str, reads: Reads, node: ast.AST) -> None:
        self.bind(name)
        self.deferred[name] = reads
        for child in ast.walk(node):
            if isinstance(child, ast.Global):
                self.assigned.update(child.names)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(child)
        scope = Scope()
        methods: Reads = []
        for statement in node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                now: Reads = []
                for expression in at_definition(statement, self.postponed):
                    collect(expression, now, self.guarded)
                methods += free_reads(statement, self.guarded)
            else:
                now = []
                collect(statement, now, self.guarded)
            self._read_all([read for read in now if read[0] not in scope.local])
            bindings(statement, scope)
        self._defer(node.name, methods, node)

    # flow

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._branches([node.body, node.orelse])

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._branches([*([case] for case in node.cases), []])

    def visit_match_case(self, node: ast.match_case) -> None:
        scope = Scope()
        bindings(node.pattern, scope)
        self.visit(node.pattern)
        for name in scope.local:
            self.bind(name)
        self.visit(node.guard)
        self.block(node.body)

    def _branches(self, blocks: Sequence[Sequence[ast.AST]]) -> None:
        before = self.bound
        ends = []
        for statements in blocks:
            self.bound = None if before is None else set(before)
            self.block(statements)
            ends.append(self.bound)
        self.bound = _meet(ends)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        before = self._copy()
        self.visit(node.target)
        self.block(node.body)
        self.bound = before
        self.block(node.orelse)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        before = self._copy()
        self.block(node.body)
        self.bound = before
        self.block(node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        before = self._copy()
        outer, self.guarded = self.guarded, self.guarded or _catches_name_error(node)
        self.block(node.body)
        self.guarded = outer
        self.block(node.orelse)
        ends = [self.bound]
        for handler in node.handlers:
            self.bound = None if before is None else set(before)
            self._handler(handler)
            ends.append(self.bound)
        after = _meet(ends)
        self.bound = None if before is None else set(before)
        self.block(node.finalbody)
        in_final = (self.bound or set()) - (before or set())
        self.bound = None if after is None else after | in_final

    def visit_TryStar(self, node: Any) -> None:
        self.visit_Try(node)

    def _handler(self, handler: ast.ExceptHandler) -> None:
        self.visit(handler.type)
        if handler.name:
            self.bind(handler.name)
        self.block(handler.body)
        if handler.name and self.bound is not None:
            self.bound.discard(handler.name)

    def _copy(self) -> set[str] | None:
        return None if self.bound is None else set(self.bound)


def _meet(ends: Sequence[set[str] | None]) -> set[str] | None:
    arriving = [end for end in ends if end is not None]
    return set.intersection(*arriving) if arriving else None


def _catches_name_error(node: ast.Try) -> bool:
    for handler in node.handlers:
        if handler.type is None:
            return True
        names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)}
        if names & _CATCHES_NAME_ERROR:
            return True
    return False
