"""Reuse of ranks between runs of the same cell: models stay loaded, on a GPU too.

The ranks belong to no gang meanwhile. They end when a different gang is launched here, after a
while without a gang, when one of them ends, when a file that their cell read has changed, and with
the agent.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydrogen_magic.core import processes
from hydrogen_magic.node.agent.file_versions import are_changed
from hydrogen_magic.node.agent.pooled_worker import PooledWorker

_IDLE_S = 600.0
"""They may hold gigabytes, on a GPU too: long enough for interactive work."""


@dataclass(frozen=True)
class RetainedWorker:
    """A rank that waits for another launch."""

    worker: PooledWorker
    files: Mapping[str, int]
    """Files that its cell read, with their modification times in ns at that moment."""


class RetainedWorkers:
    """The ranks of one earlier gang, in rank order, or none."""

    def __init__(self) -> None:
        self._key = ""
        self._ranks: list[RetainedWorker] = []
        self._idle: asyncio.TimerHandle | None = None

    def hold(self, key: str, ranks: Sequence[RetainedWorker]) -> None:
        """Keep ``ranks`` for a launch with the same key."""
        self._key, self._ranks = key, list(ranks)
        self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self.end)

    def take(self, key: str) -> list[PooledWorker]:
        """Return the workers if their key is ``key``; otherwise end them, and return none."""
        if not key or key != self._key or any(are_changed(rank.files) for rank in self._ranks):
            self.end()
        workers = [rank.worker for rank in self._ranks]
        self._forget()
        return workers

    def pids(self) -> set[int]:
        """Return the waiting processes, which own their descendants."""
        return {rank.worker.pid for rank in self._ranks}

    def forget(self, pid: int) -> bool:
        """Handle the exit of ``pid``; without one of them, the others are useless."""
        if pid not in self.pids():
            return False
        self.end()
        return True

    def end(self) -> None:
        """Kill them at once, with all their descendants."""
        family: set[int] = set()
        for rank in self._ranks:
            family |= {rank.worker.pid, *(p.pid for p in processes.descendants(rank.worker.pid))}
            rank.worker.close()
        for pid in family:
            if not processes.is_tracker(pid):  # it exits on its own, after its own cleanup
                processes.send_signal(pid, signal.SIGKILL)
        self._forget()

    def _forget(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._key = ""
        self._ranks = []
