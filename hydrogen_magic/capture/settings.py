"""Finds the notebook-wide settings that ranks need: of libraries, and what cells have changed in modules."""

from __future__ import annotations

import ast
import collections
import functools
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydrogen_magic.capture.callers import Code
from hydrogen_magic.capture.imports import Imports, module_name, sources_of
from hydrogen_magic.capture.lines import code_in
from hydrogen_magic.capture.values import CapturedItem
from hydrogen_magic.core import syntax
from hydrogen_magic.core.library_types import derives_from
from hydrogen_magic.core.units import first_of
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.node.worker.settings.attributes import is_property
from hydrogen_magic.node.worker.settings.provider import Stays
from hydrogen_magic.serialization.closure import Setting
from hydrogen_magic.serialization.importable import is_main, names_of

_NOT_SENT = {"__main__", "IPython", "hydrogen_magic", "ipykernel", "ipywidgets", "os", "sys"}
"""Packages whose attributes belong to one process."""
_CONTAINERS = (list, dict, set, collections.deque)
_MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault"}
_MUTATORS |= {"appendleft", "extendleft", "move_to_end", "popitem", "popleft", "reverse", "rotate"}
_MUTATORS |= {"difference_update", "intersection_update", "symmetric_difference_update"}
_MUTATORS |= {"sort", "subtract", "update"}
"""Methods of containers that change them."""
_MODEL_MUTATORS = (
    "load_state_dict|train|eval|to|cuda|cpu|half|float|double|bfloat16|set_params"
    r"|(partial_)?fit(_transform|_predict)?|[a-z]\w*[a-z0-9]_"
)
"""Methods of models and tensors that change them: ``weight.zero_()``."""
_CHANGES = re.compile("|".join([*sorted(_MUTATORS), _MODEL_MUTATORS]))
_MODELS = (("torch.nn", "Module"), ("sklearn.base", "BaseEstimator"))
_OF_PROVIDERS = {"matplotlib"}
"""Libraries whose own objects are read as settings: rcParams."""
_CODE = (types.FunctionType, types.BuiltinFunctionType, type, functools.partial)
"""What notebooks replace in modules that a cell only uses by others: ``torch.load``, the context of ssl."""
_MOST_LISTED = 10
"""Settings that a note names."""
_COMPUTED = "* (changed by a computed name or in __dict__)"
"""Stands for a name in a note: ``setattr(mylib, name, value)``, ``vars(mylib)[name] = value``."""
_UNSENT: Any = object()
"""Stands for a value that cannot be given to ranks item by item."""


# ── changes that cells have made ─────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Change:
    """A statement that changes an attribute: ``mylib.LR = 0.5``, ``mylib.CONFIG["lr"] = 0.5``."""

    root: str
    """Name in the notebook."""
    path: tuple[str, ...]
    """Attributes below it; empty if the object of that name is changed itself. The last one is
    :data:`_COMPUTED` if the statement does not show its name."""
    is_inside: bool
    """The contents of a list or dict are changed."""
    is_deletion: bool = False
    """The attribute is deleted."""
    method: str = ""
    """The method that changes the contents; empty if an item is set or deleted."""


@functools.lru_cache(maxsize=4096)
def _changes_in(source: str) -> tuple[_Change, ...]:
    nodes = [node for code in code_in(source) for node in ast.walk(syntax.parsed(code))]
    found = (
        change for find in (_changes_of, _changes_of_loop) for one in nodes for change in find(one)
    )
    return tuple(dict.fromkeys(found))


def _changes_of_loop(node: ast.AST) -> Iterator[_Change]:
    """Yield the changes in ``for module in (mylib, other):``, for each that the variable may refer to."""
    match node:
        case (
            ast.For(target, iterable)
            | ast.ListComp(generators=[ast.comprehension(target, iterable)])
        ):
            nodes = list(ast.walk(iterable))
            parts = {one.value for one in nodes if isinstance(one, ast.Attribute)}
            parts |= {one.func for one in nodes if isinstance(one, ast.Call)}
            named = [
                n for n in nodes if isinstance(n, (ast.Name, ast.Attribute)) and n not in parts
            ]
            shown = [found for one in named for found in _change(one)]
            variables = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
            for change in (found for one in ast.walk(node) for found in _changes_of(one)):
                if change.root in variables:
                    for one in shown:
                        yield replace(change, root=one.root, path=one.path + change.path)


