"""Imports the notebook's local modules from the closure, in their state at the start of the cell."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from hydrogen_magic.node.worker.import_hooks import hooks
from hydrogen_magic.node.worker.session import redefinition
from hydrogen_magic.serialization.closure import ModuleSource
from hydrogen_magic.serialization.importable import names_of


class ClosureFinder(importlib.abc.MetaPathFinder):
    """Finds modules in a closure before the search on disk."""

    def __init__(self, modules: Mapping[str, ModuleSource]) -> None:
        self.modules = dict(modules)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        module = self.modules.get(fullname)
        if module is None:
            return None  # for example an extension module: found on disk through the package's path
        loader = _ClosureLoader(fullname, module)
        folders = [os.path.dirname(loader.path)] if module.is_package else None
        return importlib.util.spec_from_file_location(
            fullname, module.path, loader=loader, submodule_search_locations=folders
        )


class _ClosureLoader(importlib.machinery.SourceFileLoader):
    """Runs one module from its source; data files beside it are read from the disk."""

    def __init__(self, name: str, module: ModuleSource) -> None:
        is_folder = not module.path.endswith(".py")
        super().__init__(
            name, os.path.join(module.path, "__init__.py") if is_folder else module.path
        )
        self._source = module.source

    def get_source(self, fullname: str) -> str:
        return self._source

    def get_code(self, fullname: str) -> types.CodeType:
        show_source(self.path, self._source)  # tracebacks show what runs, not what the disk has
        return compile(self._source, self.path, "exec", dont_inherit=True)


class SessionFinder(ClosureFinder):
    """Finds the modules of all cells of a session so far, in their latest state."""

    def __init__(self, following: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """``following``: entered while instances follow the classes of edited modules."""
        super().__init__({})
        self._following = following

    def update(self, modules: Mapping[str, ModuleSource]) -> list[str]:
        """Take the sources of a cell; return warnings.

        An imported module with another source than before is loaded again, in place, as IPython's autoreload
        does. Raises what its code raises, and the next cell tries again.
        """
        if self not in sys.meta_path:
            for name in modules:
                sys.modules.pop(name, None)
            _put_first(self)
        known = self.modules
        differing = {n for n in modules.keys() & known.keys() if modules[n] != known[n]}
        edited = [n for n in sys.modules if n in differing] if differing else []
        known.update({n: module for n, module in modules.items() if n not in edited})
        if not edited:
            return []
        with self._following():
            # A module stands before those that its import has imported.
            warnings = [text for n in reversed(edited) for text in self._reload(n, modules[n])]
        return [*warnings, f"the ranks loaded edited modules again: {', '.join(sorted(edited))}"]

    def _reload(self, name: str, source: ModuleSource) -> list[str]:
        module, before = sys.modules[name], self.modules[name]
        earlier = dict(vars(module))
        self.modules[name] = source
        try:
            importlib.reload(module)
        except BaseException:
            self.modules[name] = before
            raise
        users = [
            sys.modules["__main__"],
            *(sys.modules[n] for n in self.modules if n in sys.modules),
        ]
        return redefinition.replace(earlier, vars(module), [vars(user) for user in users])


def install(modules: Mapping[str, ModuleSource]) -> None:
    """Import ``modules`` from the closure, and forget earlier imports of their names."""
    if not modules:
        return
    for name in modules:
        sys.modules.pop(name, None)
    _put_first(ClosureFinder(modules))


def _put_first(finder: ClosureFinder) -> None:
    """Ask ``finder`` before all others but the import hooks, which call it: its modules are observed."""
    sys.meta_path.insert(int(sys.meta_path[:1] == [hooks]), finder)


def put_folder_first(folder: str) -> None:
    """Put a script's folder first on ``sys.path``, as Python does, also before modules that are loaded.

    This process may have been forked from one that has loaded others of their names: the notebook's imports.
    A package stays if it has loaded extension modules, which another copy of it could not load again.
    """
    sys.path.insert(0, folder)
    names = set[str]()
    with suppress(OSError):  # one that may be searched, but not listed
        names = {entry.removesuffix(".py") for entry in os.listdir(folder)}
    for name in names & {*sys.modules} - {"__main__", "hydrogen_magic"}:
        found = importlib.machinery.PathFinder.find_spec(name, [folder])
        loaded = _file_of(name)
        if found is None or not loaded or found.origin in (None, loaded):
            continue
        parts = [part for part in sys.modules if part == name or part.startswith(f"{name}.")]
        has_extensions = any(_file_of(part).endswith(_EXTENSIONS) for part in parts)
        if not (has_extensions and found.submodule_search_locations):
            for part in parts:
                del sys.modules[part]


_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)


def _file_of(module: str) -> str:
    return str(names_of(module).get("__file__") or "")


def show_source(filename: str, text: str) -> None:
    """Make ``text`` the source of ``filename`` for tracebacks and ``inspect``."""
    # Without a modification time, linecache keeps the entry regardless of the disk.
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
