"""The way of the data of ``hm.dataset`` to hosts that share no disk with the notebook's machine.

Each agent keeps it for later gangs, until the notebook deletes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import DatasetFile
from hydrogen_magic.driver.placements import Attempt, EventSink
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.node import data_files

_REPORT_S = 0.5
_WHAT = "data of hm.dataset()"


class DatasetTransfer:
    """One transfer, of what the agents do not have yet. ``attempt``: the one whose ranks will read it."""

    def __init__(self, attempt: Attempt, agents: Sequence[RemoteAgent], sink: EventSink) -> None:
        self.moved_s = time.monotonic()
        """When the last part was sent."""
        self._attempt = attempt
        self._sink = sink
        self._agents = agents
        self._files = {name: _files(folder) for name, folder in attempt.job.datasets.items()}
        self._sent = dict.fromkeys(agents, 0)
        self._sizes = {agent: self._size(agent) for agent in agents}
        self._reported_s = time.monotonic()
        self._has_reported = False

    @property
    def is_needed(self) -> bool:
        """Whether an agent lacks data."""
        return any(self._sizes.values())

    def _size(self, agent: RemoteAgent) -> int:
        return sum(sum(sizes.values()) for _, sizes in self._missing(agent))

    def _missing(self, agent: RemoteAgent) -> list[tuple[str, Mapping[Path, int]]]:
        found = self._files.items()
        return [(name, sizes) for name, sizes in found if sizes and name not in agent.datasets]

    async def run(self) -> None:
        """Return when all agents have the data. Raises HydrogenError if one cannot store it."""
        bringing = [asyncio.ensure_future(self._bring(agent)) for agent in self._agents]
        try:
            await asyncio.gather(*bringing)
        finally:  # gather() leaves the others running when one fails
            for each in bringing:
                each.cancel()
        if self._has_reported:
            self._report()

    async def _bring(self, agent: RemoteAgent) -> None:
        for name, sizes in self._missing(agent):
            with suppress(FileNotFoundError):  # it is being deleted: the ranks report that
                for path in sizes:
                    await self._send(agent, name, path)
                agent.datasets[name] = self._attempt.job.datasets[name]

    async def _send(self, agent: RemoteAgent, name: str, path: Path) -> None:
        before = self._sent[agent]

        def count(sent: int, size: int) -> None:
            self._sent[agent] = before + sent
            self._on_progress()

        await agent.send_dataset_file(DatasetFile(name, path.name), path, count)

    def _on_progress(self) -> None:
        self.moved_s = now_s = time.monotonic()
        if now_s - self._reported_s > _REPORT_S:
            self._reported_s, self._has_reported = now_s, True
            self._report()

    def _report(self) -> None:
        n_done = sum(self._sent[agent] == size for agent, size in self._sizes.items())
        sent, total = sum(self._sent.values()), sum(self._sizes.values())
        at_s = self._attempt.job.now_s()
        self._sink.emit(ev.ClosureSent(at_s, sent, total, n_done, len(self._sizes), _WHAT))


def _files(folder: str) -> dict[Path, int]:
    """Return the files of a dataset with their sizes; none if it was deleted: the ranks report that."""
    with suppress(FileNotFoundError):
        return {path: path.stat().st_size for path in data_files.find(folder).files}
    return {}
