"""The address at which torch's ranks meet: the gang's store, or one that the user's code sets."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

from hydrogen_magic.core.environment import hidden
from hydrogen_magic.node.worker.import_hooks import hooks
from hydrogen_magic.node.wrapping import wraps

STORE = "HYDROGEN_MAGIC_STORE"
"""Variable with the address of the gang's store: the user's code may change those that torch reads."""
IS_SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable by which torch opens no store, and goes on where it cannot open one."""
_LEFT = "HYDROGEN_MAGIC_LEFT_STORE"
"""Variable of processes that a rank starts: number of ranks, port of the gang's store, port of their own."""
_ADDRESSES = ("MASTER_ADDR", "MASTER_PORT", STORE, IS_SERVED, _LEFT)


def at_any_store(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``rendezvous``, for the gang's store and for one at an address of the user's code."""

    @wraps(rendezvous)
    def stores(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if _LEFT in os.environ:
            url = _apart_from_gang(url)
            n_ranks, _, own = os.environ[_LEFT].split()
            with explained(int(n_ranks), _address(url)[2], own):
                yield from rendezvous(url, *args, **kwargs)
            return
        made, is_of_user = rendezvous(url, *args, **kwargs), _is_of_user(url)
        # Without the variable, rank 0 opens the store, as without torchrun.
        with hidden(IS_SERVED) if is_of_user else nullcontext():
            store, rank, world_size = next(made)
        if url == "env://" and is_gangs_store():
            _refuse_missing_ranks(world_size)
        yield store, rank, world_size
        yield from made

    return stores


def gang_size() -> int:
    """Return how many ranks the gang has, also while a launcher has replaced ``WORLD_SIZE``."""
    return int(os.environ.get("ROLE_WORLD_SIZE", 1))


def is_gangs_store() -> bool:
    """Return whether the variables that torch reads name the gang's store."""
    return STORE in os.environ and not _is_of_user("env://")


def _is_of_user(url: str) -> bool:
    """Return whether ``url`` stands for another address than that of the gang's store.

    Raises ValueError for one at which ranks on several hosts cannot meet.
    """
    _, _, gangs = os.environ.get(STORE, "").rpartition(":")
    scheme, host, port = _address(url)
    if not gangs or scheme not in ("env", "tcp") or port == gangs:
        return False
    has_many_hosts = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    if has_many_hosts and host in ("localhost", "127.0.0.1", "::1"):
        raise ValueError(
            f"init_process_group() would meet at {host}:{port}, which ranks on other hosts cannot reach: call"
            " it without init_method, and do not set MASTER_ADDR and MASTER_PORT"
        )
    return True


def _address(url: str) -> tuple[str, str | None, str]:
    """Return scheme, host and port of ``url``, by the variables that torch reads for ``env://``."""
    where = urlparse(url)
    if where.scheme == "env":
        return "env", os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return where.scheme, where.hostname, str(where.port)


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
    os.register_at_fork(before=_port_of_children, after_in_child=lambda: _take(_apart()))


def attach_to_spawn(module: ModuleType) -> None:
    """Let processes that ``multiprocessing.popen_spawn_posix`` starts meet apart from the gang."""
    launch = module.Popen._launch

    @wraps(launch)
    def launch_apart(popen: Any, process: Any) -> Any:
        attributes = vars(process)  # its class may refuse to set others
        attributes["_meets_apart"] = _MeetsApart()
        try:
            return launch(popen, process)
        finally:
            del attributes["_meets_apart"]

    module.Popen._launch = launch_apart


class _MeetsApart:
    """Where it is unpickled, addresses are those of a process which this rank starts.

    The variables of this process stay as they are: another thread may join, or start a process.
    """

    def __reduce__(self) -> Any:
        return _attach_in_child, (_apart(),)


def _attach_in_child(addresses: Mapping[str, str]) -> None:
    _take(addresses)

    def attach(module: ModuleType) -> None:
        module.rendezvous = at_any_store(module.rendezvous)  # type: ignore[attr-defined]

    hooks.add("torch.distributed.distributed_c10d", attach)


def _apart() -> dict[str, str]:
    """Return the addresses for a process that the user's code starts, as by ``mp.spawn``.

    With the rank's own, it would take the gang's store for one of its group.
    """
    found = {name: os.environ[name] for name in _ADDRESSES if name in os.environ}
    found.pop(IS_SERVED, None)
    _, _, gangs = found.pop(STORE, "").rpartition(":")
    if gangs:
        own = _port_of_children()
        found[_LEFT] = f"{gang_size()} {gangs} {own}"
        if found.get("MASTER_PORT") == gangs:
            found.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=own)
    return found


def _take(addresses: Mapping[str, str]) -> None:
    for name in _ADDRESSES:
        os.environ.pop(name, None)
    os.environ.update(addresses)


def _apart_from_gang(url: str) -> str:
    """Return ``url`` with the port of this rank's children in place of the gang's; change variables, too.

    Launchers pass on the address that they have found in the rank.
    """
    _, gangs, own = os.environ[_LEFT].split()
    scheme, _, port = _address(url)
    if port != gangs:
        return url
    if scheme == "env":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=own)
        return url
    return urlparse(url)._replace(netloc=f"127.0.0.1:{own}").geturl()


@contextmanager
def explained(n_ranks: int, port: str, own: str = "") -> Iterator[None]:
    """Say what to do where ``port`` is in use. ``own``: that of this rank's children, in their variables."""
    try:
        yield
    except RuntimeError as error:  # a DistNetworkError
        if "EADDRINUSE" not in str(error) or (n_ranks == 1 and port != own):
            raise
        if port == own:
            text = (
                f"processes that this rank has started all join with rank 0 at port {port}: launch as many"
                " ranks (--np), and start no processes in the cell (Lightning: strategy='ddp')"
            )
        else:
            text = (
                f"each of the {n_ranks} ranks starts processes that meet at port {port}: launch with --np 1,"
                " or call the function directly with hm.rank() and hm.world_size()"
            )
        # A DistNetworkError would look as if another rank had ended.
        raise RuntimeError(f"EADDRINUSE: {text}") from None


@functools.cache
def _port_of_children() -> str:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])
