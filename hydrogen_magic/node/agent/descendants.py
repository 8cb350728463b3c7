"""The end of every process that descends from the agent and belongs to its gang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hydrogen_magic.core import processes
from hydrogen_magic.node.agent.attempt_reporter import AttemptReporter
from hydrogen_magic.node.agent.rank_set import GIVE_UP_S, RankSet


class DescendantCleanup:
    """Kills all descendants of this agent but those in ``keepers``, which returns pids."""

    def __init__(self, keepers: Callable[[], set[int]], reporter: AttemptReporter) -> None:
        self._keepers = keepers
        self._reporter = reporter
        self._seen: set[int] = set()
        """Every process of the gang that has been seen."""
        self._began = time.time()

    def note(self, ranks: RankSet) -> None:
        """Note the processes of the ranks: they own shared memory, and may exit before the clean-up."""
        for rank in ranks.running():
            self._seen |= processes.family(rank.worker.pid)

    async def run(self) -> None:
        """Kill the descendants, and remove the shared memory of the gang."""
        seen, left = await processes.end_descendants(os.getpid(), GIVE_UP_S, self._keepers)
        self._seen |= seen
        if left:
            listed = ", ".join(f"{process.pid} (state {process.state})" for process in left)
            host = os.uname().nodename
            self._reporter.notice(
                "error", f"cannot be killed on {host}: {listed}; check the machine"
            )
        else:
            processes.unlink_shared_memory(processes.ended(self._seen), self._began)
