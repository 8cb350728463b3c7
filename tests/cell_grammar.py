"""Small cells from a grammar of Python's scopes, run plainly and as ``%%distributed`` runs them.

A rank may be simulated in this process: the closure of the cell is restored into a fresh module.
"""

from __future__ import annotations

import ast
import asyncio
import collections
import contextlib
import copyreg
import inspect
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from hydrogen_magic.capture import Captured, CellText, capture_cell
from hydrogen_magic.capture.scopes import assigned_in
from hydrogen_magic.core.lazy_annotations import annotations_of
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.node.worker import namespace
from tests.capture_rig import as_sent

NOTEBOOK = """
from contextlib import contextmanager, nullcontext, suppress
from math import tau as t
a, b, c = 1, 2, 3
d = [4, 5]
seen = []
budget = 60
def call(function, *args):
    global budget
    budget -= 1
    if budget < 0: raise RuntimeError("too many calls")
    return function(*args)
def f(x=0): return ("f", a, x)
def g(x=0):
    global b
    b = [b, x]
    return b
def now(function):
    seen.append(call(function))
    return function
def same(function): return function
class Quiet:
    def __enter__(self): return 6
    def __exit__(self, *problem): return True
    async def __aenter__(self): return 7
    async def __aexit__(self, *problem): return True
@contextmanager
def careless():
    try: yield 8
    except ArithmeticError: pass
class C:
    v = c
    def m(self, x=0): return ("m", c, x)
"""
NAMES = ["a", "b", "c", "d", "f", "g", "t", "C", "e", "u"]
"""``e`` and ``u`` are not defined in the notebook."""
PROBLEMS = ["KeyError", "ValueError", "ZeroDivisionError", "NameError", "Exception"]


