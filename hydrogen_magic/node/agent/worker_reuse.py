"""Ranks that wait for their next launch: those of a session, and those of ``%%infer``.

They keep their variables, models on a GPU too, and belong to no gang meanwhile. They end on request, when one
of them ends, when a launch with another key comes here, and with the agent. Those of ``%%infer`` are also
replaced when a file that their cell read has changed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hydrogen_magic.core import processes
from hydrogen_magic.node.agent.file_versions import are_changed
from hydrogen_magic.node.agent.output_limits import CHUNK
from hydrogen_magic.node.agent.pooled_worker import PooledWorker, close_all

RANKS_ENDED = "the ranks of the session have ended"
EXIT_S = 2.0
"""How long the exit handlers of a session's ranks may take."""


@dataclass(frozen=True)
class RetainedWorker:
    """A rank that waits for another launch."""

    worker: PooledWorker
    files: Mapping[str, int]
    """Files that its cell read, with their modification times in ns at that moment."""


class RetainedWorkers:
    """The ranks of earlier gangs with one key, or none.

    ``on_lost`` is called with the key and the rank when one of them exits by itself.
    """

    def __init__(self, on_lost: Callable[[str, int], None]) -> None:
        self.key = ""
        self._on_lost = on_lost
        self._ranks: dict[int, RetainedWorker] = {}

    def hold(self, key: str, ranks: Mapping[int, RetainedWorker]) -> None:
        """Keep ``ranks`` for a launch with the same key."""
        self.key = key
        self._ranks.update(ranks)

    def holds(self, key: str, ranks: Sequence[int]) -> bool:
        """Return whether ``ranks`` wait here for a launch with ``key``; ends those of another key."""
        if not key or key != self.key or any(are_changed(r.files) for r in self._ranks.values()):
            self.end()
        return all(rank in self._ranks for rank in ranks)

    def take(self, ranks: Sequence[int]) -> list[PooledWorker]:
        """Return the workers of ``ranks``.

        Raises ProcessLookupError if one has exited since :meth:`holds` has confirmed them.
        """
        if not all(rank in self._ranks for rank in ranks):
            raise ProcessLookupError(RANKS_ENDED)
        return [self._ranks.pop(rank).worker for rank in ranks]

    def pids(self) -> set[int]:
        """Return the waiting processes, which own their descendants."""
        return {rank.worker.pid for rank in self._ranks.values()}

    def forget(self, pid: int) -> bool:
        """Handle the exit of ``pid``; without one of them, the others are useless."""
        found = [n for n, rank in self._ranks.items() if rank.worker.pid == pid]
        if not found:
            return False
        key = self.key
        self.end()
        self._on_lost(key, found[0])
        return True

    def end(self) -> None:
        """Kill them at once, with all their descendants."""
        workers, family = self._released()
        close_all(workers)
        _kill(family)

    def finish(self) -> None:
        """Let them run their exit handlers, for a limited time. What they print is not shown."""
        loop = asyncio.get_running_loop()
        workers, family = self._released()
        outputs = [fd for worker in workers for fd in (worker.stdout, worker.stderr)]
        for worker in workers:
            worker.control.close()
        for fd in outputs:  # a handler that prints must neither fail nor wait
            loop.add_reader(fd, _discard, loop, fd)

        def end() -> None:
            for fd in outputs:
                loop.remove_reader(fd)
            close_all(workers)
            _kill(family)

        loop.call_later(EXIT_S, end)

    def _released(self) -> tuple[list[PooledWorker], set[tuple[int, int]]]:
        """Let go of the ranks; return them, and their processes and those below by pid and start time."""
        pids = self.pids()
        below = {child.pid for pid in pids for child in processes.descendants(pid)}
        workers = [rank.worker for rank in self._ranks.values()]
        self.key, self._ranks = "", {}
        family = {(one.pid, one.start_ticks) for one in processes.processes(pids | below)}
        return workers, family


def _discard(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    with suppress(BlockingIOError):
        if not os.read(fd, CHUNK):
            loop.remove_reader(fd)


def _kill(family: Collection[tuple[int, int]]) -> None:
    """Kill the processes with these pids and start times: a later one may have the same pid."""
    for one in processes.processes([pid for pid, _ in family]):
        is_same = (one.pid, one.start_ticks) in family
        # A tracker exits on its own, after its own cleanup.
        if is_same and not processes.is_tracker(one.pid):
            processes.send_signal(one.pid, signal.SIGKILL)
