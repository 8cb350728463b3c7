"""Observers, which record a rank's activity automatically: one file for each library.

The entry points of the group ``hydrogen_magic.observers`` name them; the kernel sends the list. An observer
is attached right after the import of the module that it observes, so a rank that does not use tqdm does not
pay for it. Modules that were imported before are attached to at once.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hydrogen_magic.core.messages import ObserverSpec
from hydrogen_magic.node.worker import reporter
from hydrogen_magic.node.worker.observe import metrics, tqdm

__all__ = ["import_ours", "install", "report_failures"]

_failed: list[tuple[str, Exception]] = []
"""Observed modules and why their observers failed, before there was a reporter."""


def import_ours() -> None:
    """Import every observer of this package ahead: they import no library."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)


def install(observers: Iterable[ObserverSpec]) -> None:
    """Attach observers to imported libraries, and to others when they are imported. A second call has no
    effect.
    """
    if any(isinstance(finder, _ObserverFinder) for finder in sys.meta_path):
        return
    pending: dict[str, list[str]] = {}
    for one in observers:
        pending.setdefault(one.module, []).append(one.function)
    for name in list(pending):
        module = sys.modules.get(name)
        if module is not None:
            _attach(pending.pop(name), module)
    sys.meta_path.insert(0, _ObserverFinder(pending))


def report_failures() -> None:
    """Report the observers that failed before this process had a reporter."""
    while _failed:
        metrics.cannot_observe(*_failed.pop(0))


def _attach(functions: Sequence[str], module: ModuleType) -> None:
    for function in functions:
        home, _, name = function.partition(":")
        try:
            getattr(importlib.import_module(home), name)(module)
        except Exception as error:  # an observer that fails must not break the user's import
            if reporter.current() is None:
                _failed.append((module.__name__, error))
            else:
                metrics.cannot_observe(module.__name__, error)


class _ObserverFinder(MetaPathFinder):
    """Delegates to the other finders, and calls the observer after the module has run."""

    def __init__(self, pending: dict[str, list[str]]) -> None:
        self._pending = pending

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._pending:
            return None
        if fullname == "tqdm.notebook":
            return tqdm.notebook_spec()
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                self._call_after(spec.loader, fullname)
                return spec
        return None

    def _call_after(self, loader: Loader | None, fullname: str) -> None:
        """Wrap ``exec_module`` of this loader instance, so that the module's loader is unchanged."""
        if loader is None:
            return

        def exec_module(module: ModuleType) -> None:
            run(module)
            # A loader may serve several modules (a zip's), or a module may be loaded again.
            observers = self._pending.pop(fullname, ()) if module.__name__ == fullname else ()
            _attach(observers, module)

        try:
            run = loader.exec_module
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return  # a loader that cannot be wrapped: its module is not observed
