"""Functions that ranks of the contract suite run. This module is sent to machines with ranks, like the
agent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from hydrogen_magic.node.worker import checkpoint

__all__ = [
    "TORCH",
    "Library",
    "fail_once",
    "gather",
    "kill_one",
    "raise_on",
    "start_helper_and_wait",
    "wait",
]


@dataclass(frozen=True)
class Library:
    """How ranks use the library of a rendezvous. The functions run on ranks."""

    join: Callable[[], int]
    """Joins the other ranks; returns this one's number."""
    gather: Callable[[int], list[int]]
    """Returns the numbers that all ranks pass to it, in rank order."""
    all_reduce: Callable[[], object]
    """Waits for all ranks in one collective."""


def gather(library: Library) -> list[int]:
    """Return every rank's number, as each rank sees it."""
    return library.gather(library.join())


def raise_on(library: Library, culprit: int) -> None:
    """Rank ``culprit`` raises while the others are in a collective."""
    if library.join() == culprit:
        raise ValueError("bad batch 17")
    _reduce_for_ever(library)


def kill_one(library: Library, culprit: int) -> None:
    """Rank ``culprit`` is killed while the others are in a collective."""
    if library.join() == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    _reduce_for_ever(library)


def fail_once(library: Library) -> list[int]:
    """Rank 0 raises in the first attempt, after it has saved a checkpoint; later ones find that."""
    rank = library.join()
    if rank == 0 and checkpoint.load() is None:
        checkpoint.save({"is_tried": True})
        raise ValueError("bad batch 17")
    return library.gather(rank)


def wait(library: Library) -> None:
    """Wait for the other ranks for ever."""
    library.join()
    print("waiting", flush=True)
    _reduce_for_ever(library)


def start_helper_and_wait(library: Library) -> None:
    """Wait for ever beside a process in a session of its own, which is named ``helper PID``."""
    library.join()
    helper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(f"helper {helper.pid}.", flush=True)
    time.sleep(1000)


def _reduce_for_ever(library: Library) -> NoReturn:
    while True:
        library.all_reduce()


# ── torch ────────────────────────────────────────────────────────────────────────────────────────


def _join() -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
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


TORCH = Library(_join, _gather, _all_reduce)
"""``torch.distributed`` with Gloo."""
