"""The address at which torch's ranks meet: the gang's store, or one that the user's code sets."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

from hydrogen_magic.core.environment import hidden
from hydrogen_magic.node.wrapping import wraps

STORE = "HYDROGEN_MAGIC_STORE"
"""Variable with the address of the gang's store: the user's code may change those that torch reads."""
_IS_SERVED = "TORCHELASTIC_USE_AGENT_STORE"
_ADDRESSES = ("MASTER_ADDR", "MASTER_PORT", STORE, _IS_SERVED)


def at_any_store(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``rendezvous``, for the gang's store and for one at an address of the user's code."""

    @wraps(rendezvous)
    def stores(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        made, is_of_user = rendezvous(url, *args, **kwargs), _is_of_user(url)
        # Without the variable, rank 0 opens the store, as without torchrun.
        with hidden(_IS_SERVED) if is_of_user else nullcontext():
            store, rank, world_size = next(made)
        if url == "env://" and is_gangs_store():
            _refuse_missing_ranks(world_size)
        yield store, rank, world_size
        yield from made

    return stores


def is_gangs_store() -> bool:
    """Return whether the variables that torch reads name the gang's store."""
    return STORE in os.environ and not _is_of_user("env://")


def _is_of_user(url: str) -> bool:
    """Return whether ``url`` stands for another address than that of the gang's store.

    Raises ValueError for one at which ranks on several hosts cannot meet.
    """
    _, _, gangs = os.environ.get(STORE, "").rpartition(":")
    where = urlparse(url)
    host, port = where.hostname, str(where.port)
    if where.scheme == "env":
        host, port = (os.environ.get(f"MASTER_{part}", "") for part in ("ADDR", "PORT"))
    if not gangs or where.scheme not in ("env", "tcp") or port == gangs:
        return False
    has_many_hosts = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    if has_many_hosts and host in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(
            f"init_process_group() would meet at {host}:{port}, which ranks on other hosts cannot reach: call"
            " it without init_method, and do not set MASTER_ADDR and MASTER_PORT"
        )
    return True


def _refuse_missing_ranks(world_size: int) -> None:
    """Raise ValueError if the group would wait for ranks that the gang does not have."""
    n_ranks = int(os.environ.get("WORLD_SIZE", world_size))
    if world_size > n_ranks:
        raise ValueError(
            f"init_process_group(world_size={world_size}) would wait for ranks that this gang of {n_ranks}"
            f" does not have: leave out world_size, or launch the gang with --np {world_size}"
        )


# ── processes that a rank starts ─────────────────────────────────────────────────────────────────


def let_children_meet_apart() -> None:
    """Let forked children of this process meet apart from the gang."""
    os.register_at_fork(before=_port_of_children, after_in_child=_leave_gangs_store)


def attach_to_spawn(module: ModuleType) -> None:
    """Let processes that ``multiprocessing.popen_spawn_posix`` starts meet apart from the gang."""
    launch = module.Popen._launch

    @wraps(launch)
    def launch_apart(*args: Any) -> Any:
        before = {name: os.environ[name] for name in _ADDRESSES if name in os.environ}
        _leave_gangs_store()
        try:
            return launch(*args)
        finally:
            os.environ.update(before)

    module.Popen._launch = launch_apart


def _leave_gangs_store() -> None:
    """Let processes that the user's code starts, as by ``mp.spawn``, open a store of their own.

    They would take the gang's for theirs, or wait for one at an address that they set.
    """
    gangs = os.environ.pop(STORE, "")
    os.environ.pop(_IS_SERVED, None)
    if gangs and gangs == ":".join(os.environ.get(name, "") for name in _ADDRESSES[:2]):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=_port_of_children())


@functools.cache
def _port_of_children() -> str:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])
