"""Decides which names of the notebook a closure needs, before anything is pickled.

:meth:`RequiredNames.add` has all rules but two: :class:`.build.Builder` decides about values that are only
perhaps read, and :mod:`.session_cell` about what the ranks of a session have.
"""

from __future__ import annotations

import builtins
import copy
import difflib
import types
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from keyword import iskeyword
from typing import Any

from hydrogen_magic.capture.imports import Imports, Statement, module_name
from hydrogen_magic.capture.modules import LocalModules
from hydrogen_magic.capture.reachable import FunctionRead, reads_of, stored_names
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization.code_names import CODE

_LAZY_IMPORT = getattr(types, "LazyImportType", None)
PROVIDED = frozenset({"get_ipython", "display"})
"""Names that IPython provides for every cell, and the rank provides too."""

MAX_POSSIBLE_BYTES = 1 << 20
"""A larger value that the cell most likely replaces before it reads it is not worth sending."""

_MODULE_NAMES = frozenset(
    {"__name__", "__doc__", "__builtins__", "__annotations__", "__package__", "__spec__"}
    | {"__loader__", "__debug__", "__class__", "__module__", "__qualname__"}
)


class RequiredNames:
    """Sorts the names that a closure reads into values, imports, names provided by ranks, and errors."""

    def __init__(
        self,
        namespace: Mapping[str, Any],
        imports: Imports,
        labels: Mapping[str, str],
        assigned: Iterable[str] = (),
        binds_unknown_names: bool = False,
        on_ranks: Collection[str] = (),
    ) -> None:
        """``on_ranks``: names that the ranks of a session have."""
        self.namespace = namespace
        self.on_ranks = on_ranks
        self.imports = imports
        self.labels = labels
        self.local = LocalModules()
        """The local modules that are sent; copies of this object share them."""
        self.assigned = set(assigned)
        self.imported: frozenset[str] = frozenset()
        """Names that the cell itself imports."""
        self.binds_unknown_names = binds_unknown_names
        """The cell may bind any name: none counts as undefined."""
        self.values: dict[str, str] = {}
        """Names whose values are sent, and why."""
        self.statements: dict[str, tuple[Statement, str]] = {}
        """Import statements by source, and why."""
        self.only_on_ranks: dict[str, str] = {}
        """Names that only the ranks of the session have, and why."""
        self.provided_by_ranks: set[str] = set()
        self.read: set[str] = set()
        """Every requested name."""
        self.possible: dict[str, str] = {}
        """Names that are perhaps read, and why: their values are sent if they can be."""
        self.unsure: frozenset[str] = frozenset()
        """Names of :attr:`values` whose values are sent only if they can be."""
        self.outdated: dict[str, str] = {}
        """Classes that their statements may not make again -> a name that one reads, and that was assigned
        since."""
        self.replaced: Callable[[], Container[tuple[str, str]]] = frozenset
        """Returns the modules and attributes to which cells have assigned other objects."""
        self._missing: dict[str, str] = {}
        """Name -> ``line 3: y = scale(x)``, or ``used by f() in Cell In[3], line 2``."""
        self._unread: list[tuple[Any, frozenset[str], bool]] = []
        self._is_reading = False
        self._done: dict[str, tuple[frozenset[str], bool]] = {}
        """By name: as which it was requested, ``bound`` and ``may_lack``."""
        self._only_defined: set[int] = set()
        """Ids of the notebook's objects that may lack names, since nothing that runs uses them."""

    def add(
        self, name: str, why: str, bound: frozenset[str] = frozenset(), may_lack: bool = False
    ) -> None:
        """Request ``name``. ``bound``: names the cell has bound by then; they are not captured.

        ``may_lack``: it may be undefined without an error, and so may what it reads.
        """
        self.read.add(name)
        if name in bound or self._is_done(name, bound, may_lack):
            return
        if name in self.namespace:
            self._done[name] = bound, may_lack
            _import_lazy(self.namespace, name)
        if self.is_provided_by_ranks(name):
            self.provided_by_ranks.add(name)
        elif name in _MODULE_NAMES or self.is_builtin_here(name):
            return
        elif name in self.namespace:
            self._add_value(name, self.namespace[name], why, bound, may_lack)
        elif name in self.on_ranks:
            self.only_on_ranks.setdefault(name, why)
        elif not (may_lack or hasattr(builtins, name)):
            self._missing.setdefault(name, why)

    def send_imported(self, name: str) -> None:
        """Request the value of ``name`` in place of its import."""
        found = [text for text, (statement, _) in self.statements.items() if statement.name == name]
        for text in found:
            _, self.values[name] = self.statements.pop(text)

    def replace_on_ranks(self, name: str, on_some_rank: Collection[str]) -> None:
        """Request a function or class of which the ranks have an earlier version.

        What it reads comes with it, unless a rank has that: the cell does not use the name itself.
        """
        self.values[name] = f"the ranks have an earlier {name}"
        for use in reads_of(self.namespace[name], self.namespace):
            read = use.read.name
            if read in on_some_rank or read not in self.namespace:
                self.ignore(read)
            elif not use.read.is_text:
                self.add(read, f"used by {use.function}")

    def ignore(self, name: str) -> None:
        """Regard ``name`` as resolved, unless it was requested."""
        self._done.setdefault(name, (frozenset(), False))

    def _is_done(self, name: str, bound: frozenset[str], may_lack: bool) -> bool:
        """Return whether an earlier request of ``name`` has found all that this one would."""
        if name not in self._done:
            return False
        done, could_lack = self._done[name]
        return done <= bound and (may_lack or not could_lack)

    def add_reads(self, value: Any, bound: frozenset[str] = frozenset()) -> None:
        """Request the names that the notebook's functions in ``value`` read, directly or by each other."""
        self._unread.append((value, bound, id(value) in self._only_defined))
        if self._is_reading:
            return  # the loop below reads it: functions may form a longer chain than Python's stack
        self._is_reading = True
        try:
            while self._unread:
                self._read(*self._unread.pop())
        finally:
            self._is_reading = False

    def _read(self, value: Any, bound: frozenset[str], may_lack: bool) -> None:
        self.assigned.update(stored_names(value, self.namespace))
        for use in reads_of(value, self.namespace):
            name, why = use.read.name, self._describe(use)
            if not use.read.is_text:
                self.add(name, why, bound, may_lack or use.guarded)
            elif name in self.namespace and name not in bound:
                self.possible.setdefault(name, why)

    def _describe(self, use: FunctionRead) -> str:
        label = self.labels.get(use.filename)
        where = f" in {label}" if label else ""
        return f"used by {use.function}{where}, line {use.read.line}"

    def check(self) -> None:
        """Raise CaptureError if a name is undefined."""
        if self.binds_unknown_names:
            return
        missing = [(name, why) for name, why in self._missing.items() if name not in self.assigned]
        if missing:
            raise CaptureError("\n".join(self._undefined_text(name, why) for name, why in missing))

    def copy(self) -> RequiredNames:
        """Return a copy to which names can be added on trial."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, set)) and value is not self.namespace:
                setattr(other, name, value.copy())
        return other

    def add_possible(self, other: RequiredNames) -> None:
        """Add the names that ``other`` found in addition."""
        self.possible.update({**other.possible, **other.values})
        self.statements = {**other.statements, **self.statements}
        self.provided_by_ranks |= other.provided_by_ranks

    def is_known(self, name: str) -> bool:
        """Whether ``name`` is resolved: by its own value, an import, or the cell itself."""
        if name in self._done or name in self.assigned:
            return True
        if name in self.on_ranks and name not in self.namespace:
            return True
        return name not in self.namespace and hasattr(builtins, name)

    def is_provided_by_ranks(self, name: str) -> bool:
        """Whether a rank provides ``name`` itself."""
        if name in PROVIDED:
            return name not in self.namespace or _is_ipythons(self.namespace[name])
        return False

    def is_builtin_here(self, name: str) -> bool:
        """Whether the notebook has IPython's version of a name that plain Python has on the rank."""
        return name in ("open", "exit", "quit") and _is_ipythons(self.namespace.get(name))

    def _add_value(
        self, name: str, value: Any, why: str, bound: frozenset[str], may_lack: bool
    ) -> None:
        statements = self.imports.giving(name, value)
        module = module_name(value)
        if not statements and module:
            statements = [Statement(_binding(name, module), name, module)]
        for statement in statements:
            if statement.name == "*":  # it would also bind other names, which may have newer values
                text = f"from {statement.module} import {name}"
                statement = Statement(text, name, statement.module, name)
            self.statements.setdefault(statement.text, (statement, why))
        if not statements:
            self.values.setdefault(name, why)
            (self._only_defined.add if may_lack else self._only_defined.discard)(id(value))
            self.add_reads(value, bound)

    def _undefined_text(self, name: str, where: str) -> str:
        near = similar(name, [*self.namespace, *self.assigned, *self.on_ranks])
        do = f"did you mean `{near[0]}`? Otherwise, define it" if near else "define it"
        if name == "hm":  # as the documentation abbreviates this package
            do = "run `import hydrogen_magic as hm`"
        return f"`{name}`, {where}, is not defined: {do} in an earlier cell or in this one, before it is used"

    def ordered_values(self, out: Sequence[str] = ()) -> list[str]:
        """Return the names whose values are sent: functions and classes, those in ``out``, the others.

        Unpickling a value may call a function, so functions come first. Objects shared by two values count
        for the first of them.
        """

        def place(name: str) -> tuple[bool, bool]:
            return not issubclass(type(self.namespace[name]), CODE), name not in out

        return sorted(self.values, key=place)


