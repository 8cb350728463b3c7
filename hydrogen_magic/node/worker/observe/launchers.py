"""Observer of ``torch.multiprocessing``: warns of processes that train apart from the gang.

Launchers for notebooks start their processes by it: Accelerate's, Ignite's and Lightning's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.core.environment import hidden
from hydrogen_magic.node.rendezvous import torch_address
from hydrogen_magic.node.rendezvous.torch_address import gang_size
from hydrogen_magic.node.worker.observe.span_recording import put
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps


def attach(module: ModuleType) -> None:
    """Wrap ``start_processes`` of ``torch.multiprocessing.spawn``, which ``spawn`` calls, too."""
    put(module, "torch.multiprocessing", "start_processes", _noted(module.start_processes))


def attach_to_elastic(module: ModuleType) -> None:
    """Wrap ``launch_agent`` of ``torch.distributed.launcher.api``, which Accelerate's launcher calls."""
    module.launch_agent = _launching_apart(module.launch_agent)  # type: ignore[attr-defined]


def _noted(start: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(start)
    def start_processes(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(start).bind_partial(*args, **kwargs).arguments
        _warn(_reporter.current(), given.get("nprocs", 1))
        return start(*args, **kwargs)

    return start_processes


def _launching_apart(launch: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(launch)
    def launch_agent(config: Any, *args: Any, **kwargs: Any) -> Any:
        _warn(_reporter.current(), config.nproc_per_node)
        port = config.rdzv_endpoint.rpartition(":")[2]
        with hidden(torch_address.IS_SERVED), torch_address.explained(gang_size(), port):
            return launch(config, *args, **kwargs)

    return launch_agent


@functools.lru_cache(maxsize=1)
def _warn(reporter: _reporter.Reporter | None, n_processes: int) -> None:
    """Warn on the first of several ranks, once if a cell starts processes again and again."""
    if reporter is not None and reporter.rank == 0 and gang_size() > 1:
        reporter.notice(
            "warning",
            f"starts {n_processes} process{'es' * (n_processes != 1)} of its own (by mp.spawn, or a launcher"
            " such as notebook_launcher), which are no ranks of the gang: to train on its"
            f" {gang_size()} ranks, call the function directly",
        )
