"""torch's process groups on a rank of a session.

See :mod:`hydrogen_magic.node.worker.session.group_recovery`.

Gloo has no abort. Its waits end when the connection of a pair of ranks closes, so that is done to the sockets
that were opened while a group was created. NCCL has one, in torch's ``_abort_process_group``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from hydrogen_magic.node.rendezvous.torch_address import is_gangs_store
from hydrogen_magic.node.wrapping import transparent, wraps

_ERROR = 2
"""Of torch's levels."""


@dataclass
class _Groups:
    """What is known of this process's groups; torch's functions cannot pass it on."""

    sockets: dict[str, int] = field(default_factory=dict)
    """Links of the sockets that connect ranks, and their descriptors. A link is never used twice."""
    arguments: dict[str, Any] | None = None
    """Those of the ``init_process_group`` by the environment, None without one."""
    lost: Any = None
    """The default group that was given up and has to be joined again, None without one."""
    log_level: int | None = None
    """Of torch's C++ code, while its warnings are off; otherwise None."""
    n_pairwise: int = 0
    """How often two ranks alone have exchanged data, where the sequence number counts that (Gloo)."""
    n_joined: Counter[int] = field(default_factory=Counter)
    """How often this process has joined a default group by the environment, by the size of the group."""
    joining: int = 0
    """Size of the group that was joined last."""


_process = _Groups()


def attach(module: ModuleType) -> None:
    """Observe ``torch.distributed.distributed_c10d`` creating groups."""
    create = getattr(module, "_new_process_group_helper", None)
    if create is not None:  # private
        module._new_process_group_helper = _noting_sockets(create)  # type: ignore[attr-defined]


