"""Observers of JAX: the arguments of ``jax.distributed.initialize()``, and in which collective a rank waits.

Collectives inside of compiled functions are not observed: they run after the Python code that started them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hydrogen_magic.core.environment import hidden
from hydrogen_magic.frameworks.jax.node import (
    ADDRESS,
    BIND_ADDRESS,
    INITIALIZE,
    INTERFACE,
    MULTIHOST_COLLECTIVES,
)
from hydrogen_magic.frameworks.jax.node.coordinator import private_directory
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.observe.collectives import tracked_collective
from hydrogen_magic.node.worker.reporting import reporter
from hydrogen_magic.node.wrapping import wraps

_JOIN_S = 86_400
"""JAX aborts a process that waits for longer. The kernel ends the gang earlier, and names missing ranks."""


def attach(module: ModuleType) -> None:
    """Wrap ``initialize`` of ``jax.distributed``."""
    joining = with_place(module.initialize)
    module.initialize = tracked_collective(  # type: ignore[attr-defined]
        INITIALIZE, joining, is_joining=True, joins_all=_joins_all
    )
    _choose_interface()
    _watch_backends()


def _joins_all(*args: Any, **kwargs: Any) -> bool:
    """Return whether ``initialize`` with these arguments waits for all ranks of the gang."""
    return not args and kwargs.keys().isdisjoint(
        ("coordinator_address", "num_processes", "process_id")
    )


def attach_to_multihost_utils(module: ModuleType) -> None:
    """Wrap the collectives of ``jax.experimental.multihost_utils``."""
    for name in MULTIHOST_COLLECTIVES:
        if hasattr(module, name):
            setattr(module, name, tracked_collective(name, getattr(module, name)))


def _choose_interface() -> None:
    """Have Gloo use the interface that the gang names. JAX has no setting for it, so that Gloo would listen
    on the address of the host's name: for ranks of one host that need not be loopback, and on some hosts it
    is an address that other hosts cannot reach.
    """
    from jax._src import xla_bridge

    jaxlib: Any = getattr(xla_bridge, "_jax", None)
    original = getattr(jaxlib, "make_gloo_tcp_collectives", None)
    if original is None:
        return  # another version of JAX

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"interface": os.environ.get(INTERFACE), **kwargs})

    jaxlib.make_gloo_tcp_collectives = make


def _watch_backends() -> None:
    """Warn when JAX starts to compute before this rank has joined the others; afterwards it cannot join."""
    from jax._src import distributed, xla_bridge

    original = getattr(xla_bridge, "backends", None)
    if original is None:
        return  # another version of JAX

    @wraps(original)
    def backends(*args: Any, **kwargs: Any) -> Any:
        if ADDRESS in os.environ and distributed.global_state.client is None:
            _warn_of_lone_ranks()
        return original(*args, **kwargs)

    xla_bridge.backends = backends


@functools.cache
def _warn_of_lone_ranks() -> None:
    if api.rank() == 0 and api.world_size() > 1:
        reporter.notice(
            "warning",
            f"JAX computes before {INITIALIZE}(), so each of the {api.world_size()} ranks works by itself:"
            " call it first in the cell",
        )


def with_place(initialize: Callable[..., None]) -> Callable[..., None]:
    """Return JAX's ``initialize`` with this rank's place in its gang as defaults."""

    @wraps(initialize)
    def call(
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if coordinator_address not in (None, os.environ.get(ADDRESS)):
            # JAX would serve the gang's socket in place of the address that the user has passed.
            with hidden(BIND_ADDRESS):
                initialize(coordinator_address, num_processes, process_id, *args, **kwargs)
            return
        if ADDRESS not in os.environ:
            with _explained():
                initialize(None, num_processes, process_id, *args, **kwargs)
            return
        num_processes = int(os.environ["WORLD_SIZE"]) if num_processes is None else num_processes
        process_id = int(os.environ["RANK"]) if process_id is None else process_id
        if len(args) < 3:  # not given by its place
            kwargs.setdefault("initialization_timeout", _JOIN_S)
        bind_address = os.environ.get(BIND_ADDRESS, "") if process_id == 0 else ""
        with private_directory(bind_address):
            initialize(None, num_processes, process_id, *args, **kwargs)

    return call


@contextmanager
def _explained() -> Iterator[None]:
    """Explain JAX's error about a missing address in a gang that has another rendezvous."""
    try:
        yield
    except ValueError as error:
        if "coordinator_address" not in str(error) or reporter.current() is None:
            raise
        raise ValueError(
            f"{INITIALIZE}() finds no coordinator ({error}): launch the gang `--with jax`"
        ) from error
