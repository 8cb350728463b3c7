"""Notebook-wide settings: read in the kernel, applied on every rank.

A provider knows the settings of one library: it reads those that differ from the library's defaults, and
applies them. A library that a process has not imported is never imported for this: the kernel has no settings
of it, and a rank applies them after the import.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from hydrogen_magic.node.worker.import_hooks import hooks
from hydrogen_magic.node.worker.settings import (
    attributes,
    libraries,
    loggers,
    python,
    torch,
    warning_filters,
)
from hydrogen_magic.node.worker.settings.provider import Provider, Stays
from hydrogen_magic.serialization.closure import Setting

_PROVIDERS: Mapping[str, Provider] = {
    **python.PROVIDERS,
    **warning_filters.PROVIDERS,
    **loggers.PROVIDERS,
    **torch.PROVIDERS,
    **libraries.PROVIDERS,
    **attributes.PROVIDERS,
}
"""By the module of the library, which has settings if it is imported."""


def read() -> list[Setting | Stays]:
    """Return the settings of this process that differ from the libraries' defaults. Imports nothing."""
    found: list[Setting | Stays] = []
    for name, provider in _PROVIDERS.items():
        module = sys.modules.get(name)
        try:
            found += [] if module is None else provider.read(module)
        except Exception as error:  # another version of the library
            found.append(Stays(f"those of {name} ({type(error).__name__}: {error})"))
    return found


def concerns_imports(setting: Setting) -> bool:
    """Whether the setting should be applied before the notebook's imports, whose warnings it hides."""
    return setting.provider == "warnings" and setting.value[0] != "error"


def apply(settings: Iterable[Setting], warn: Callable[[str], object]) -> ExitStack:
    """Apply ``settings`` to this process; closing the result undoes it.

    ``warn``: called with a message for each setting that cannot be applied.
    """
    undo = ExitStack()
    undo.callback(hooks.remove)
    for setting in settings:
        _apply_once_imported(setting, undo, warn)
    return undo


class NotebookSettings:
    """The notebook's settings on a rank that runs several cells.

    What the rank's own cells have set stays until the notebook changes the same setting. Settings that a
    cell no longer brings are undone: the notebook has them at their defaults again. Attributes of modules
    have no default, and a cell that does not use a module may not bring them.
    """

    def __init__(self) -> None:
        self._undo: dict[str, ExitStack] = {}
        """By label."""
        self._applied: dict[str, tuple[str, str, Any]] = {}
        """By label: the digest of the value, the module, and its spec then, which a reload replaces."""

    def apply(
        self,
        settings: Iterable[Setting],
        digests: Mapping[str, str],
        warn: Callable[[str], object],
    ) -> None:
        """Apply some of the cell's settings; ``digests``: see :attr:`SessionSends.settings`.

        ``warn``: as in :func:`apply`.
        """
        for setting in settings:
            label, digest = setting.label, digests.get(setting.label)
            if self.is_applied(label, digest):
                continue
            undo, is_first = ExitStack(), label not in self._undo
            if not setting.is_own and (is_first or setting.module not in sys.modules):
                undo = self._undo.setdefault(label, undo)
            _apply_once_imported(setting, undo, warn)
            if digest is not None:
                hooks.add(setting.module, partial(self._note, label, digest, setting.module))

    def _note(self, label: str, digest: str, name: str, module: types.ModuleType) -> None:
        self._applied[label] = digest, name, getattr(module, "__spec__", None)

    def is_applied(self, label: str, digest: str | None) -> bool:
        """Whether the rank has got a setting with this value since it last loaded the module."""
        applied, name, spec = self._applied.get(label, (None, "", None))
        module = sys.modules.get(name)
        is_same = module is not None and getattr(module, "__spec__", None) is spec
        return digest is not None and digest == applied and is_same

    def undo_others(self, labels: Collection[str], warn: Callable[[str], object]) -> None:
        """Undo what earlier cells have brought, except for the settings with these ``labels``."""
        for label in self._undo.keys() - labels:
            self._applied.pop(label, None)
            try:
                self._undo.pop(label).close()
            except Exception as error:  # a cell has removed what the setting belongs to
                raised = f"{type(error).__name__}: {error}"
                warn(f"the notebook's earlier setting {label} cannot be undone: {raised}")


def _apply_once_imported(setting: Setting, undo: ExitStack, warn: Callable[[str], object]) -> None:
    """Apply a setting now, or after the import of its library."""
    hook = partial(_apply, setting, undo, warn)
    undo.callback(hooks.cancel, setting.module, hook)
    hooks.add(setting.module, hook)


def _apply(
    setting: Setting, undo: ExitStack, warn: Callable[[str], object], module: types.ModuleType
) -> None:
    try:
        undo.callback(_PROVIDERS[setting.provider].apply(module, setting.key, setting.value))
    except Exception as error:  # another version of the library, an attribute that cannot be set
        raised = f"{type(error).__name__}: {error}"
        warn(f"the notebook's {setting.provider} setting {setting.key} is not applied: {raised}")
