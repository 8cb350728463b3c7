"""The global names that code reads and assigns, from its bytecode.

CPython's compiler has already decided which names are global, so there are no scope rules here:
comprehensions, class bodies, annotations and ``global`` declarations are whatever this Python
compiles them to.
"""

from __future__ import annotations

import ast
import dis
import functools
import heapq
import re
import types
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from typing import NamedTuple

from hydrogen_magic.core import syntax

CODE = (types.FunctionType, type)
"""Types of the functions and classes that a notebook defines."""
_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL"}
_STORES = {"STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL"}
"""A deleted name counts as assigned: its earlier value cannot be read any more."""
_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_JUMPS = {"JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_JUMP_CODES = {*dis.hasjrel, *dis.hasjabs}
_MAKES_FUNCTION = {"LOAD_CONST", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE", "EXTENDED_ARG"}
"""``EXTENDED_ARG`` belongs to the instruction after it, which has an argument above 255."""

_DYNAMIC = {"eval", "exec", "globals", "locals", "vars"}
"""Builtins through which texts of the code may be names."""
_QUERIES = {"query", "eval"}
"""Methods of pandas whose text may refer to variables of the caller, as ``@limit``."""
_VARIABLE_IN_QUERY = re.compile(r"(?<![\w@])@([^\W\d]\w*)")
_SQL = {"duckdb", "sql"}
"""Names of code whose texts may be SQL over variables of the caller, as for DuckDB and Polars."""
_TABLES_IN_SQL = re.compile(r"\b(?:from|join)\s+(?=([\w\s\",]+))", re.IGNORECASE)
_LONGEST_TEXT = 10_000
"""Characters; longer texts are data."""


@dataclass(frozen=True)
class GlobalRead:
    """A global name that may be read before the code has assigned it."""

    name: str
    line: int
    """Line in the source of the code."""
    assigned: frozenset[str]
    """Names that the code has assigned by then."""
    is_text: bool = False
    """A word in a text that may be evaluated: it need not be a name."""


class _Graph(NamedTuple):
    """The instructions of one code object, and where each may lead."""

    code: types.CodeType
    instructions: list[dis.Instruction]
    lines: list[int]
    successors: list[list[int]]
    handlers: list[list[int]]
    """For each instruction, where an exception leads."""
    is_class: bool
    """It is the body of a class, with names of its own."""
    is_dynamic: bool
    """It uses a builtin that evaluates texts as names."""


class DefiniteAssignment:
    """Follows a cell's code with the names that it has assigned on every path so far.

    A function of the cell reads its names when its own name is read: it is called then or later.
    ``is_cautious``: also where unknown code may call it or may end a block early: a decorator, a
    context manager that suppresses exceptions. ``called(name)``: global names that the object
    ``name``, which the cell does not define, reads itself. ``magics``: words in IPython's lines, by
    line.
    """

    def __init__(
        self,
        *,
        is_cautious: bool = False,
        called: Callable[[str], Iterable[str]] = lambda name: (),
        magics: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.reads: list[GlobalRead] = []
        self.n_used = 0
        """How many of these are not in functions that the cell only defines."""
        self._is_cautious = is_cautious
        self._called = called
        self._magics = magics or {}
        self._functions: dict[str, list[types.CodeType]] = {}
        """By the names through which they can be called."""
        self._scanned: dict[int, tuple[_Graph, list[frozenset[str]]]] = {}
        """By the ``id`` of the code: its hash is slow, and it is looked up often."""

    def run(self, cell: types.CodeType, at_end: bool = True, used: Iterable[str] = ()) -> None:
        """Follow a cell. ``at_end``: functions that it does not use count as called at its end.

        ``used``: functions that others call then.
        """
        self._register(cell, "")
        assigned = self.scan(cell, frozenset())
        for name in used:
            self._call(name, assigned)
        self.n_used = len(self.reads)
        for functions in self._functions.values() if at_end else ():
            for function in functions:
                self.scan(function, assigned)

    def _register(self, code: types.CodeType, owner: str) -> None:
        graph, _ = self._known(code)
        for place in range(len(graph.instructions)):
            inner, name = _definition(graph, place)
            if inner is not None and not inner.co_flags & CO_OPTIMIZED:
                self._register(inner, owner or inner.co_name)
            elif inner is not None and name:
                for key in {name, owner or name}:
                    self._functions.setdefault(key, []).append(inner)

    def scan(self, code: types.CodeType, assigned: frozenset[str]) -> frozenset[str]:
        """Follow one code object; return the names that it has assigned when it returns."""
        graph, known = self._known(code)
        if any(earlier <= assigned for earlier in known):
            return assigned
        known.append(assigned)
        states: dict[int, frozenset[str]] = {0: assigned}
        todo = [0]
        ends: list[frozenset[str]] = []
        while todo:
            place = heapq.heappop(todo)  # in order: branches meet before the code after them
            before = states[place]
            after = self._step(graph, place, before)
            if graph.instructions[place].opname in ("RETURN_VALUE", "RETURN_CONST"):
                ends.append(after)
            following = [(target, after) for target in self._successors(graph, place)]
            for target, state in [*following, *((h, before) for h in graph.handlers[place])]:
                merged = states[target] & state if target in states else state
                if states.get(target) != merged:
                    states[target] = merged
                    heapq.heappush(todo, target)
        return frozenset.intersection(*ends) if ends else assigned

    def _known(self, code: types.CodeType) -> tuple[_Graph, list[frozenset[str]]]:
        """Return the graph of ``code``, and the assigned names with which it was scanned."""
        if id(code) not in self._scanned:
            self._scanned[id(code)] = _graph(code), []
        return self._scanned[id(code)]

    def _successors(self, graph: _Graph, place: int) -> list[int]:
        suppresses = graph.instructions[place].opname == "WITH_EXCEPT_START"
        return [] if suppresses and not self._is_cautious else graph.successors[place]

    def _step(self, graph: _Graph, place: int, assigned: frozenset[str]) -> frozenset[str]:
        instruction, line = graph.instructions[place], graph.lines[place]
        operation, name = instruction.opname, instruction.argval
        if operation == "LOAD_CONST":
            self._constant(graph, place, assigned)
        is_own = graph.is_class and operation.endswith("_NAME")
        own = f".{name}" if is_own else name  # no name begins with a dot
        if operation in _LOADS and own not in assigned:
            self._read(GlobalRead(name, line, _globals(graph, assigned)))
        elif operation in _LOADS:
            self._call(name, _globals(graph, assigned))
        if name == "get_ipython":
            for word in self._magics.get(line, ()):
                self._read(GlobalRead(word, line, _globals(graph, assigned), is_text=True))
        return assigned | {own} if operation in _STORES else assigned

    def _read(self, read: GlobalRead) -> None:
        if read.name not in read.assigned:
            self.reads.append(read)
            for name in self._called(read.name):
                self._call(name, read.assigned)
        self._call(read.name, read.assigned)

    def _call(self, name: str, assigned: frozenset[str]) -> None:
        for function in self._functions.get(name, ()):
            self.scan(function, assigned)

    def _constant(self, graph: _Graph, place: int, assigned: frozenset[str]) -> None:
        inner, name = _definition(graph, place)
        if inner is not None:
            is_deferred = any(inner is other for other in self._functions.get(name, ()))
            if self._is_cautious or not is_deferred:
                self.scan(inner, _globals(graph, assigned))
            return
        for word in _names_in(graph.instructions[place].argval, graph):
            self._read(
                GlobalRead(word, graph.lines[place], _globals(graph, assigned), is_text=True)
            )


def _globals(graph: _Graph, assigned: frozenset[str]) -> frozenset[str]:
    """Return ``assigned`` without the names of a class body."""
    if not graph.is_class:
        return assigned
    return frozenset(name for name in assigned if not name.startswith("."))


def _definition(graph: _Graph, place: int) -> tuple[types.CodeType | None, str]:
    """Return the code that the instruction begins to define, and the name that it gets.

    An empty name: it has none, or its code runs at once, as that of a comprehension.
    """
    instructions = graph.instructions
    inner = instructions[place].argval
    if not isinstance(inner, types.CodeType):
        return None, ""
    if inner.co_name != "<lambda>":
        is_function = inner.co_flags & CO_OPTIMIZED and not inner.co_name.startswith("<")
        return inner, inner.co_name if is_function else ""
    while instructions[place].opname in _MAKES_FUNCTION:
        place += 1
    is_stored = instructions[place].opname in ("STORE_NAME", "STORE_GLOBAL")
    return inner, instructions[place].argval if is_stored else ""


@functools.lru_cache(maxsize=1024)
def _graph(code: types.CodeType) -> _Graph:
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    line_at = {o: line for start, end, line in code.co_lines() for o in range(start, end) if line}
    successors = []
    for place, instruction in enumerate(instructions):
        goes_on = instruction.opname not in _ENDS | _JUMPS
        following = [place + 1] if goes_on and place + 1 < len(instructions) else []
        if instruction.opcode in _JUMP_CODES:
            following.append(places[instruction.argval])
        successors.append(following)
    entries = getattr(bytecode, "exception_entries", ())  # Python 3.10 has jumps instead
    handlers = [[places[e.target] for e in entries if e.start <= o < e.end] for o in places]
    lines = [line_at.get(offset, code.co_firstlineno) for offset in places]
    words = {i.argval for i in instructions if i.opname in _LOADS}
    is_class = not code.co_flags & CO_OPTIMIZED and code.co_name != "<module>"
    is_dynamic = not _DYNAMIC.isdisjoint(words)
    return _Graph(code, instructions, lines, successors, handlers, is_class, is_dynamic)


# ── texts ────────────────────────────────────────────────────────────────────────────────────────


def _as_python_reads(name: str) -> str:
    """Return the name under which Python knows a variable: the micro sign is the Greek letter, too."""
    return unicodedata.normalize("NFKC", name)


def _names_in(constant: object, graph: _Graph) -> Iterator[str]:
    """Yield the global names in a text that the code may evaluate."""
    code = graph.code
    if isinstance(constant, tuple):
        for item in constant:
            yield from _names_in(item, graph)
    elif isinstance(constant, str) and len(constant) <= _LONGEST_TEXT:
        if not _QUERIES.isdisjoint(code.co_names):
            variables = dict.fromkeys(map(_as_python_reads, _VARIABLE_IN_QUERY.findall(constant)))
            yield from (name for name in variables if name not in code.co_varnames)
        if not _SQL.isdisjoint(code.co_names):
            yield from (name for name in _tables_in(constant) if name not in code.co_varnames)
        if graph.is_dynamic:
            yield from names_in_source(constant)


def _tables_in(sql: str) -> dict[str, None]:
    """Return what may be the names of tables in a query, and of some other things."""
    lists = (found.replace('"', "").split(",") for found in _TABLES_IN_SQL.findall(sql))
    return dict.fromkeys(words[0] for names in lists for name in names if (words := name.split()))


def names_in_source(text: str) -> list[str]:
    """Return the names in a piece of Python; none if it is something else."""
    names = (n.id for n in ast.walk(syntax.parsed(text.strip())) if isinstance(n, ast.Name))
    return list(dict.fromkeys(names))


# ── whole functions ──────────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=4096)
def global_reads(code: types.CodeType) -> tuple[GlobalRead, ...]:
    """Return the global names that a function with this code may read, each once."""
    analysis = DefiniteAssignment()
    analysis.scan(code, frozenset())
    first: dict[str, GlobalRead] = {}
    for read in sorted(analysis.reads, key=lambda read: read.is_text):
        first.setdefault(read.name, read)
    return tuple(first.values())


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that a function with this code may read, each once."""
    return tuple(read.name for read in global_reads(code))


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield ``code`` and the code of every function inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


def assigned_names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that a function assigns, also in functions inside it."""
    for inner in code_objects(code):
        yield from _operands(inner, "STORE_GLOBAL")


def global_loads(code: types.CodeType) -> Iterator[tuple[str, int]]:
    """Yield the global names that code reads outside of functions, with their lines."""
    graph = _graph(code)
    for instruction, line in zip(graph.instructions, graph.lines, strict=True):
        if instruction.opname in _LOADS:
            yield instruction.argval, line


def read_below_stores(cell: types.CodeType) -> frozenset[str]:
    """Return the global names that a cell reads only below, and possibly after, an assignment of them.

    Reads are those outside of functions. To read the name of a function that assigns others is an assignment
    of them, since it may be called then.
    """
    graph = _graph(cell)
    by_function = {
        name: {*assigned_names(inner)}
        for place in range(len(graph.instructions))
        for inner, name in [_definition(graph, place)]
        if inner is not None and name
    }
    stores: dict[str, list[int]] = {}
    reads: dict[str, list[int]] = {}
    for place, instruction in enumerate(graph.instructions):
        if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stores.setdefault(instruction.argval, []).append(place)
        elif instruction.opname in _LOADS:
            reads.setdefault(instruction.argval, []).append(place)
            for name in by_function.get(instruction.argval, ()):
                stores.setdefault(name, []).append(place)
    return frozenset(
        name
        for name, places in reads.items()
        if name in stores
        and min(stores[name]) < min(places)
        and _reachable(graph, stores[name]).issuperset(places)
    )


def _reachable(graph: _Graph, places: Iterable[int]) -> set[int]:
    """Return the instructions that may follow those at ``places``."""
    found: set[int] = set()
    left = [*places]
    while left:
        place = left.pop()
        following = {*graph.successors[place], *graph.handlers[place]} - found
        found |= following
        left += following
    return found


def names_bound_by(cell: types.CodeType) -> Iterator[str]:
    """Yield the global names that a cell assigns, itself or by functions in it."""
    yield from _operands(cell, "STORE_NAME")
    yield from assigned_names(cell)


def imported_names(code: types.CodeType) -> Iterator[str]:
    """Yield the full names of modules that ``code`` imports when it runs."""
    for inner in code_objects(code):
        yield from filter(None, _operands(inner, "IMPORT_NAME"))


def _operands(code: types.CodeType, operation: str) -> Iterator[str]:
    for instruction in _graph(code).instructions:
        if instruction.opname == operation:
            yield str(instruction.argval or "")