def pairwise(call: Callable[..., Any], torch: Any) -> Callable[..., Any]:
    """Return ``call``, which is ``isend`` or ``irecv``, noting whether it counts as a collective."""

    @wraps(call)
    def exchange(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        before = _sequence_number()
        try:
            return call(*args, **kwargs)
        finally:
            _process.n_pairwise += _sequence_number() - before

    # As by torch.compiler.disable(), which would import the compiler: it cannot trace the call.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return exchange


def _noting_sockets(create: Callable[..., Any]) -> Callable[..., Any]:
    @transparent
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        before = _sockets()
        try:
            return create(*args, **kwargs)
        finally:
            new = _sockets().items() - before.items()
            _process.sockets.update(new)

    return new_process_group


def with_new_keys(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``rendezvous``, with keys of its own in the store for each group.

    After ``destroy_process_group``, torch 2.13 uses the keys of the first group again: ranks read the
    addresses that others had in it, and wait for a connection until the timeout, as under torchrun.
    """

    @wraps(rendezvous)
    def stores(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for store, rank, world_size in rendezvous(url, *args, **kwargs):
            _process.joining = world_size
            n_before = _process.n_joined[world_size]
            is_part = str(world_size) != os.environ.get("WORLD_SIZE") and is_gangs_store()
            if url == "env://" and (n_before or is_part):
                prefixed = sys.modules["torch.distributed"].PrefixStore
                store = prefixed(f"join_{n_before}_of_{world_size}", store)
            yield store, rank, world_size

    return stores


def note_joined() -> None:
    """Note that ``init_process_group`` has succeeded."""
    _process.n_joined[_process.joining] += _process.arguments is not None


def note_arguments(given: Mapping[str, Any]) -> None:
    """Note how the user joins: the arguments of ``init_process_group`` by name."""
    by_environment = given.get("init_method") in (None, "env://") and given.get("store") is None
    place = ("init_method", "store", "rank", "world_size")
    kept = {name: value for name, value in given.items() if name not in place}
    _process.arguments = kept if by_environment else None


def release() -> bool:
    """Make collectives of this process fail; return whether it has groups, or is joining one."""
    dist = _initialized()
    if dist is not None and "nccl" in dist.get_backend_config():
        _give_up(dist)
    links = {**_process.sockets, **dict(_store_connections())}
    if links:
        _silence_warnings()
    for link, fd in links.items():
        _shut_down(link, fd)
    return bool(links) or (dist is None and _n_named() > 0)


def leave() -> None:
    """Leave all groups."""
    dist = _initialized()
    if dist is not None:
        release()
        _give_up(dist)
    else:
        _forget_unfinished_join()
    _restore_warnings()
    _process.sockets.clear()
    _process.n_joined.clear()  # the next store is a new one


def join() -> Iterator[str]:
    """Join the default group again if it was given up. Yields texts for the user."""
    if _process.lost is None:
        return
    if _process.arguments is None:
        yield "the process group could not be joined again: it was not joined by the environment"
    else:
        lost = _process.lost
        models = _data_parallel_models(lost)
        hook = sys.excepthook
        sys.modules["torch.distributed"].init_process_group(**_process.arguments)
        sys.excepthook = hook  # which names the rank already
        group = sys.modules["torch.distributed"].distributed_c10d._get_default_group()
        _replace_in_holders(lost, group)
        for model in models:
            _rebind(model, lost, group)
    forget()


def forget() -> None:
    """Do not join the default group again."""
    _process.lost = None


def is_joined() -> bool:
    """Return whether this process has the default group, or has given it up."""
    return _process.lost is not None or _initialized() is not None


def _give_up(dist: Any) -> None:
    c10d = dist.distributed_c10d
    _process.lost = c10d._get_default_group()
    if "nccl" in dist.get_backend_config():
        c10d._abort_process_group()  # of Gloo, torch 2.6 aborts nothing
    else:
        dist.destroy_process_group()


def _n_named() -> int:
    """Return how many groups have got a number as their name; a failed join has counted, too."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return int(getattr(getattr(c10d, "_world", None), "group_count", 0))  # private


def _forget_unfinished_join() -> None:
    """Let the next join have the name that it has on the ranks without a failed one."""
    if _n_named() > 0:
        sys.modules["torch.distributed.distributed_c10d"]._world.group_count = 0


def _silence_warnings() -> None:
    """Turn off warnings of torch's C++ code, which would print a stack for a connection that we close."""
    level = _log_level()
    if level is not None and _process.log_level is None:
        _process.log_level, level.value = level.value, max(level.value, _ERROR)


def _restore_warnings() -> None:
    level = _log_level()
    if level is not None and _process.log_level is not None:
        level.value, _process.log_level = _process.log_level, None


def _log_level() -> ctypes.c_int | None:
    """Return torch's level, which has no other switch after its import; None if this torch has none."""
    file = getattr(sys.modules.get("torch"), "__file__", None) or ""
    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(file), "lib", "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # private
        return None


def n_entered(waited_s: float) -> int:
    """Return the sequence number of the default group, without exchanges of two ranks."""
    return _sequence_number() - _process.n_pairwise


def _sequence_number() -> int:
    dist = _initialized()
    # Some of the ranks may have joined a default group of their own.
    if dist is None or str(dist.get_world_size()) != os.environ.get("WORLD_SIZE"):
        return 0
    with suppress(RuntimeError, ValueError):  # it is broken, has none, or has just been left
        return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())
    return 0


def _initialized() -> Any:
    """Return ``torch.distributed`` if this process has joined the default group."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


# ── DistributedDataParallel ──────────────────────────────────────────────────────────────────────


def _data_parallel_models(group: Any) -> list[Any]:
    """Return the models of ``group``."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(module, "DistributedDataParallel", ())
    # By its type: ``isinstance`` asks objects, and some of torch's warn when they are touched.
    models = [found for found in gc.get_objects() if issubclass(type(found), kind)]
    return [model for model in models if model.process_group is group]


def _rebind(model: Any, lost: Any, group: Any) -> None:
    """Give ``model`` a new reducer of the default group, as if it were unpickled, with its hooks."""
    model.__setstate__(model.__getstate__())
    hooks = [
        (hook, group if state is lost else state)
        for hook, state in getattr(model, "_comm_hooks", ())
    ]
    for hook, state in hooks:
        sys.modules["torch.distributed"]._register_comm_hook(model.reducer, state, hook)
    model._comm_hooks = hooks


def _replace_in_holders(lost: Any, group: Any) -> None:
    """Let variables and attributes refer to ``group`` in place of the default group that was given up.

    Such as those of ZeroRedundancyOptimizer, of states of DDP's hooks, and of the cells themselves.
    """
    for holder in gc.get_referrers(lost):
        names = _names_in(holder)
        for name in [name for name, value in names.items() if value is lost]:
            names[name] = group


def _names_in(holder: Any) -> dict[Any, Any]:
    """Return the variables or attributes of an object that refers to another one."""
    if type(holder) is not dict:
        with suppress(AttributeError):
            names = object.__getattribute__(holder, "__dict__")
            return names if type(names) is dict else {}
        return {}
    # Python keeps attributes of a class in a cache, too.
    is_of_class = any(isinstance(user, type) for user in gc.get_referrers(holder))
    return {} if is_of_class else holder


# ── sockets ──────────────────────────────────────────────────────────────────────────────────────


def _sockets() -> dict[str, int]:
    """Return the open sockets of this process: link -> descriptor."""
    fds = map(int, os.listdir("/proc/self/fd"))
    return {link: fd for fd in fds if (link := _link(fd)).startswith("socket:")}


def _link(fd: int) -> str:
    with suppress(OSError):  # closed meanwhile
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def _store_connections() -> Iterator[tuple[str, int]]:
    """Yield the connections to the store, in which ranks wait while they join."""
    port = os.environ.get("MASTER_PORT", "")
    for link, fd in _sockets().items():
        peer = _peer(fd)
        if peer is not None and str(peer[1]) == port:
            yield link, fd


def _peer(fd: int) -> Any:
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            return duplicate.getpeername()
    return None


def _shut_down(link: str, fd: int) -> None:
    """End the connection if the descriptor is still that socket. Gloo aborts if a listening one ends."""
    if _link(fd) != link or _peer(fd) is None:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
