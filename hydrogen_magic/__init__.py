"""Train on many ranks from a notebook cell: ``%load_ext hydrogen_magic``, then ``%%distributed --np 4``.

In a notebook: the magics. From Python: :func:`run`, :func:`launch` and :class:`Gang`. On a rank:
``rank local_rank world_size device log track span``, which also work in a plain process.

Names are loaded when first used, so that a rank which imports this package imports neither IPython
nor anything else that only the notebook's side needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from hydrogen_magic import errors
    from hydrogen_magic.handle import Gang
    from hydrogen_magic.runner import gangs, launch, run
    from hydrogen_magic.worker.api import (
        device,
        local_rank,
        log,
        rank,
        span,
        track,
        world_size,
    )

__version__ = "0.1.0"

__all__ = [
    "Gang",
    "device",
    "errors",
    "gangs",
    "launch",
    "local_rank",
    "log",
    "rank",
    "run",
    "span",
    "track",
    "world_size",
]

_HOMES = {
    "Gang": "hydrogen_magic.handle",
    "gangs": "hydrogen_magic.runner",
    "launch": "hydrogen_magic.runner",
    "run": "hydrogen_magic.runner",
    **dict.fromkeys(
        ("device", "local_rank", "log", "rank", "span", "track", "world_size"),
        "hydrogen_magic.worker.api",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("hydrogen_magic.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by ``%load_ext hydrogen_magic``."""
    from hydrogen_magic import magics

    magics.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Called by ``%unload_ext hydrogen_magic``."""
    from hydrogen_magic import magics

    magics.unload(shell)