def _changes_of(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        if not isinstance(node.ctx, ast.Load):
            yield from _change(node, is_deletion=isinstance(node.ctx, ast.Del))
        return
    match node:
        case ast.Call(ast.Attribute(owner, method)) if _CHANGES.fullmatch(method):
            yield from _change(owner, method=method)
        case ast.Call(
            ast.Name("setattr" | "delattr" as verb)
            | ast.Attribute(_, "setattr" | "delattr" as verb),
            [owner, name, *_],
        ):
            shown = str(name.value) if isinstance(name, ast.Constant) else _COMPUTED
            yield from _change(ast.Attribute(owner, shown), is_deletion=verb == "delattr")
        case ast.Call(ast.Attribute(_, "setitem"), [owner, item, _]):  # of pytest's monkeypatch
            yield from _change(ast.Subscript(owner, item))


def _change(node: ast.AST, method: str = "", is_deletion: bool = False) -> Iterator[_Change]:
    """Yield the change of what ``node`` names; below an item, that of the object which has the item."""
    is_inside = bool(method)
    path: list[str] = []
    while True:
        match node:
            case ast.Subscript(
                ast.Attribute(owner, "__dict__") | ast.Call(ast.Name("vars"), [owner]),
                ast.Constant(str(name)),
            ):
                path.insert(0, name)
            case ast.Attribute(owner, "__dict__") | ast.Call(ast.Name("vars"), [owner]):
                path, is_inside = [_COMPUTED], False
            case ast.Attribute(owner, name):
                path.insert(0, name)
            case ast.Subscript(owner):
                path, is_inside = [], True
            case ast.Name(name):
                is_attribute = is_deletion and not is_inside
                yield _Change(name, tuple(path), is_inside, is_attribute, method)
                return
            case _:
                return
        node = owner


class ModuleChanges:
    """Attributes of modules and their classes that the notebook has changed."""

    def __init__(
        self, namespace: Mapping[str, Any], imports: Imports, callers: Iterable[Code] = ()
    ) -> None:
        """``callers``: code that calls ranks; the cells of the notebook are looked at anyway."""
        self._code = [Code(sources_of(namespace, imports), namespace), *callers]

    def find(
        self,
        local: Collection[str],
        is_used: Callable[[str], bool],
        contents: Iterable[Setting] = (),
    ) -> list[Setting | Stays]:
        """Return the changes that ranks need, and those inside of objects that are not sent.

        ``local``: the local modules that are sent. ``is_used(module)``: whether ranks use other modules.
        ``contents``: those of objects of local modules that the notebook has under names of its own.
        """
        given = {(one.module, one.key): one for one in contents}
        found: dict[tuple[str, str], Setting | Stays] = {**given}
        for setting in (*self._by_statements, *_by_functions(local)):
            root = setting.module.partition(".")[0]
            is_small = is_plain(setting.value) or issubclass(type(setting.value), _CODE)
            is_wanted = is_small or setting.module in local or is_used(root)
            if is_wanted and root not in _NOT_SENT:
                is_sent = setting.value is not _UNSENT
                place = setting.module, setting.key
                if setting.provider == "assignment" and place not in given:
                    found[place] = setting
                found.setdefault(place, setting if is_sent else Stays(setting.label))
        return list(found.values())

    def assigned(self) -> set[tuple[str, str]]:
        """Return the modules and attributes to which cells have assigned other objects."""
        found = (one for one in self._by_statements if one.provider == "assignment")
        return {(one.module, one.key) for one in found}

    @functools.cached_property
    def _by_statements(self) -> list[Setting]:
        return [
            setting
            for code in self._code
            for change in dict.fromkeys(c for source in code.sources for c in _changes_in(source))
            for home, path in _places(change, code)
            for setting in _as_it_is(change, home, path, code.is_on_ranks)
        ]


def _as_it_is(change: _Change, home: str, path: list[str], is_on_ranks: bool) -> Iterator[Setting]:
    """Yield the present value of what was changed, if it can be sent or if that is worth a note."""
    if path[-1] == _COMPUTED:
        yield Setting("attribute", home, ".".join(path), _UNSENT)
        return
    try:
        owner: Any = functools.reduce(_part, path[:-1], sys.modules[home])
    except Exception:  # deleted since, or never executed; properties may raise anything
        return
    try:
        value = _part(owner, path[-1])
    except Exception:
        if change.is_deletion and hasattr(owner, "__dict__"):
            yield Setting("deletion", home, ".".join(path), "deleted")
        return
    package = str(type(value).__module__).partition(".")[0]
    if package in _OF_PROVIDERS or _is_original(value, home, path):
        return
    is_sent = not change.is_inside or _is_container(value)
    if is_sent or _changes(change.method, type(value)):
        is_sent = is_sent and (is_on_ranks or is_plain(value))
        provider = "attribute" if change.is_inside or not is_sent else "assignment"
        yield Setting(provider, home, ".".join(path), value if is_sent else _UNSENT)


def _places(change: _Change, code: Code) -> Iterator[tuple[str, list[str]]]:
    """Yield the module and the attributes below it that lead to a changed object."""
    value = code.value_of(change.root)
    is_list = change.path and type(value) in (list, tuple)  # a loop goes over it
    for each in value if is_list else [value]:
        yield from _places_below(each, change, code)


def _places_below(value: Any, change: _Change, code: Code) -> Iterator[tuple[str, list[str]]]:
    path = list(change.path)
    if issubclass(type(value), types.ModuleType):
        n_kept = 0 if change.is_inside else 1  # a module may be what was assigned
        while path[n_kept:] and issubclass(
            type(inner := _contents(value).get(path[0])), types.ModuleType
        ):
            value = inner
            del path[0]
        name = module_name(value)
        if name and path:
            yield name, path
    elif issubclass(type(value), type) and not is_main(value):
        if path:
            yield value.__module__, [*value.__qualname__.split("."), *path]
    elif not is_main(type(value)):
        for statement in code.importing(change.root, value):
            if statement.attribute:
                yield statement.module, [statement.attribute_of(change.root), *path]


def _is_original(value: Any, home: str, path: list[str]) -> bool:
    """Whether a module has the function or class of this name that it has defined, perhaps again."""
    if not issubclass(type(value), (type, types.FunctionType, types.BuiltinFunctionType)):
        return False
    if (value.__module__, value.__qualname__) != (home, ".".join(path)):
        return False
    code = getattr(value, "__code__", None)  # ``functools.wraps`` gives other functions its names
    return code is None or (code.co_name == path[-1] and value.__globals__ is names_of(home))


def _is_container(value: Any) -> bool:
    return issubclass(type(value), _CONTAINERS)


def _changes(method: str, kind: type) -> bool:
    """Whether a method changes an object of ``kind``, no container; an item does, without a method."""
    if derives_from(kind, "torch", "Tensor"):  # its ``to`` returns another one
        return not method or method.endswith("_")
    return not method or any(derives_from(kind, *model) for model in _MODELS)


def _contents(owner: Any) -> Mapping[str, Any]:
    """Return the attributes of a module or class as they are stored; a lazy module does not load."""
    found: Mapping[str, Any] = object.__getattribute__(owner, "__dict__")
    return found


def _part(owner: Any, name: str) -> Any:
    is_stored = issubclass(type(owner), (type, types.ModuleType)) and not is_property(owner, name)
    return _contents(owner)[name] if is_stored else getattr(owner, name)


def _by_functions(modules: Iterable[str]) -> Iterator[Setting]:
    """Yield the functions and classes of the notebook that local modules and their classes contain."""
    for home in sorted(name for name in {*modules} if name in sys.modules):
        for name, value in list(names_of(home).items()):
            if _is_notebooks(value):
                yield Setting("attribute", home, name, value)
            elif issubclass(type(value), type) and value.__module__ == home:
                for inner, method in list(vars(value).items()):
                    if _is_notebooks(method):
                        yield Setting("attribute", home, f"{value.__qualname__}.{inner}", method)


def _is_notebooks(value: Any) -> bool:
    kind = type(value)
    if kind is property:
        value = value.fget
    elif kind in (staticmethod, classmethod):
        value = value.__func__
    return issubclass(type(value), (types.FunctionType, type)) and is_main(value)


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SortedSettings:
    """The notebook's settings by how they travel."""

    plain: tuple[Setting, ...] = ()
    """Those whose values any process can unpickle."""
    pickled: tuple[Setting, ...] = ()
    """The others, for the stream."""
    note: str = ""
    """Warning that lists the settings that are not sent, if there are any."""

    def of_results(self) -> dict[str, Any]:
        """Return those on which results may depend, by their names for the user."""
        found = filter(_affects_results, (*self.plain, *self.pickled))
        return {setting.label: setting.value for setting in found}

    def of_objects(self) -> dict[str, Any]:
        """Return the others whose values are objects: formatters, functions."""
        found = (one for one in self.pickled if not _affects_results(one))
        return {setting.label: setting.value for setting in found}

    def of_session(self) -> dict[str, Any]:
        """Return those that a rank of a session gets once for each value.

        The order of filters of warnings counts, too: all of them are set again with each cell.
        """
        found = (*self.plain, *self.pickled)
        return {one.label: one.value for one in found if one.provider != "warnings"}

    def inventory(self, nbytes: Mapping[str, int]) -> list[CapturedItem]:
        """Return a row for each of the user's settings."""
        return [
            CapturedItem(one.label, "setting", nbytes.get(one.label, 0), _why(one))
            for one in filter(_is_users, (*self.plain, *self.pickled))
        ]


def _why(setting: Setting) -> str:
    return "the notebook's value" if setting.is_own else "differs from the default"


def sort(
    found: Iterable[Setting | Stays],
    is_picklable: Callable[[Setting], bool],
    late: Collection[tuple[str, str]] = (),
) -> SortedSettings:
    """Sort settings by how they travel. ``late``: places of those that follow the values in the stream."""
    plain: list[Setting] = []
    pickled: list[Setting] = []
    stays: list[Stays] = []
    for setting in found:
        if isinstance(setting, Stays):
            stays.append(setting)
        elif (setting.module, setting.key) in late:
            pickled.append(setting)
        elif is_plain(setting.value):
            plain.append(setting)
        elif is_picklable(setting):
            pickled.append(setting)
        else:
            stays.append(Stays(setting.label))
    return SortedSettings(tuple(plain), tuple(pickled), _stays_note(stays))


_OF_RESULTS = (
    "attribute",
    "assignment",
    "decimal",
    "deletion",
    "jax",
    "keras",
    "pandas",
    "sklearn",
    "torch",
)
_NOT_OF_RESULTS = (
    "jax: jax_debug_",
    "pandas: display.",
    "pandas: plotting.",
    "pandas: styler.",
    "sklearn: display",
    "sklearn: print_changed_only",
    "torch: anomaly",
    "torch: print options",
)


def _affects_results(setting: Setting) -> bool:
    """Whether results may depend on the setting."""
    return setting.provider in _OF_RESULTS and not setting.label.startswith(_NOT_OF_RESULTS)


def _is_users(setting: Setting) -> bool:
    """Whether it is the user's: libraries add filters of warnings and configure their loggers."""
    if setting.provider == "logging":
        return setting.module == "logging"
    return setting.provider != "warnings"


def _stays_note(stays: Sequence[Stays]) -> str:
    if not stays:
        return ""
    listed = first_of(dict.fromkeys(each.name for each in stays), _MOST_LISTED)
    return f"settings that are not sent: {listed}; set them in the cell or function that ranks run"
