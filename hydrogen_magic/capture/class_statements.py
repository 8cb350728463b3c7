"""Statements of the notebook that make classes: ranks execute those whose making a library observes.

Other classes are rebuilt from their attributes. But a metaclass or an ``__init_subclass__`` of a library or a
local module needs the body of the class and its keywords: it may register fields, or check them.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import copy
import enum
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.capture.import_effects import TRUSTED
from hydrogen_magic.capture.imports import imported_names
from hydrogen_magic.capture.lines import code_in
from hydrogen_magic.capture.reachable import attributes_of, reads_of
from hydrogen_magic.capture.required_names import RequiredNames
from hydrogen_magic.core import syntax
from hydrogen_magic.core.lazy_annotations import annotations_of
from hydrogen_magic.serialization.class_statements import BASES, METACLASS, Defaults, functions_in
from hydrogen_magic.serialization.classes import MAKING
from hydrogen_magic.serialization.code_names import (
    DefiniteAssignment,
    code_objects,
    names_bound_by,
    names_in_source,
)
from hydrogen_magic.serialization.importable import is_main
from hydrogen_magic.serialization.instances import ATOMS

_NEEDING_BODIES = {"equinox", "msgspec", "sqlalchemy"}
"""Packages whose classes are not complete without the body of their statement. Those of others are better
rebuilt from their attributes, which may have changed since."""
_TIMED = "<timed exec>"
"""File name of the code of all ``%%time`` cells."""
_FUTURE = __future__.annotations.compiler_flag


@dataclass(frozen=True)
class ClassStatement:
    """A statement that makes a class again."""

    name: str
    """The name that it binds."""
    code: types.CodeType
    """It reads the bases and the metaclass under :data:`BASES` and :data:`METACLASS`."""
    names: Mapping[str, Any]
    """What the notebook has under the names that the statement reads when it is executed."""
    mentioned: tuple[str, ...]
    """Names of the notebook's classes in its texts and annotations."""

    def functions(self) -> Iterator[types.CodeType]:
        """Yield the code of the functions in the body."""
        return (each for each in code_objects(self.code) if each.co_flags & inspect.CO_OPTIMIZED)

    def kept(
        self, cls: type, attributes: Mapping[str, Any], needs: RequiredNames
    ) -> dict[str, Any]:
        """Return the attributes of the notebook's class that a rank's may lack, or have other values of.

        They are those that other statements have set, and data, which may have changed. What a metaclass
        makes of the body is left to it.
        """
        files = _files(needs)
        made = {*code_objects(self.code)}
        stored = {name for code in self.code.co_consts for name in _bound_by(code)}
        set_since = {each for file in files for each in _attributes_set_in(_text(file))}
        packages = _observers(cls)

        def is_kept(name: str, value: Any) -> bool:
            codes = [f.__code__ for f in functions_in(value)]
            if any(each.co_filename in files and each not in made for each in codes):
                return True
            may_be_set = name in stored or not name.startswith("__")
            is_data = may_be_set and _is_data(value, packages)
            return is_data or name == "_abc_impl" or (self.name, name) in set_since

        return {name: value for name, value in attributes.items() if is_kept(name, value)}


_found: weakref.WeakKeyDictionary[type, ClassStatement] = weakref.WeakKeyDictionary()
"""They keep the values that names had when the class was first sent: the notebook may assign others."""


def statement_of(cls: type, needs: RequiredNames) -> ClassStatement | None:
    """Return the statement by which ranks make ``cls``.

    None if they make it of its attributes: that suffices, or its statement is not found or might make another
    class now.
    """
    is_current = needs.namespace.get(cls.__qualname__) is cls
    if cls not in _found and _needs_body(cls, is_current):
        files = _files(needs)
        found = [file for file in files if _makes(file, cls, files)]
        if found and (is_current or (is_main(cls) and len(found) == 1)):
            statement = _statement(cls, found[-1], needs)
            if statement is not None:
                _found[cls] = statement
    return _found.get(cls)


# ── which classes ────────────────────────────────────────────────────────────────────────────────