def _import_lazy(namespace: Mapping[str, Any], name: str) -> None:
    """Make a ``lazy import`` of Python 3.15, as Python does when code first uses the name."""
    value = namespace[name]
    if type(value) is _LAZY_IMPORT and isinstance(namespace, dict):
        with suppress(Exception):  # modules run any code; the value is refused by name
            namespace[name] = value.resolve()


def _binding(name: str, module: str) -> str:
    """Return a statement that imports ``module`` as ``name``."""
    if not all(part.isidentifier() and not iskeyword(part) for part in module.split(".")):
        return f"{name} = __import__('importlib').import_module({module!r})"  # such as 01_prepare
    return f"import {module}" if module == name else f"import {module} as {name}"


def _is_ipythons(value: Any) -> bool:
    """Whether IPython put ``value`` into the notebook's namespace."""
    kind = type(value)
    is_function = issubclass(kind, (types.FunctionType, types.MethodType))
    home = value.__globals__.get("__name__") if is_function else kind.__module__
    return str(home).partition(".")[0] in ("IPython", "ipykernel", "google")


def similar(name: str, candidates: Iterable[str]) -> list[str]:
    """Return public names like ``name``, best first: those that differ in case alone.

    Names of builtins, such as IPython's own ``open``, are none of the user's.
    """
    public = [
        each for each in candidates if not each.startswith("_") and not hasattr(builtins, each)
    ]
    same = [candidate for candidate in public if candidate.lower() == name.lower()]
    close = difflib.get_close_matches(name, public, n=3, cutoff=0.7)
    return list(dict.fromkeys([*same, *close]))[:3]
