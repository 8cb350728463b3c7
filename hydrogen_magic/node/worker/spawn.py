"""Children that ``multiprocessing`` spawns from a rank: they get the notebook's classes too.

``multiprocessing`` pickles the data for its children, with functions and classes of ``__main__`` by name. A
rank's ``__main__`` is the notebook, which a spawned child cannot import: such objects are pickled by value.
"""

from __future__ import annotations

import io
import multiprocessing.context
import multiprocessing.reduction
import multiprocessing.spawn
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

from hydrogen_magic.node.worker import module_importer
from hydrogen_magic.serialization.bindings import UNBOUND, Binding
from hydrogen_magic.serialization.closure import ClosureManifest
from hydrogen_magic.serialization.code_names import global_names
from hydrogen_magic.serialization.importable import is_main
from hydrogen_magic.serialization.instances import Reduced
from hydrogen_magic.serialization.pickler import Pickler

_get_preparation_data: Callable[..., dict[str, Any]] = multiprocessing.spawn.get_preparation_data


class _SpawnedChildren:
    """What hooks of ``multiprocessing``, which belong to a class, know of this process."""

    header: ClosureManifest | None = None
    has_fresh_children = False
    """Forked children have the notebook's classes: until others exist, names are sufficient."""


_process = _SpawnedChildren()


def install(header: ClosureManifest) -> None:
    """Make ``multiprocessing`` in this process pickle objects of the notebook by value."""
    _process.header = header
    # pickle asks the class for this hook, if it has it, whenever it starts
    multiprocessing.reduction.ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign]
    multiprocessing.spawn.get_preparation_data = _prepare


def _prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Prepend the set-up of a child to the data that it reads."""
    _process.has_fresh_children = True
    data = _get_preparation_data(*args, **kwargs)
    return {"hydrogen_magic": _child_setup(), **data}


def _child_setup() -> Reduced:
    """Return what installs this module in a child that unpickles it before it knows its ``sys.path``."""
    own = _process.header
    assert own is not None
    header = ClosureManifest("call", modules=own.modules, sources=own.sources)
    code = (
        f"import sys, pickle; sys.path[:] = {sys.path!r}\n"
        "from hydrogen_magic.node.worker import spawn\n"
        f"spawn.enter_child(pickle.loads({pickle.dumps(header)!r}))"
    )
    return Reduced((exec, (code, {})))


def enter_child(header: ClosureManifest) -> None:
    """Set up a spawned child."""
    _process.has_fresh_children = True
    for filename, text in header.sources.items():
        module_importer.show_source(filename, text)
    module_importer.install(header.modules)
    install(header)


def _reduce(forking_pickler: Any, obj: Any) -> Any:
    """Implements ``ForkingPickler.reducer_override``."""
    if not _process.has_fresh_children:
        return NotImplemented
    helper = forking_pickler.__dict__.get("_by_value")
    if helper is None:
        helper = forking_pickler._by_value = _SpawnPickler()
    kind = type(obj)
    is_code = issubclass(kind, (type, types.FunctionType))
    if is_code or kind in helper.handlers or helper.says_how_to_pickle(kind):
        return helper.reducer_override(obj)
    table = forking_pickler.dispatch_table
    if kind not in table and kind in helper.dispatch_table:
        return helper.dispatch_table[kind](obj)
    return NotImplemented


class _SpawnPickler(Pickler):
    """Reduces functions, classes and other globals of the notebook; it never writes."""

    main_by_value = True

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self._sent: set[str] = set()

    def _add_storage_handlers(self) -> None:
        """Leave tensors to torch's own reducers, which share memory with the child."""

    def _add_numpy_handlers(self) -> None:
        """Leave arrays unchanged."""

    def globals_for(self, function: types.FunctionType) -> dict[str, Any]:
        namespace = function.__globals__
        found = {}
        for name in global_names(function.__code__):
            if name in namespace and name not in self._sent:
                self._sent.add(name)
                found[name] = namespace[name]
        return found

    def binding(self, obj: Any, name: str) -> Binding:
        main = sys.modules["__main__"].__dict__
        return Binding(name, False) if is_main(obj) and main.get(name) is obj else UNBOUND