def _needs_body(cls: type, is_current: bool) -> bool:
    """Whether code that runs when ``cls`` is made, none of it the notebook's, needs its body or keywords.

    A hook with keywords may register the class by them: an earlier class must not replace the present one.
    """
    packages = _observers(cls)
    if not packages or "__main__" in packages or issubclass(cls, enum.Enum):
        return False
    needs_keyword = is_current and any(
        _needs_keyword(vars(kind)[name]) for kind, name in _hooks(cls)
    )
    return needs_keyword or not packages.isdisjoint(_NEEDING_BODIES)


def _hooks(cls: type) -> Iterator[tuple[type, str]]:
    """Yield the classes and names of methods that make ``cls``: Python calls the first of each name."""
    for kind in type.mro(type(cls)):
        yield from ((kind, name) for name in MAKING & vars(kind).keys())
    for base in cls.__mro__[1:]:
        if "__init_subclass__" in vars(base):
            yield base, "__init_subclass__"


def _needs_keyword(hook: Any) -> bool:
    """Whether a class statement must have a keyword for ``hook``."""
    function = getattr(hook, "__func__", hook)
    code = getattr(function, "__code__", None)
    return code is not None and code.co_kwonlyargcount > len(function.__kwdefaults__ or ())


def hook_with_keyword(cls: type) -> str:
    """Return the hook that fails if ranks make ``cls`` of its attributes: it needs a keyword.

    Empty if there is none: ranks do not call hooks of the notebook.
    """
    first = {name: kind for kind, name in reversed([*_hooks(cls)])}
    needing = (
        f"{kind.__qualname__}.{name}"
        for name, kind in first.items()
        if _needs_keyword(vars(kind)[name])
    )
    return "" if "__main__" in _observers(cls) else next(needing, "")


def _observers(cls: type) -> set[str]:
    """Return the packages whose code runs when ``cls`` is made, without those of :data:`TRUSTED`."""
    return {_package(kind) for kind, _ in _hooks(cls)} - TRUSTED


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


# ── its statement ────────────────────────────────────────────────────────────────────────────────


def _files(needs: RequiredNames) -> list[str]:
    """Return the names of the notebook's cells, oldest first; without IPython that of the script."""
    script = needs.namespace.get("__file__")
    if needs.labels:
        return [*needs.labels, _TIMED]
    return [script] if isinstance(script, str) else []


def _text(file: str) -> str:
    return "".join(linecache.getlines(file))


@functools.lru_cache(maxsize=4096)
def _tree(text: str) -> ast.Module:
    """Return the syntax tree of a cell; an empty one if Python has not run it."""
    tree = syntax.parsed(text)
    try:
        _compile(tree, "<cell>")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])
    return tree


def _compile(
    tree: ast.Module, file: str, flags: int = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
) -> types.CodeType:
    with syntax.without_warnings():
        code: types.CodeType = compile(tree, file, "exec", flags, dont_inherit=True)
    return code


@functools.lru_cache(maxsize=4096)
def _node(text: str, name: str) -> ast.ClassDef | ast.Assign | None:
    """Return the last statement at the top level of a cell that makes a class of that name.

    It is the statement of the class, or an assignment such as ``Base = declarative_base()``.
    """
    found: ast.ClassDef | ast.Assign | None = None
    for one in (each for code in code_in(text) for each in _tree(code).body):
        match one:
            case ast.ClassDef(name=given) if given == name and not getattr(
                one, "type_params", None
            ):
                found = one
            case ast.Assign(targets=[ast.Name(id=given)], value=ast.Call()) if given == name:
                found = one
    return found


@functools.lru_cache(maxsize=1024)
def _compiled(text: str, name: str, file: str, flags: int) -> types.CodeType:
    """Return the code of a statement, with :data:`BASES` and :data:`METACLASS` in the place of its own."""
    node = copy.copy(_node(text, name))
    assert node is not None
    if isinstance(node, ast.ClassDef):
        node.bases = [ast.Starred(ast.Name(BASES, ast.Load()), ast.Load())]
        given = ast.keyword("metaclass", ast.Name(METACLASS, ast.Load()))
        node.keywords = [given if one.arg == "metaclass" else one for one in node.keywords]
    return _compile(ast.fix_missing_locations(ast.Module([node], [])), file, flags)


