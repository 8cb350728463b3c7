"""Observer of ``torch.multiprocessing``: warns of processes that train apart from the gang.

Launchers for notebooks start their processes by it: Accelerate's, Ignite's and Lightning's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker import reporter as _reporter
from hydrogen_magic.node.worker.observe.span_recording import put


def attach(module: ModuleType) -> None:
    """Wrap ``start_processes`` of ``torch.multiprocessing.spawn``, which ``spawn`` calls, too."""
    put(module, "torch.multiprocessing", "start_processes", _noted(module.start_processes))


def _noted(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        reporter = _reporter.current()
        if reporter is not None and reporter.rank == 0 and api.world_size() > 1:
            given = inspect.signature(start).bind_partial(*args, **kwargs).arguments
            _warn(reporter, given.get("nprocs", 1))
        return start(*args, **kwargs)

    return start_processes


@functools.lru_cache(maxsize=1)
def _warn(reporter: _reporter.Reporter, n_processes: int) -> None:
    """Warn once, if a cell starts processes again and again."""
    reporter.notice(
        "warning",
        f"starts {n_processes} more processes (by mp.spawn, or a launcher such as notebook_launcher), which"
        f" train apart from the {api.world_size()} ranks: call the function directly to train on the ranks",
    )
