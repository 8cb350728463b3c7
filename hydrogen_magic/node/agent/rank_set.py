"""The processes of one attempt on this host: signals to all, and their end.

:meth:`RankSet.end` ends ranks by SIGINT, SIGTERM and SIGKILL. :meth:`RankSet.end_cell`, for ranks of a
session, has no SIGTERM: their processes stay. Tasks of ``%%infer`` that run without an agent are ended by
SIGINT and SIGKILL in :mod:`~hydrogen_magic.node.worker.inference.task_reporter`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent.child_exit import ChildExit
from hydrogen_magic.node.agent.rank_process import RankProcess

_REACTION_S = 0.4
"""A rank that has not reacted to SIGINT by then is in C code and will not react before that returns."""
_TERM_S = 0.3
"""How long SIGTERM's default action may take; longer means that it is handled or ignored."""
GIVE_UP_S = 10.0
"""A process that survives SIGKILL for this long hangs in the system (state D); waiting does not help."""


class RankSet:
    """The ranks that were started, in any order."""

    def __init__(self) -> None:
        self.all_exited = asyncio.Event()
        self._ranks: dict[int, RankProcess] = {}

    def add(self, process: RankProcess) -> None:
        """Add a rank that is about to start."""
        process.on_retained = self._note_exit
        self._ranks[process.rank] = process

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(list(self._ranks.values()))

    def __len__(self) -> int:
        return len(self._ranks)

    def get(self, rank: int) -> RankProcess | None:
        return self._ranks.get(rank)

    def running(self) -> list[RankProcess]:
        """Return the ranks that have not exited."""
        return [process for process in self._ranks.values() if not process.exited]

    def on_exit(self, pid: int, ended: ChildExit) -> bool:
        """Handle a reaped child; return whether it was one of the ranks."""
        for process in self.running():
            if process.worker.pid == pid:
                process.on_exit(ended)
                self._note_exit()
                return True
        return False

    def _note_exit(self) -> None:
        if not self.running():
            self.all_exited.set()

    def send(self, command: msg.WorkerCommand) -> None:
        """Send a command to every rank."""
        for process in self:
            process.send(command)

    def request_stacks(self) -> None:
        """Make every rank write its stacks; call :meth:`report_stacks` a moment later."""
        for process in self:
            process.request_stacks()

    def report_stacks(self, *, is_last: bool) -> bool:
        """Report the requested stacks that were written; return whether none are missing.

        ``is_last``: report missing stacks as empty.
        """
        for process in self:
            process.report_stacks(is_last=is_last)
        return not any(process.awaits_stacks for process in self)

    def signal(self, signum: int) -> None:
        """Send a signal to every rank."""
        for process in self:
            process.signal(signum)

    async def end_cell(self, grace_s: float) -> None:
        """End the cell on the ranks of a session, which stay; those that have not returned then are killed.

        A rank in a collective is released at once, one that has not returned after a moment in any case:
        DDP waits where nothing observes it.
        """
        begun = time.monotonic()
        self.signal(signal.SIGINT)
        self.send(msg.ReleaseRank(is_forced=False))
        await self._wait_for_exit(begun + _REACTION_S)
        self.send(msg.ReleaseRank(is_forced=True))
        await self._wait_for_exit(begun + grace_s)
        self.signal(signal.SIGKILL)
        await self._wait_for_exit(time.monotonic() + GIVE_UP_S)

    async def _wait_for_exit(self, until_s: float) -> None:
        if not self.running():  # they may all be still to start
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.all_exited.wait(), max(0.0, until_s - time.monotonic()))

    async def end(self, grace_s: float) -> None:
        """End the ranks by SIGINT, SIGTERM and SIGKILL; ``grace_s``: for those that react to SIGINT."""
        begun = time.monotonic()
        self.signal(signal.SIGINT)
        terminated: set[int] = set()
        while self.running():
            waited = time.monotonic() - begun
            for process in self:
                limit = grace_s if process.has_reacted else _REACTION_S
                if waited > limit + _TERM_S:
                    process.signal(signal.SIGKILL)
                elif waited > limit and process.rank not in terminated:
                    terminated.add(process.rank)
                    process.signal(signal.SIGTERM)
            if waited > grace_s + _TERM_S + GIVE_UP_S:
                break
            await asyncio.sleep(0.01)