class Grammar:
    """Writes one cell by the choices of ``random``."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def pick(self, *options: str) -> str:
        return self.random.choice(options)

    def name(self) -> str:
        return self.random.choice(NAMES if self.random.random() < 0.3 else NAMES[:-2])

    def callable(self) -> str:
        return self.pick("f", "g", "C", "C().m", self.name())

    # ── expressions ──────────────────────────────────────────────────────────────────────────────

    def expression(self, depth: int = 2) -> str:
        if depth == 0 or self.random.random() < 0.35:
            return self.name() if self.random.random() < 0.8 else str(self.random.randint(0, 9))

        def e() -> str:
            return self.expression(depth - 1)

        n = self.name
        forms: list[Callable[[], str]] = [
            lambda: f"({e()}, {e()})",
            lambda: f"[{e()} for {n()} in {self.items()}]",
            lambda: f"[{e()} for {n()} in {self.items()} for {n()} in [{e()}] if {e()}]",
            lambda: f"{{{n()}: {e()} for {n()}, {n()} in [({e()}, 1)]}}",
            lambda: f"list({e()} for {n()} in {self.items()})",
            lambda: f"({n()} := {e()})",
            lambda: f"[({n()} := {n()}) for {n()} in {self.items()}]",
            lambda: f"call(lambda {n()}=1: {e()})",
            lambda: f"call(lambda: {e()})",
            lambda: f"(lambda {n()}: {e()})",
            lambda: f"call({self.callable()}, {e()})",
            lambda: f"call({self.callable()})",
            lambda: f"call({n()})",
            lambda: f"({e()} if {e()} else {e()})",
            lambda: f"f'{{type({n()}).__name__}} {{type({e()})}}'",
            lambda: f"sorted([2, 1], key=lambda {n()}: ({e()}, 1)[1])",
            lambda: f"eval({n()!r})",
            lambda: f"globals()[{n()!r}]",
            lambda: f"({e()} or {e()})",
            lambda: f"[*{self.items()}, {e()}]",
        ]
        return self.random.choice(forms)()

    def items(self) -> str:
        return self.pick("d", f"[{self.name()}]", "range(2)", "[]", self.name())

    def target(self) -> str:
        n = self.name
        return self.pick(n(), n(), n(), f"{n()}, {n()}", f"{n()}, *{n()}", f"[{n()}, {n()}]")

    # ── statements ───────────────────────────────────────────────────────────────────────────────

    def block(self, depth: int, place: str, least: int = 1) -> str:
        count = self.random.randint(least, least + 2)
        lines = [self.statement(depth, place) for _ in range(count)]
        return "\n".join(lines) or "pass"

    def statement(self, depth: int, place: str) -> str:
        simple = [self.assignment, self.use, self.use, self.use, self.text, self.module]
        simple += [self.assignment, self.removal]
        if depth == 0 or self.random.random() < 0.4:
            return self.random.choice(simple)(place)
        compound = [self.branch, self.loop, self.attempt, self.context, self.match]
        compound += [self.function, self.function, self.klass, self.asynchronous]
        return self.random.choice(compound)(depth - 1, place)

    def assignment(self, place: str) -> str:
        n, e = self.name, self.expression
        return self.pick(
            f"{n()} = {e()}",
            f"{n()} = {e()}",
            f"{n()} += [{e()}]",
            f"{n()} = [{n()}, {e()}]",
            f"{n()}: {e(1)} = {e()}",
            f"{n()}: {e(1)}",
            f"{n()} = {n()} = {e()}",
            f"{self.target()} = {e()}, {e()}",
            f"{n()} = {n()}",
            f"{n()} = lambda {n()}=0: {e()}",
        )

    def use(self, place: str) -> str:
        lines = [f"seen.append({self.expression()})", f"seen.append({self.name()})"]
        if place in ("function", "method"):
            lines += [f"return {self.expression()}", f"global {self.name()}"]
            lines += [f"nonlocal {self.name()}"] if self.random.random() < 0.3 else []
        if place == "class":
            lines.append(f"global {self.name()}")
        if place == "async":
            lines.append(f"await call({self.callable()})")
        return self.pick(*lines)

    def removal(self, place: str) -> str:
        is_cell = place == "cell"
        return self.pick(
            f"del {self.name()}",
            "pass",
            "pass" if is_cell else f"assert {self.name()}",
            "pass" if is_cell else f"raise {self.pick(*PROBLEMS)}",
        )

    def text(self, place: str) -> str:
        n = self.name
        return self.pick(
            f"exec('{n()} = {n()}')",
            f"exec('def {n()}(): return {n()}')",
            f"globals()[{n()!r}] = {self.expression(1)}",
            f"seen.append(eval('{n()}'))",
        )

    def module(self, place: str) -> str:
        star = ["from math import *"] if place == "cell" else []
        return self.pick(
            f"import math as {self.name()}",
            f"from math import e as {self.name()}",
            "from math import e",
            *star,
        )

    def branch(self, depth: int, place: str) -> str:
        test = self.pick("True", "False", self.expression(1), f"{self.name()} == 1")
        text = f"if {test}:\n{indent(self.block(depth, place))}"
        rest = self.block(depth, place)
        return text if self.random.random() < 0.5 else f"{text}\nelse:\n{indent(rest)}"

    def loop(self, depth: int, place: str) -> str:
        if self.random.random() < 0.25:
            body = self.block(depth, place)
            return f"while {self.pick('True', 'False')}:\n{indent(body)}\n    break"
        end = self.pick("", "    break\n", f"    if {self.name()}: continue\n")
        rest = self.pick("", f"\nelse:\n{indent(self.block(depth, place))}")
        head = f"for {self.target()} in {self.items()}:\n"
        return head + end + indent(self.block(depth, place)) + rest

    def attempt(self, depth: int, place: str) -> str:
        raised = self.pick("", f"    raise {self.pick(*PROBLEMS)}\n", "    1 / 0\n")
        text = f"try:\n{raised}{indent(self.block(depth, place))}"
        if self.random.random() < 0.75:
            bound = self.pick("", f" as {self.name()}")
            text += f"\nexcept {self.pick(*PROBLEMS)}{bound}:\n{indent(self.block(depth, place))}"
            text += self.pick("", f"\nelse:\n{indent(self.block(depth, place))}")
        else:
            return f"{text}\nfinally:\n{indent(self.block(depth, place))}"
        return text + self.pick("", f"\nfinally:\n{indent(self.block(depth, place))}")

    def context(self, depth: int, place: str) -> str:
        manager = self.pick(
            f"suppress({self.pick(*PROBLEMS)})",
            "Quiet()",
            "careless()",
            f"nullcontext({self.expression(1)})",
        )
        bound = self.pick("", f" as {self.name()}")
        raised = self.pick("", f"    raise {self.pick(*PROBLEMS)}\n")
        body = indent(self.block(depth, place)) + "\n"
        return f"with {manager}{bound}:\n" + self.pick(raised + body, body + raised)

    def match(self, depth: int, place: str) -> str:
        n = self.name
        patterns = [
            f"[{n()}, *{n()}]",
            f"{{'k': {n()}, **{n()}}}",
            f"int() as {n()}",
            f"({n()}, {n()})",
            "None",
            "C()",
        ]
        cases = [
            f"    case {self.random.choice(patterns)}{self.pick('', f' if {n()}')}:\n"
            + indent(indent(self.block(depth, place)))
            for _ in range(self.random.randint(1, 2))
        ]
        return f"match {self.expression(1)}:\n" + "\n".join(cases)

    def decorator(self) -> str:
        return self.pick("", "", "", "@same\n", "@now\n", f"@{self.name()}\n")

    def function(self, depth: int, place: str) -> str:
        n = self.name
        arguments = self.pick(
            "", "", f"{n()}=1", f"{n()}={self.expression(1)}", f"{n()}: {self.expression(1)} = 1"
        )
        result = self.pick("", "", f" -> {self.expression(1)}")
        inner = "self, x=0" if place == "class" else arguments
        called = self.name() if place == "class" else n()
        head = self.decorator() + f"def {called}({inner}){result}:\n"
        text = head + indent(self.block(depth, "method" if place == "class" else "function"))
        return text + self.pick("", "" if place == "class" else f"\nseen.append(call({called}))")

    def klass(self, depth: int, place: str) -> str:
        name, base = self.name(), self.pick("", "", "(C)", f"({self.name()})")
        head = self.pick("", "", "@same\n") + f"class {name}{base}:\n"
        return head + indent(self.block(depth, "class")) + self.pick("", f"\nseen.append({name}())")

    def asynchronous(self, depth: int, place: str) -> str:
        if place not in ("cell", "async"):
            return self.use(place)
        name = self.name()
        body = indent(self.block(depth, "async"))
        waits = self.pick(
            f"\nseen.append(await call({name}))",
            "",
            f"\nasync with Quiet() as {self.name()}:\n    {self.name()} = 1\n    raise KeyError",
        )
        return f"async def {name}():\n{body}{waits}"

    def cell(self) -> str:
        future = "from __future__ import annotations\n" if self.random.random() < 0.1 else ""
        end = self.pick("", f"\n{self.expression()}", f"\n{self.name()}")
        statements = [self.statement(3, "cell") for _ in range(self.random.randint(2, 4))]
        if self.random.random() < 0.5:  # or else most cells end at their first problem
            caught = self.pick(*PROBLEMS[-1:], "(TypeError, AttributeError)")
            after = f"except {caught} as problem: seen.append(type(problem).__name__)"
            statements = [f"try:\n{indent(text)}\n{after}" for text in statements]
        return future + "\n".join(statements) + end + "\n"


def indent(text: str) -> str:
    return textwrap.indent(text, "    ")


def write_cell(random: Random) -> str:
    """Return a cell that compiles."""
    grammar = Grammar(random)
    while True:
        text = grammar.cell()
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            return text


# ── running ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Outcome:
    """How a cell ended, and the names it left behind, in a form that can be compared."""

    problem: str
    """Type of the exception, empty if there was none."""
    value: Any
    names: dict[str, Any]


def plainly(text: str, notebook: types.ModuleType) -> Outcome:
    """Run a cell in the notebook itself."""
    names = notebook.__dict__

    def run() -> Any:
        tree = ast.parse(text)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        flags = compile("from __future__ import annotations", "", "exec").co_flags
        flags &= 0x1000000 if text.startswith("from __future__") else 0
        flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        evaluate(compile(tree, "<cell>", "exec", flags, dont_inherit=True), names)
        if last is None:
            return None
        end = ast.Expression(last.value)
        return evaluate(compile(end, "<cell>", "eval", flags, dont_inherit=True), names)

    return outcome(run, names)


def inline(captured: Captured) -> Outcome:
    """Run a closure in a module of this process."""
    module = types.ModuleType("__main__")
    loaded = namespace.load(as_sent(captured), module)
    return outcome(loaded.run, module.__dict__)


def evaluate(code: types.CodeType, names: dict[str, Any]) -> Any:
    value = eval(code, names)
    return asyncio.run(value) if code.co_flags & inspect.CO_COROUTINE else value


def outcome(run: Callable[[], Any], names: dict[str, Any]) -> Outcome:
    value, problem = None, ""
    try:
        value = run()
    except Exception as error:  # whatever the cell raises
        problem = type(error).__name__
    left = {name: canonical(names[name]) for name in [*NAMES, "seen"] if name in names}
    return Outcome(problem, canonical(value), left)


def canonical(value: Any, depth: int = 6) -> Any:
    """Return a value in a form that is equal for equal values of two processes, and for no others."""
    kind = type(value)
    if kind in (int, str, type(None)):
        return value
    if kind in (types.ModuleType, types.BuiltinFunctionType):
        return kind.__name__, getattr(value, "__name__", "")
    if issubclass(kind, type) and (value.__module__ != "__main__" or depth == 0):
        return kind.__name__, value.__module__, value.__qualname__
    if depth == 0:
        return kind.__name__
    attributes = sorted(_attributes(value).items())
    named = [(name, canonical(one, depth - 1)) for name, one in attributes]
    return kind.__name__, _contents(value, kind, depth - 1), named


_WRITTEN = (int, float, complex, str, bytes, bytearray)
"""Types of values that their texts describe; subclasses may have other texts."""
_SEQUENCES = (list, tuple, collections.deque)


def _contents(value: Any, kind: type, depth: int) -> Any:
    """Return what a value consists of besides its attributes."""
    for base in _WRITTEN:
        if issubclass(kind, base):
            return base.__repr__(value)
    for base in _SEQUENCES:
        if issubclass(kind, base):
            return [canonical(item, depth) for item in base.__iter__(value)]
    if issubclass(kind, (set, frozenset)):
        return sorted((canonical(item, depth) for item in value), key=repr)
    if issubclass(kind, dict):
        return [(canonical(k, depth), canonical(v, depth)) for k, v in dict.items(value)]
    if kind is types.FunctionType:
        defaults = value.__defaults__, value.__kwdefaults__, annotations_of(value)
        return value.__qualname__, canonical(defaults, depth)
    if kind is types.MethodType:
        return canonical((value.__func__, value.__self__), depth)
    try:
        text = repr(value)
    except Exception:  # whatever the class raises
        return ""
    return "" if re.search(r"\b0x[0-9a-f]+", text) else text


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object as they are stored, including those in slots."""
    found: dict[str, Any] = {}
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # typeshed lacks it
    with contextlib.suppress(AttributeError):
        found.update(vars(value) if isinstance(value, type) else _stored(value, "__dict__"))
    for name in names:
        with contextlib.suppress(AttributeError):  # it has not been assigned
            found[name] = _stored(value, name)
    plain = {k: v for k, v in found.items() if isinstance(k, str)}
    return {k: v for k, v in plain.items() if k[:2] != "__" or k == "__annotations__"}


