"""The kernel's end of agents on other machines, which tasks there start and which stay warm."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.core.units import size_text
from hydrogen_magic.driver.placements import Attempt, EventSink, local_agents
from hydrogen_magic.driver.placements.agent_client import AgentClient, take_file
from hydrogen_magic.errors import HydrogenError, PlacementError
from hydrogen_magic.node.agent import host_task
from hydrogen_magic.transport.channel import Hub
from hydrogen_magic.transport.file_transfer import Incoming, Outgoing, Part, write_part
from hydrogen_magic.transport.forwarded_channel import ForwardedChannels


class AttemptWaiter(Protocol):
    """The receiver of an attempt's tasks."""

    def kill(self) -> None:
        """Cancel the attempt."""

    def on_attached(self, agent: RemoteAgent, task: msg.TaskHello) -> None:
        """A task has come to its machine's agent."""

    def on_detached(self, agent: RemoteAgent, task: msg.TaskHello, why: str) -> None:
        """A task has exited while its rank was not running."""


class RemoteAgent(AgentClient):
    """A possible agent: its keys are sent with a task, which starts it if there is none yet."""

    def __init__(self, hub: Hub, agent_pool: RemoteAgentPool, secret: str) -> None:
        super().__init__(hub, secret)
        self.host = ""
        self.interface = ""
        """The network interface that faces the other hosts."""
        self.outgoing = Outgoing(lambda part, data: hub.send(self.keys.key, part, data))
        self.job: Attempt | None = None
        """The gang that runs there."""
        self.channels = ForwardedChannels(self.outgoing, self._warn)
        """Of the ranks there that are fed."""
        self._agent_pool = agent_pool
        self._incoming = Incoming()
        self.closure_of = ""
        """The gang whose whole closure is there."""
        self.on_closure_report: Callable[[RemoteAgent, msg.AgentReport], None] | None = None
        """Takes reports about a closure that is on its way there."""
        self.datasets: dict[str, str] = {}
        """Datasets that are there: name -> their folder here."""
        self._kept: dict[int, asyncio.Future[str]] = {}
        """Transfers of datasets and checkpoints on the way there; with the error that ends one."""
        self._transfers = itertools.count(1)
        self._log_problem = self._checkpoint_problem = ""

    def kill(self) -> None:
        self.send(msg.Quit())

    # ── messages from the agent ──

    def take(self, report: msg.AgentReport, data: memoryview | None) -> None:
        match report:
            case msg.Heartbeat():
                self.send(msg.ClockReading(report.sent_s, time.monotonic()))
            case msg.PartTaken():
                self.outgoing.acknowledged()
            case msg.FilePart() | msg.RecordPart():
                self.send(msg.PartTaken())
                self._take_part(report, memoryview(b"") if data is None else data)
            case msg.Leaving():
                self._agent_pool.drop(self)
            case msg.ClosureServed() | msg.SendClosure() | msg.ClosureArriving():
                if self.on_closure_report is not None and report.gang == self.gang:
                    self.on_closure_report(self, report)
            case msg.TransferKept():
                if (kept := self._kept.get(report.transfer)) and not kept.done():
                    kept.set_result(report.error)
            case msg.TaskAttached():
                self._agent_pool.attached(self, report.task)
            case msg.TaskDetached():
                self._agent_pool.detached(self, report.task, report.why)
            case _:
                if isinstance(report, msg.Hello):
                    self.host, self.interface = report.host, report.interface
                super().take(report, data)

    def _take_part(self, part: Part, data: memoryview) -> None:
        if not isinstance(part, msg.FilePart):
            if part.gang == self.gang:
                self._write_on(part, data)
            return
        label = part.label
        if not isinstance(label, (msg.RankFile, msg.ChannelFrame)):
            raise msg.MessageError(f"expected a file of a rank, got {type(label).__name__}")
        is_current = self.attempt == (label.gang, label.attempt)
        if isinstance(label, msg.RankFile) and isinstance(label.content, msg.SavedCheckpoint):
            if is_current:
                self._take_checkpoint(Path(label.content.file_name).name, part, data)
            return
        fd = self._incoming.take(part, data)
        if fd is None:
            return
        if isinstance(label, msg.ChannelFrame):
            self.channels.take(label, fd)
            return
        try:
            if is_current and self.sink is not None:
                take_file(self.sink, label, fd)
        finally:
            os.close(fd)

    def _write_on(self, part: msg.RecordPart, data: memoryview) -> None:
        """Write a log or timeline on in the run's record: a courtesy, and its failure no fault of the run."""
        assert self.job is not None and self.sink is not None
        path = self.job.job.record_dir / Path(part.name).name
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        if not part.end:  # a log goes on behind that of an earlier attempt
            flags |= os.O_APPEND
        try:
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.seek(part.offset)
                file.write(data)
                file.write(part.end.encode())
        except OSError as error:
            if not self._log_problem:
                self._log_problem = f"the ranks' logs cannot be written here: {error.strerror}"
                self._warn(self._log_problem)

    def _warn(self, text: str) -> None:
        if self.job is not None and self.sink is not None:
            self.sink.emit(ev.Notice(self.job.job.now_s(), "warning", text))

    def _take_checkpoint(self, name: str, part: msg.FilePart, data: memoryview) -> None:
        """Store a part of a checkpoint for the next attempt. If that fails, the ranks are well, and go on.

        Directly on disk: a checkpoint may be larger than memory, and a copy at its end would block the loop.
        """
        assert self.job is not None
        folder = self.job.job.checkpoints
        try:
            folder.mkdir(exist_ok=True)
            if write_part(part, data, folder / name):
                self._checkpoint_problem = ""
        except OSError as error:
            problem = (
                f"the last checkpoint cannot be kept here ({error.strerror}: {folder}): free space there; "
                "until a later one is kept, the next attempt continues from the one before"
            )
            if problem != self._checkpoint_problem:
                self._warn(problem)
            self._checkpoint_problem = problem

    # ── messages to the agent ──

    def launch(
        self, attempt: Attempt, sink: EventSink, request: msg.LaunchRequest
    ) -> asyncio.Future[None]:
        """Start the ranks of ``request``; return a future that is done when nothing of them is left."""
        self.sink, self.job = sink, attempt
        self.attempt = (attempt.gang, attempt.number)
        cleaned_up = self.expect_cleanup()
        self.send(request)
        return cleaned_up

    async def bring_checkpoint(self, attempt: Attempt) -> None:
        """Have there what earlier attempts have saved last, and nothing else: hosts must agree.

        Raises HydrogenError if it cannot be stored there.
        """
        self.send(msg.ForgetFolders(msg.CHECKPOINTS, (attempt.gang,)))
        files = sorted(attempt.job.checkpoints.glob("[!.]*"))
        if files and (error := await self._send_folder(msg.CHECKPOINTS, attempt.gang, files)):
            size = size_text(sum(path.stat().st_size for path in files))
            raise HydrogenError(
                f"host {self.host} cannot store the checkpoint, {size}: {error}; free space there"
            )

    async def send_dataset(
        self,
        name: str,
        folder: str,
        files: Iterable[Path],
        on_sent: Callable[[Path, int, int], None],
    ) -> str:
        """Send a dataset; return when it is complete there, or the error for which it cannot be stored.

        ``folder``: where the data is here. ``on_sent``: called after each part with the file, how much of it
        was sent, and its size. Raises OSError if the data cannot be read here.
        """
        error = await self._send_folder(msg.DATASETS, name, files, on_sent)
        if not error:
            self.datasets[name] = folder
        return error

    async def _send_folder(
        self,
        kind: str,
        name: str,
        files: Iterable[Path],
        on_sent: Callable[[Path, int, int], None] = lambda path, sent, size: None,
    ) -> str:
        """Send files as the folder ``name`` of this kind; return as :meth:`send_dataset` does."""
        number = next(self._transfers)
        kept = self._kept[number] = asyncio.get_running_loop().create_future()
        sending = asyncio.ensure_future(self._send_files(kind, name, number, files, on_sent))
        try:
            await asyncio.wait([sending, kept], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            error: str = await kept
        except BaseException:  # it is stopped, or cannot be read: a session's agent stays
            self.send(msg.ForgetFolders(kind, (name,)))
            raise
        finally:
            sending.cancel()
            del self._kept[number]
        return error

    async def _send_files(
        self,
        kind: str,
        name: str,
        number: int,
        files: Iterable[Path],
        on_sent: Callable[[Path, int, int], None],
    ) -> None:
        for path in files:
            label = msg.FolderFile(kind, name, number, path.name)
            with path.open("rb") as file:
                count = functools.partial(on_sent, path)
                await self.outgoing.send_file(label, file.fileno(), count, from_disk=True)
        self.send(msg.KeepFolder(kind, name, number))

    def forget_deleted_datasets(self, in_use: Container[str]) -> None:
        """Have it delete the datasets that were deleted here, except for those in use by earlier attempts.

        An outliving gang is retried with data whose notebook, which deletes it at its end, has ended.
        """
        deleted = [
            name
            for name, folder in self.datasets.items()
            if name not in in_use and not os.path.isdir(folder)
        ]
        for name in deleted:
            del self.datasets[name]
        if deleted:
            self.send(msg.ForgetFolders(msg.DATASETS, tuple(deleted)))

    async def send_closure(self, attempt: Attempt, start: int = 0) -> None:
        """Send the closure from byte ``start`` on."""
        fd = attempt.job.closure.dup()
        try:
            await self.outgoing.send_file(msg.ClosureLabel(attempt.gang), fd, start=start)
        finally:
            os.close(fd)

    def let_go(self, attempt: Attempt) -> None:
        """The attempt is over. The agent may serve another one already: its own ranks ended before."""
        if self.job is not attempt:
            return
        self._incoming.drop()  # rows that were on their way when the attempt ended
        self.sink = self.attempt = self.job = None
        self._log_problem = self._checkpoint_problem = ""

    def end(self) -> None:
        """Stop all communication."""
        if self.alive:
            self.alive = False
            self.hub.revoke_key(self.keys.key)
            self._incoming.drop()


@dataclass(frozen=True)
class RelayRoute:
    """A way to this process for agents that cannot connect to it directly."""

    endpoint: asyncio.Future[str]
    """What they connect to, when the relay has started."""
    close: Callable[[], None]
    """Closes the relay, which may still be starting; called in a thread."""


@dataclass(frozen=True)
class Invitation:
    """Keys of possible agents."""

    key_seed: str = field(repr=False)
    """Their secret keys follow from it, see :func:`~.host_task.agent_secret`."""
    agents: tuple[RemoteAgent, ...]
    """By the number of the task that may start them."""


class RemoteAgentPool:
    """The remote agents of this kernel: warm ones and those whose keys have just been sent."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.token = secrets.token_hex(16)
        """Tasks find this kernel's agents on their machine by it."""
        self.owner = run_log.owner_of_this_process()
        self.waiters: dict[tuple[str, int], AttemptWaiter] = {}
        self.relays: dict[str, RelayRoute] = {}
        """By a name of the hosts that use it; closed when no agent is left."""
        self._agents: set[RemoteAgent] = set()
        self._closing: asyncio.Future[None] | None = None
        local_agents.before_closing(self.close)

    def listen(self, addresses: Sequence[str], ports: PortRange | None = None) -> list[str]:
        """Listen on those addresses that belong to this machine; a name may belong to another one.

        Returns the endpoints for agents, in the same order. Raises PlacementError if there are none.
        """
        endpoints: list[str] = []
        refused: list[PlacementError] = []
        for address in addresses:
            try:
                endpoints.append(self.hub.listen(address, ports))
            except PlacementError as error:
                refused.append(error)
        if not endpoints:
            none = PlacementError("this machine has no address to listen on")
            raise refused[0] if refused else none
        return endpoints

    def invite(self, count: int) -> Invitation:
        """Create keys for all agents that tasks may have to start."""
        key_seed = secrets.token_hex(32)
        made = (host_task.agent_secret(key_seed, number) for number in range(count))
        invited = Invitation(
            key_seed, tuple(RemoteAgent(self.hub, self, secret) for secret in made)
        )
        self._agents.update(invited.agents)
        return invited

    def uninvite(self, invited: Invitation) -> None:
        """Revoke the keys of those agents that did not connect."""
        for agent in invited.agents:
            if not agent.is_ready:
                self.drop(agent)

    def drop(self, agent: RemoteAgent) -> None:
        self._agents.discard(agent)
        agent.end()
        if not self._agents and self.relays:  # they may poll a server every second for nothing
            self._closing = asyncio.ensure_future(self._close_relays())

    async def _close_relays(self) -> None:
        relays, self.relays = self.relays, {}
        await asyncio.gather(*(asyncio.to_thread(relay.close) for relay in relays.values()))

    def attached(self, agent: RemoteAgent, task: msg.TaskHello) -> None:
        agent_group = self.waiters.get((task.gang, task.attempt))
        if agent_group is not None:
            agent_group.on_attached(agent, task)
        else:  # it connected after the wait was over
            agent.send(msg.ReleaseTasks(task.gang, task.attempt))

    def detached(self, agent: RemoteAgent, task: msg.TaskHello, why: str) -> None:
        agent_group = self.waiters.get((task.gang, task.attempt))
        if agent_group is not None:
            agent_group.on_detached(agent, task, why)

    async def close(self) -> None:
        """End all agents, and the gangs that run there or wait for them."""
        there = [agent for agent in self._agents if agent.is_ready]
        for agent_group in self.waiters.values():
            agent_group.kill()
        for agent in there:
            agent.send(msg.Quit())
            agent.fail(ChildProcessError("this kernel's agents were ended, and their ranks"))
        if there:
            await asyncio.sleep(0.05)  # until ZeroMQ has sent the message
        await self._close_relays()
        for agent in list(self._agents):
            self.drop(agent)


def agent_pool() -> RemoteAgentPool:
    """Return this kernel's agent pool; used on the hub's loop."""
    return _pool_of(local_agents.hub())


@functools.lru_cache(maxsize=1)
def _pool_of(hub: Hub) -> RemoteAgentPool:
    return RemoteAgentPool(hub)