def _makes(file: str, cls: type, files: Sequence[str]) -> bool:
    """Whether the statement in a cell has made ``cls``, as far as can be seen."""
    node = _node(_text(file), cls.__qualname__)
    if not isinstance(node, ast.ClassDef):
        return node is not None and not _methods(cls, files)
    made = {*code_objects(_code(file, cls, files))}
    return (
        is_main(cls)
        and max(len(node.bases), 1) == len(vars(cls).get("__orig_bases__", cls.__bases__))
        and annotations_of(cls).keys() == {*_annotated(node)}
        and all(method.__code__ in made for method in _methods(cls, files))
    )


def _code(file: str, cls: type, files: Sequence[str]) -> types.CodeType:
    texts = {*map(type, vars(cls).get("__annotations__", {}).values())} == {str}
    flags = [method.__code__.co_flags & _FUTURE for method in _methods(cls, files)]
    is_future = any(flags) if flags else texts
    return _compiled(_text(file), cls.__qualname__, file, _FUTURE if is_future else 0)


def _methods(cls: type, files: Sequence[str]) -> list[types.FunctionType]:
    """Return the functions in cells that the body of a class has defined as its methods."""
    values = [each for value in vars(cls).values() for each in (value, *attributes_of(value))]
    own = [f for value in values for f in functions_in(value)]
    own = [f for f in own if f.__qualname__ == f"{cls.__qualname__}.{f.__name__}"]
    return [f for f in map(inspect.unwrap, own) if f.__code__.co_filename in files]