_stored = object.__getattribute__


@contextlib.contextmanager
def open_module() -> Iterator[types.ModuleType]:
    """A notebook's module that is ``__main__`` until the block ends."""
    before = sys.modules["__main__"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(NOTEBOOK, "<cell 1>", "exec", dont_inherit=True), module.__dict__)
        yield module
    finally:
        sys.modules["__main__"] = before


@dataclass(frozen=True)
class Case:
    """A cell of the grammar that has run plainly."""

    text: str
    before: Outcome
    plain: Outcome
    captured: Captured | None
    refusal: str = ""

    def difference(self, rank: Outcome) -> str:
        """Return how the cell differs on a rank; empty if it does not."""
        plain = self.plain
        if plain.problem == "RecursionError" == rank.problem:
            return ""
        if (plain.problem, plain.value) != (rank.problem, rank.value):
            return f"plainly {plain.problem} {plain.value}, on a rank {rank.problem} {rank.value}"
        for name in [*NAMES, "seen"]:
            theirs = rank.names.get(name, self.before.names.get(name))
            if name in plain.names and theirs != plain.names[name]:
                return f"{name} is plainly {plain.names[name]}, on a rank {theirs}"
            if name not in plain.names and name in rank.names:
                return f"{name} is plainly undefined, on a rank {theirs}"
        return ""


def prepare(text: str) -> Case:
    """Capture a cell, then run it plainly in the same notebook."""
    with open_module() as notebook, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = outcome(lambda: None, notebook.__dict__)
        cell = CellText(text, "<cell>", "Cell In[2]", 1, lambda body: body)
        try:
            captured = capture_cell(cell, notebook.__dict__, [NOTEBOOK])
        except CaptureError as error:
            plain = plainly(text, notebook)
            return Case(text, before, plain, None, needless(str(error), text, plain))
        return Case(text, before, plainly(text, notebook), captured)


def difference(text: str) -> str:
    """Return how a cell on a simulated rank differs from the same cell in the notebook."""
    case = prepare(text)
    if case.captured is None:
        return case.refusal
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.difference(inline(case.captured))


def needless(message: str, text: str, plain: Outcome) -> str:
    """Return a refusal that is wrong: of a name that the cell assigns, or for another reason."""
    refused = {line.split("`")[1] for line in message.splitlines() if "is not defined" in line}
    if refused and refused <= {"e", "u"}.difference(assigned_in([text])):
        return ""
    return "" if plain.problem == "NameError" else f"refused: {message}"
