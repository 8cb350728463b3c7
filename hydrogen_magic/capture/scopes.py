"""Names that nested scopes in a cell (functions, lambdas, comprehensions, classes) read from outside."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

__all__ = [
    "COMPREHENSIONS",
    "QUERIES",
    "Reads",
    "Scope",
    "at_definition",
    "bindings",
    "collect",
    "free_reads",
    "imported_modules",
    "names_in_query",
    "variables_in_query",
    "walrus_bindings",
]


@dataclass
class Scope:
    """The names of a function body, a lambda, a comprehension or a class body."""

    local: set[str] = field(default_factory=set)
    outer: set[str] = field(default_factory=set)
    """Declared ``global``."""


Reads = list[tuple[str, int, bool]]
"""Name, line, whether a NameError is caught there."""


def free_reads(node: ast.AST, guarded: bool = False) -> Reads:
    """Return the names that the body of function ``node`` reads from outside."""
    scope = Scope()
    body = _own_nodes(node, scope)
    guarded = guarded or any(
        isinstance(n, ast.Name) and n.id == "NameError" for n in ast.walk(node)
    )
    reads: Reads = []
    for child in body:
        collect(child, reads, guarded)
    return [read for read in reads if read[0] not in scope.local or read[0] in scope.outer]


def _own_nodes(node: ast.AST, scope: Scope) -> list[ast.AST]:
    body: list[ast.AST]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        scope.local.update(arg.arg for arg in _parameters(node.args))
        body = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    elif isinstance(node, ast.ClassDef):
        body = list(node.body)
    else:
        body = list(ast.iter_child_nodes(node))
    for statement in body:
        bindings(statement, scope)
    return body


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [*named, *(arg for arg in (arguments.vararg, arguments.kwarg) if arg)]


def bindings(node: ast.AST, scope: Scope) -> None:
    """Add the names that ``node`` binds in its own scope."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        scope.local.add(node.id)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        scope.local.add(node.name)
        return
    elif isinstance(node, ast.Lambda):
        return
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        scope.local.update((a.asname or a.name).partition(".")[0] for a in node.names)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        scope.local.add(node.name)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        scope.local.add(node.rest)
    elif isinstance(node, ast.Global):
        scope.outer.update(node.names)
    for child in ast.iter_child_nodes(node):
        if isinstance(node, COMPREHENSIONS) and isinstance(child, ast.comprehension):
            walrus_bindings(child, scope)
        else:
            bindings(child, scope)


def walrus_bindings(node: ast.AST, scope: Scope) -> None:
    for child in ast.walk(node):
        if isinstance(child, ast.NamedExpr):
            scope.local.add(child.target.id)


QUERIES = frozenset({"query", "eval"})
"""Methods of pandas whose text may refer to variables of the caller, as ``@limit``."""
_VARIABLE_IN_QUERY = re.compile(r"(?<![\w@])@([A-Za-z_]\w*)")


def names_in_query(node: ast.Call) -> list[str]:
    """Return the variables in the text of ``df.query("x > @limit")``."""
    function = node.func
    if not (isinstance(function, ast.Attribute) and function.attr in QUERIES):
        return []
    parts = [part for arg in node.args for part in ast.walk(arg) if isinstance(part, ast.Constant)]
    return [name for part in parts for name in variables_in_query(part.value)]


def variables_in_query(text: object) -> list[str]:
    """Return the variables in the text of a query, none if it is not a text."""
    return _VARIABLE_IN_QUERY.findall(text) if isinstance(text, str) else []


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def collect(node: ast.AST, reads: Reads, guarded: bool) -> None:
    """Add the names that ``node``, inside a function, reads from outside."""
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Store):
            reads.append((node.id, node.lineno, guarded))
        return
    if isinstance(node, _FUNCTIONS):
        for now in at_definition(node):
            collect(now, reads, guarded)
        reads.extend(free_reads(node, guarded))
        return
    if isinstance(node, COMPREHENSIONS):
        scope = Scope()
        for generator in node.generators:
            bindings(generator.target, scope)
        inner: Reads = []
        for child in ast.iter_child_nodes(node):
            collect(child, inner, guarded)
        reads.extend(read for read in inner if read[0] not in scope.local)
        return
    if isinstance(node, ast.ClassDef):
        for now in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
            collect(now, reads, guarded)
        reads.extend(free_reads(node, guarded))
        return
    if isinstance(node, ast.Call):
        reads.extend((name, node.lineno, True) for name in names_in_query(node))
    for child in ast.iter_child_nodes(node):
        collect(child, reads, guarded)


def at_definition(node: ast.AST, postponed: bool = True) -> list[ast.expr]:
    """Return the parts of a ``def`` or ``lambda`` that are evaluated at once: decorators, defaults,
    annotations.
    """
    assert isinstance(node, _FUNCTIONS)
    arguments = node.args
    now: list[ast.expr] = [
        *arguments.defaults,
        *(d for d in arguments.kw_defaults if d is not None),
    ]
    if isinstance(node, ast.Lambda):
        return now
    now = [*node.decorator_list, *now]
    if not postponed:
        now += [arg.annotation for arg in _parameters(arguments) if arg.annotation]
        now += [node.returns] if node.returns else []
    return now


def imported_modules(tree: ast.AST, package: str = "") -> list[str]:
    """Return full names of the modules that ``tree`` imports anywhere, in order.

    ``from a import b`` gives ``a`` and ``a.b``, which may not be a module. ``package``: base of relative
    imports.
    """
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if base:
                found[base] = None
                found.update((f"{base}.{a.name}", None) for a in node.names if a.name != "*")
    return list(found)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    if node.level > len(parts):
        return ""
    return ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
