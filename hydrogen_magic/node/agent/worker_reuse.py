"""Ranks whose cell has run, kept between runs of the same cell: models stay loaded, on a GPU too.

They belong to no gang meanwhile, and end when another kind of gang is launched here, when nobody came
for a while, when one of them ends or a file that their cell read has changed, and with the agent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydrogen_magic.core import processes
from hydrogen_magic.node.agent.worker_pool import PooledWorker

__all__ = ["RetainedWorkers", "RetainedWorker"]

_IDLE_S = 600.0
"""They may hold gigabytes, on a GPU too: long enough for a person who tries things."""


@dataclass(frozen=True)
class RetainedWorker:
    """A rank that waits for its next ``go``."""

    worker: PooledWorker
    files: Mapping[str, int]
    """What its cell read, with the files' times in ns when it did."""

    def is_stale(self) -> bool:
        return any(_modified(file) != when for file, when in self.files.items())


class RetainedWorkers:
    """The ranks of one earlier gang, in rank order, or nothing."""

    def __init__(self) -> None:
        self._key = ""
        self._ranks: list[RetainedWorker] = []
        self._since = 0.0
        self._idle: asyncio.TimerHandle | None = None

    def hold(self, key: str, ranks: Sequence[RetainedWorker]) -> None:
        """Keep ``ranks`` for a launch with the same key."""
        self._key, self._ranks = key, list(ranks)
        self._since = time.time()
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self.end)

    def take(self, key: str) -> list[PooledWorker]:
        """Return the workers if they are what ``key`` asks for; otherwise end them, and return none."""
        if not key or key != self._key or any(rank.is_stale() for rank in self._ranks):
            self.end()
        workers = [rank.worker for rank in self._ranks]
        self._forget()
        return workers

    def pids(self) -> set[int]:
        """Return the processes that wait; what descends from them is theirs."""
        return {rank.worker.pid for rank in self._ranks}

    def forget(self, pid: int) -> bool:
        """Take note that ``pid`` has ended; one that is missing makes the others useless."""
        if pid not in self.pids():
            return False
        self.end()
        return True

    def end(self) -> None:
        """End them at once, with all that descends from them."""
        family: set[int] = set()
        for rank in self._ranks:
            family |= {rank.worker.pid, *(p.pid for p in processes.descendants(rank.worker.pid))}
            rank.worker.close()
        for pid in family:
            if not processes.is_tracker(pid):  # it ends by itself, and cleans up before
                processes.send_signal(pid, signal.SIGKILL)
        self._forget()

    def _forget(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._key = ""
        self._ranks = []


def _modified(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0
