"""What the functions of local modules have changed in these modules: it is not sent, only listed."""

from __future__ import annotations

import ast
import collections
import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hydrogen_magic.capture.imports import parsed
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.closure import ModuleSource

_EMPTY: dict[str, Any] = {
    kind.__name__: kind()
    for kind in (
        *(list, dict, set, collections.deque),
        *(collections.OrderedDict, collections.Counter, collections.defaultdict),
    )
}
"""What calls without items create, such as ``deque()`` and ``defaultdict(list)``."""
_CONTAINERS = frozenset(map(type, _EMPTY.values()))
_LONGEST = 40
"""Characters of a value that is shown."""


class Difference(NamedTuple):
    """A value of a loaded module that is not that of its file."""

    module: str
    name: str
    """Its name in the module: ``state``, ``Counter.total``."""
    shown: str
    """The user's text for both values."""


def differences(modules: Mapping[str, ModuleSource]) -> Iterator[Difference]:
    """Yield the public values of loaded modules that are other than what their files assign.

    A function of the module has changed them, or the file was edited after the import. Only values to which
    the file assigns a literal or an empty container, once, are compared. Those that the import itself may
    change are left out, such as registries that decorators fill: a rank fills them as well.
    """
    sources = [module.source for name, module in modules.items() if name in sys.modules]
    for home in sorted(name for name in modules if name in sys.modules):
        contents = object.__getattribute__(sys.modules[home], "__dict__")
        for name, initial in _initial_values(modules[home].source).items():
            value = _found(contents, name, initial)
            if _differs(value, initial) and not _may_change(name, initial, sources):
                yield Difference(home, name, _shown(f"{home}.{name}", value, initial))


def _found(contents: Mapping[str, Any], name: str, default: Any) -> Any:
    owner, _, attribute = name.rpartition(".")
    if owner:
        kind = contents.get(owner)
        contents = vars(kind) if isinstance(kind, type) else {}
    return contents.get(attribute, default)


def _differs(value: Any, initial: Any) -> bool:
    """Compare without calling methods of the user's objects."""
    if issubclass(type(value), types.ModuleType):
        return False  # a submodule of that name
    if type(value) is not type(initial):
        return True
    if type(value) in _CONTAINERS and len(value) != len(initial):
        return True
    if is_plain(value, with_sets=True):
        return bool(value != initial)
    return is_plain(initial, with_sets=True)


def _shown(label: str, value: Any, initial: Any) -> str:
    return f"{label} = {_brief(value)} ({_brief(initial)} in its file)"


def _brief(value: Any) -> str:
    if is_plain(value, with_sets=True) and len(text := repr(value)) <= _LONGEST:
        return text
    kind = type(value).__name__
    if type(value) not in (str, bytes, tuple, *_CONTAINERS):
        return f"<{kind}>"
    return f"<{kind} of length {len(value):,}>" if value else "empty"


# ── what a file assigns ──────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=4096)
def _initial_values(source: str) -> dict[str, Any]:
    """Return the values of public names to which a module or one of its classes assigns a literal, once."""
    tree = parsed(source)
    if any(isinstance(node, ast.alias) and node.name == "*" for node in ast.walk(tree)):
        return {}  # what it binds is unknown
    module = compile(tree, "<module>", "exec", dont_inherit=True)
    found = dict(_assigned_once(tree.body, module))
    inner = {code.co_name: code for code in module.co_consts if isinstance(code, types.CodeType)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in inner:
            for name, value in _assigned_once(node.body, inner[node.name]):
                found[f"{node.name}.{name}"] = value
    return found


def _assigned_once(body: Iterable[ast.stmt], code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """Yield the names that ``body`` binds to literals. ``code``: its code, which shows all bindings."""
    stored = collections.Counter(
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in ("STORE_NAME", "STORE_GLOBAL")
    )
    for node in body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        value = _literal(node.value)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in () if value is _NO_LITERAL else names:
            if stored[name] == 1 and not name.startswith("_"):
                yield name, value


_NO_LITERAL: Any = object()


def _literal(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else ""
        name = function.id if isinstance(function, ast.Name) else name
        is_empty = not node.keywords and len(node.args) <= (name == "defaultdict")
        return _EMPTY.get(name, _NO_LITERAL) if is_empty else _NO_LITERAL
    try:
        return _NO_LITERAL if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _NO_LITERAL


# ── what an import changes ───────────────────────────────────────────────────────────────────────


def _may_change(name: str, initial: Any, sources: Sequence[str]) -> bool:
    """Whether the import of modules with these sources may change the value of that name.

    A container may be changed by all code that mentions it, another value only by an assignment.
    """
    names = _used_by_imports(tuple(sources))
    attribute = name.rpartition(".")[2]
    return attribute in (names.mentioned if type(initial) in _CONTAINERS else names.assigned)


class _Names(NamedTuple):
    mentioned: frozenset[str]
    """Names and attributes."""
    assigned: frozenset[str]
    """Those among them that are global names or attributes, and are assigned."""


@functools.lru_cache(maxsize=8)
def _used_by_imports(sources: tuple[str, ...]) -> _Names:
    """Return the names in all code that importing these modules may run.

    A function may run if its name is mentioned in such code, a special method if its class is.
    """
    regions = [_regions(source) for source in sources]
    found, todo = set[str](), [names for region in regions for names in region.get("", ())]
    assigned = set[str]()
    while todo:
        names = todo.pop()
        assigned |= names.assigned
        new = names.mentioned - found
        found |= new
        todo += [inner for name in new for region in regions for inner in region.get(name, ())]
    return _Names(frozenset(found), frozenset(assigned))


@functools.lru_cache(maxsize=4096)
def _regions(source: str) -> dict[str, list[_Names]]:
    """Return the names in a module's functions by the name that runs them; "" has what its import runs."""
    found: dict[str, list[_Names]] = {}
    _add_regions(parsed(source), "", "", found)
    return found


def _add_regions(node: ast.AST, region: str, owner: str, found: dict[str, list[_Names]]) -> None:
    """Add the code below ``node``, which belongs to ``region``. ``owner``: the class that contains it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_special = owner and child.name.startswith("__") and child.name.endswith("__")
            name = owner if is_special else child.name
            found.setdefault(name, []).extend(map(_names, child.body))
            outside = [*child.decorator_list, child.args]
            found.setdefault(region, []).extend(map(_names, outside))
        elif isinstance(child, ast.ClassDef):
            outside = [*child.decorator_list, *child.bases, *child.keywords]
            found.setdefault(region, []).extend(map(_names, outside))
            _add_regions(child, region, child.name, found)
        else:
            found.setdefault(region, []).append(_names(child))


def _names(node: ast.AST) -> _Names:
    mentioned, assigned = set[str](), set[str]()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            mentioned.add(each.id)
        elif isinstance(each, ast.Attribute):
            mentioned.add(each.attr)
            assigned |= set() if isinstance(each.ctx, ast.Load) else {each.attr}
        elif isinstance(each, ast.Global):
            assigned.update(each.names)
    return _Names(frozenset(mentioned | assigned), frozenset(assigned))