def _annotated(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id


# ── what it reads ────────────────────────────────────────────────────────────────────────────────


def _statement(cls: type, file: str, needs: RequiredNames) -> ClassStatement | None:
    """Return the statement; None if it is not certain that it makes the same class now."""
    name, files, space = cls.__qualname__, _files(needs), needs.namespace
    node, code = _node(_text(file), name), _code(file, cls, files)
    assert node is not None
    mentioned = {each for each in _mentioned(node) if each in space}
    classes = {
        each for each in mentioned if issubclass(type(space[each]), type) and is_main(space[each])
    }
    reads = _executed(code)
    if code.co_flags & _FUTURE or sys.version_info >= (3, 14):  # a library may evaluate annotations
        reads |= mentioned - classes
    given = {each: space[each] for each in sorted(reads) if _is_notebooks(each, needs)}
    is_lacking = any(each not in space and not hasattr(builtins, each) for each in reads)
    is_lacking = is_lacking or any(map(needs.is_provided_by_ranks, reads))
    if is_lacking or any(value is cls for value in given.values()) or _calls_notebook(node, space):
        return None
    values = {each for each in given if not isinstance(given[each], types.ModuleType)}
    if outdated := sorted(values.intersection(_bound_since(node, file, files))):
        needs.outdated[name] = outdated[0]
        return None
    return ClassStatement(name, code, _with_reads(given, cls, needs), tuple(sorted(classes)))


def _is_notebooks(name: str, needs: RequiredNames) -> bool:
    """Whether the notebook has a name, and a rank has nothing of its own for it."""
    is_own = needs.is_provided_by_ranks(name) or needs.is_builtin_here(name)
    return name in needs.namespace and not is_own


def _calls_notebook(node: ast.ClassDef | ast.Assign, space: Mapping[str, Any]) -> bool:
    """Whether a decorator or the called function may be of the notebook: it may keep what it has made."""
    called = node.decorator_list if isinstance(node, ast.ClassDef) else [node.value]
    return any(is_main(space.get(name)) for each in called for name in _names(each))


def _executed(code: types.CodeType) -> set[str]:
    """Return the names that a statement reads when it is executed."""
    analysis = DefiniteAssignment()
    analysis.run(code, at_end=False)
    names = {read.name for read in analysis.reads if not read.is_text}
    return {name for name in names if not name.startswith((".", "__"))}


def _mentioned(node: ast.ClassDef | ast.Assign) -> Iterator[str]:
    """Yield the names in annotations and texts of the body."""
    body = node.body if isinstance(node, ast.ClassDef) else []
    for one in body:
        if isinstance(one, ast.AnnAssign):
            yield from _names(one.annotation)
        parts = ast.walk(one) if isinstance(one, (ast.Assign, ast.AnnAssign)) else ()
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield from names_in_source(part.value)


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _bound_since(node: ast.stmt, file: str, files: Sequence[str]) -> Iterator[str]:
    """Yield the names that cells have assigned after the statement, other than by imports."""
    yield from _bound_in(_text(file), node.end_lineno or 0)
    for later in files[files.index(file) + 1 :]:
        yield from _bound_in(_text(later))


@functools.lru_cache(maxsize=4096)
def _bound_in(text: str, after: int = 0) -> frozenset[str]:
    body = [one for code in code_in(text) for one in _tree(code).body if one.lineno > after]
    tree = ast.Module(body, [])
    return frozenset(names_bound_by(_compile(tree, "<cell>"))) - imported_names(tree)


def _with_reads(given: Mapping[str, Any], cls: type, needs: RequiredNames) -> dict[str, Any]:
    """Return ``given`` with what its functions read, which the statement may call.

    ``cls`` and classes that derive from it were not there yet.
    """
    found, todo = dict(given), [*given.values()]
    while todo:
        for use in reads_of(todo.pop(), needs.namespace):
            name = use.read.name
            if name in found or use.read.is_text or not _is_notebooks(name, needs):
                continue
            value = needs.namespace[name]
            if not (issubclass(type(value), type) and cls in type.mro(value)):
                found[name] = value
                todo.append(value)
    return found


# ── attributes ───────────────────────────────────────────────────────────────────────────────────


def _bound_by(code: Any) -> set[str]:
    """Return the names that the body of a class binds."""
    is_body = isinstance(code, types.CodeType) and not code.co_flags & inspect.CO_OPTIMIZED
    return {*names_bound_by(code)} if is_body else set()


@functools.lru_cache(maxsize=4096)
def _attributes_set_in(text: str) -> frozenset[tuple[str, str]]:
    """Return the names and attributes in a cell's assignments such as ``Net.forward = forward``."""
    nodes = (node for code in code_in(text) for node in ast.walk(syntax.parsed(code)))
    found = (node for node in nodes if isinstance(node, ast.Attribute))
    stored = [(node.value, node.attr) for node in found if isinstance(node.ctx, ast.Store)]
    return frozenset((of.id, name) for of, name in stored if isinstance(of, ast.Name))


def defaults_of(attributes: Mapping[str, Any]) -> dict[str, list[Defaults]]:
    """Return the default arguments of the functions in the attributes of a class that are constants.

    An expression may have another value when it is evaluated again.
    """
    found = {
        name: [_constant_defaults(function) for function in functions_in(value)]
        for name, value in attributes.items()
    }
    return {name: of_functions for name, of_functions in found.items() if any(of_functions)}


def _constant_defaults(function: types.FunctionType) -> Defaults:
    found: Defaults = dict(enumerate(function.__defaults__ or ()))
    found |= function.__kwdefaults__ or {}
    return {key: value for key, value in found.items() if type(value) in ATOMS}


def _is_data(value: Any, packages: Set[str]) -> bool:
    """Whether a value is the one that the body has given: no method, and nothing of ``packages``."""
    kind = type(value)
    if hasattr(kind, "__get__") or issubclass(kind, (type, types.ModuleType)):
        return False
    items = [*value.keys(), *value.values()] if issubclass(kind, dict) else value
    is_container = issubclass(kind, (dict, list, tuple, set, frozenset))
    kinds = {kind, *(map(type, items) if is_container else ())}
    return packages.isdisjoint(_package(each) for each in kinds if not issubclass(each, type))
