"""The way of the data of ``hm.dataset`` to hosts that share no disk with the notebook's machine.

Each agent keeps it for later gangs, until the notebook deletes it or the agent ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import size_text
from hydrogen_magic.driver.placements import Attempt, EventSink
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.node import data_files

_REPORT_S = 0.5
_AT_ONCE = 8
"""Hosts that receive data at the same time: up to 32 MB for each of them wait in this process."""


class DatasetTransfer:
    """One transfer, of what the agents do not have yet. ``attempt``: the one whose ranks will read it."""

    def __init__(self, attempt: Attempt, agents: Iterable[RemoteAgent], sink: EventSink) -> None:
        self._attempt = attempt
        self._sink = sink
        self._agents = tuple(agents)
        self._files: dict[str, Mapping[Path, int]] = {}
        """Dataset -> its files here, with their sizes."""
        self._sizes: dict[RemoteAgent, int] = {}
        """What the agents that lack data have to receive, in bytes."""
        self._sent: dict[RemoteAgent, int] = {}
        self._done: set[RemoteAgent] = set()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._has_reported = False

    async def run(self) -> None:
        """Return when all agents have the data. Raises HydrogenError if one cannot store it."""
        for name, folder in self._attempt.job.datasets.items():
            self._files[name] = await asyncio.to_thread(_files, folder)
        sizes = {agent: sum(map(self._size, self._missing(agent))) for agent in self._agents}
        self._sizes = {agent: size for agent, size in sizes.items() if size}
        self._sent = dict.fromkeys(self._sizes, 0)
        reporting = asyncio.ensure_future(self._keep_reporting())
        bringing = [asyncio.ensure_future(self._bring(agent)) for agent in self._sizes]
        try:
            await asyncio.gather(*bringing)
        finally:  # gather() leaves the others running when one fails
            for task in (reporting, *bringing):
                task.cancel()
        if self._has_reported:
            self._report()

    def _missing(self, agent: RemoteAgent) -> list[str]:
        found = self._files.items()
        return [name for name, files in found if files and name not in agent.datasets]

    def _size(self, name: str) -> int:
        return sum(self._files[name].values())

    async def _bring(self, agent: RemoteAgent) -> None:
        async with self._room:
            for name in self._missing(agent):
                await self._send(agent, name)
        self._done.add(agent)

    async def _send(self, agent: RemoteAgent, name: str) -> None:
        folder, files = self._attempt.job.datasets[name], self._files[name]
        before = self._sent[agent]
        sent: dict[Path, int] = {}

        def count(path: Path, n_bytes: int, size: int) -> None:
            sent[path] = n_bytes
            self._sent[agent] = before + sum(sent.values())

        try:
            error = await agent.send_dataset(name, folder, files, count)
        except FileNotFoundError:  # it is being deleted: the ranks report that
            return
        except OSError as problem:
            text = f"the data of hm.dataset() in {folder} cannot be read: {problem}"
            raise HydrogenError(text) from problem
        if error:
            raise HydrogenError(
                f"host {agent.host} cannot store the data of hm.dataset(), {size_text(self._size(name))}: "
                f"{error}; free space there, or call hm.dataset(frame, path=…) with a folder or URL that "
                "all hosts can read"
            )

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self._has_reported = True
            self._report()

    def _report(self) -> None:
        at_s, n_hosts = self._attempt.job.now_s(), len(self._sizes)
        sent, total = sum(self._sent.values()), sum(self._sizes.values())
        self._sink.emit(ev.ClosureSent(at_s, sent, total, len(self._done), n_hosts, ev.DATA))


def _files(folder: str) -> dict[Path, int]:
    """Return the files of a dataset with their sizes; none if it was deleted: the ranks report that."""
    with suppress(FileNotFoundError):
        return {path: path.stat().st_size for path in data_files.find(folder).files}
    return {}
