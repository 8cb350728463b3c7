"""Calls functions with a module right after its import, or at once if it is imported already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], object]


class ImportHooks(MetaPathFinder):
    """Delegates to the other finders, and calls the hooks of a module after it has run."""

    def __init__(self) -> None:
        self.replaced: dict[str, Callable[[], ModuleSpec]] = {}
        """Specs of modules that are not searched for."""
        self._pending: dict[str, list[Hook]] = {}

    def add(self, name: str, hook: Hook) -> None:
        """Call ``hook`` with module ``name``: now if it is imported, otherwise once after its import."""
        module = sys.modules.get(name)
        if module is not None:
            hook(module)
            return
        self.cancel(name, hook)
        self._pending.setdefault(name, []).append(hook)
        self.put_first()

    def cancel(self, name: str, hook: Hook) -> None:
        """Do not call ``hook`` if it has not been called."""
        pending = self._pending.get(name, [])
        if hook in pending:
            pending.remove(hook)

    def put_first(self) -> None:
        """Be asked before all other finders."""
        if sys.meta_path[:1] != [self]:
            sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]

    def remove(self) -> None:
        """Forget all hooks."""
        self._pending.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.replaced:
            return self.replaced[fullname]()
        if fullname not in self._pending:
            return None
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
            pending = self._pending.pop(fullname, ()) if module.__name__ == fullname else ()
            for hook in pending:
                hook(module)

        try:
            run = loader.exec_module
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return  # a loader that cannot be wrapped: its module has no hooks


hooks = ImportHooks()
"""Those of this process."""
