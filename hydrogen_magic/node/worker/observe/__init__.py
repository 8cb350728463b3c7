"""Observers, which record a rank's activity automatically: one file for each library.

The entry points of the group ``hydrogen_magic.observers`` name them; the kernel sends the list. An observer
is attached right after the import of the module that it observes, so a rank that does not use tqdm does not
pay for it. Modules that were imported before are attached to at once.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import ModuleType

from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.worker.import_hooks import hooks
from hydrogen_magic.node.worker.observe import helpers, tqdm
from hydrogen_magic.node.worker.reporting import reporter

_OURS = __name__.partition(".")[0]
_failed: list[tuple[str, Exception]] = []
"""Observed modules and why their observers failed, before there was a reporter."""


def import_ahead(observers: Iterable[msg.ObserverSpec]) -> None:
    """Import those of this package whose libraries are imported: each rank would do it after its fork."""
    for one in observers:
        if one.module in sys.modules and one.function.startswith(f"{_OURS}."):
            with suppress(Exception):  # ranks report it
                pkgutil.resolve_name(one.function)


def install(observers: Iterable[msg.ObserverSpec]) -> None:
    """Attach observers to libraries, now or after their import. A second call has no effect."""
    if hooks.replaced:
        return
    hooks.replaced["tqdm.notebook"] = tqdm.notebook_spec
    for one in observers:
        hooks.add(one.module, partial(_attach, one.function))
    hooks.put_first()


def report_failures() -> None:
    """Report the observers that failed before this process had a reporter."""
    while _failed:
        helpers.cannot_observe(*_failed.pop(0))


def _attach(function: str, module: ModuleType) -> None:
    try:
        pkgutil.resolve_name(function)(module)
    except Exception as error:  # an observer that fails must not break the user's import
        if reporter.current() is None:
            _failed.append((module.__name__, error))
        else:
            helpers.cannot_observe(module.__name__, error)
