"""Functions that ranks of the contract suite run; machines with ranks are sent this module, too."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.checkpoints import checkpoint

__all__ = [
    "JOIN_S",
    "TORCH",
    "Library",
    "end_one",
    "fail_once",
    "finish_early",
    "gather",
    "gather_held",
    "held",
    "hold",
    "join",
    "raise_in_session",
    "raise_on",
    "sleep",
    "stay_away",
    "wait",
]

JOIN_S = 10.0
"""A short time limit of the library, for tests in which ranks must report that others are missing."""
_LONG_S = 1800.0
_ENTER_S = 0.5
"""Time in which ranks that have left one collective enter the next one."""


@dataclass(frozen=True)
class Library:
    """How ranks use the library of a rendezvous. The functions run on ranks."""

    join: Callable[[float], int]
    """Joins the other ranks; returns this one's number. The argument is a limit in seconds for every
    collective, if the library has such a setting."""
    gather: Callable[[int], list[int]]
    """Returns the numbers that all ranks pass to it, in rank order."""
    all_reduce: Callable[[], object]
    """Waits for all ranks in one collective."""
    leave: Callable[[], object] = lambda: None
    """Leaves the other ranks in order."""
    is_observed: bool = True
    """An observer reports the library's collectives."""


def gather(library: Library) -> list[int]:
    """Return every rank's number, as each rank sees it."""
    return library.gather(library.join(_LONG_S))


def raise_on(library: Library, culprit: int, clean_up_s: float, leaves: bool) -> None:
    """Rank ``culprit`` raises while the others are in a collective, and cleans up for a while."""
    if library.join(_LONG_S) == culprit:
        try:
            raise ValueError("bad batch 17")
        finally:
            if leaves:
                library.leave()
            time.sleep(clean_up_s)
    _reduce_for_ever(library)


def end_one(library: Library, culprit: int, how: str) -> None:
    """Rank ``culprit`` ends without an exception of its own, or stops, while others are in a collective."""
    if library.join(JOIN_S if how == "SIGSTOP" else _LONG_S) == culprit:
        _end(how)
    _reduce_for_ever(library)


def hold(library: Library) -> int:
    """Leave a variable for later cells of the session; return this process's pid."""
    main = sys.modules["__main__"]
    main.held = api.rank()  # type: ignore[attr-defined]
    return os.getpid()


def held(library: Library) -> tuple[int, int]:
    """Return this process's pid, and what the variable holds."""
    return os.getpid(), sys.modules["__main__"].held


def join(library: Library) -> None:
    """Join the others for this and later cells of the session."""
    library.join(_LONG_S)


def gather_held(library: Library) -> list[int]:
    """Return what the variables of all ranks hold; they have joined before."""
    return library.gather(sys.modules["__main__"].held)


def raise_in_session(library: Library, culprit: int) -> None:
    """Rank ``culprit`` raises while the others, which have joined before, are in a collective."""
    library.all_reduce()
    if api.rank() == culprit:
        time.sleep(_ENTER_S)
        raise ValueError("bad batch 17")
    _reduce_for_ever(library)


def sleep(library: Library) -> None:
    """Run until it is stopped."""
    time.sleep(1000)


def _end(how: str) -> None:
    if how == "_exit(0)":
        os._exit(0)
    elif how == "exit(3)":
        sys.exit(3)
    elif how == "SIGSEGV":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), getattr(signal, how))


def finish_early(library: Library) -> None:
    """Rank 0 enters one collective more than the others."""
    if library.join(JOIN_S) == 0:
        library.all_reduce()


def stay_away(library: Library, absent: list[int]) -> None:
    """Some ranks never join the others."""
    if api.rank() in absent:
        time.sleep(1000)
    library.join(JOIN_S)


def fail_once(library: Library) -> list[int]:
    """Rank 0 raises in the first attempt, after it has saved a checkpoint; later ones find that."""
    rank = library.join(_LONG_S)
    if rank == 0 and checkpoint.load() is None:
        checkpoint.save({"is_tried": True})
        raise ValueError("bad batch 17")
    return library.gather(rank)


def wait(library: Library, where: str, has_family: bool) -> None:
    """Wait for the other ranks: in a ``collective``, or while they join (``rendezvous``).

    ``has_family``: beside a worker process, as of a DataLoader, and a helper in a session of its own.
    """
    if has_family:
        multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True).start()
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("waiting", flush=True)
    if where == "rendezvous" and api.rank() != 0:
        time.sleep(1000)
    if library.join(_LONG_S) != 0:
        time.sleep(1000)
    _reduce_for_ever(library)


def _reduce_for_ever(library: Library) -> NoReturn:
    while True:
        library.all_reduce()


# ── torch ────────────────────────────────────────────────────────────────────────────────────────


def _join(timeout_s: float) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return int(dist.get_rank())


def _gather(rank: int) -> list[int]:
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, rank)
    dist.destroy_process_group()
    return found


def _all_reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)


def _leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


TORCH = Library(_join, _gather, _all_reduce, _leave)
"""``torch.distributed`` with Gloo."""
