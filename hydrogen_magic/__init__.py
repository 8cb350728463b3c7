"""Train on many ranks from a notebook cell: ``%load_ext hydrogen_magic``, then ``%%distributed --np 4``.

In a notebook: the magics. From Python: :func:`run`, :func:`launch` and :class:`Gang`; :func:`dataset` for
data, and for Spark :func:`udf`. On a rank: ``rank local_rank world_size device log track span shard
checkpoint``, which also work in a plain process.

Names are loaded on first use, so that a rank that imports this package imports neither IPython nor
other modules of the notebook's side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from hydrogen_magic import errors
    from hydrogen_magic.driver.calls import launch, run
    from hydrogen_magic.driver.datasets.dataset import dataset
    from hydrogen_magic.driver.gang import Gang
    from hydrogen_magic.driver.history import history
    from hydrogen_magic.driver.known_gangs import gangs, load_results
    from hydrogen_magic.driver.sweep import last_sweep
    from hydrogen_magic.inference.spark.function import udf
    from hydrogen_magic.node.worker.api import (
        device,
        local_rank,
        log,
        rank,
        span,
        track,
        world_size,
    )
    from hydrogen_magic.node.worker.checkpoints import checkpoint
    from hydrogen_magic.node.worker.data.shard import shard

__version__ = "0.1.0"

__all__ = [
    "Gang",
    "checkpoint",
    "dataset",
    "device",
    "errors",
    "gangs",
    "history",
    "last_sweep",
    "launch",
    "load_results",
    "local_rank",
    "log",
    "rank",
    "run",
    "shard",
    "span",
    "track",
    "udf",
    "world_size",
]

_HOMES = {
    "Gang": "hydrogen_magic.driver.gang",
    "dataset": "hydrogen_magic.driver.datasets.dataset",
    "gangs": "hydrogen_magic.driver.known_gangs",
    "history": "hydrogen_magic.driver.history",
    "last_sweep": "hydrogen_magic.driver.sweep",
    "launch": "hydrogen_magic.driver.calls",
    "load_results": "hydrogen_magic.driver.known_gangs",
    "run": "hydrogen_magic.driver.calls",
    "shard": "hydrogen_magic.node.worker.data.shard",
    "udf": "hydrogen_magic.inference.spark.function",
    **dict.fromkeys(
        ("device", "local_rank", "log", "rank", "span", "track", "world_size"),
        "hydrogen_magic.node.worker.api",
    ),
}

_MODULES = {
    "checkpoint": "hydrogen_magic.node.worker.checkpoints.checkpoint",
    "errors": "hydrogen_magic.errors",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ImportError:  # the ranks of a cluster have only the ranks' part of this package
        from hydrogen_magic.node.worker.nesting import refuse_nested

        if not _HOMES[name].startswith("hydrogen_magic.node.worker"):
            refuse_nested()
        raise
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by ``%load_ext hydrogen_magic``."""
    from hydrogen_magic.notebook import extension

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Called by ``%unload_ext hydrogen_magic``."""
    from hydrogen_magic.notebook import extension

    extension.unload(shell)
