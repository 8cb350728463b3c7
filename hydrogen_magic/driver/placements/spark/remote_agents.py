"""The kernel's end of agents on other machines, which Spark tasks start and which stay warm."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.core.validation import checked
from hydrogen_magic.driver.placements import Attempt, ClosureFile, local_agents
from hydrogen_magic.driver.placements.agent_client import AgentClient
from hydrogen_magic.driver.placements.spark.relay import Relay
from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.result_stream import ResultPart
from hydrogen_magic.transport.channel import Hub
from hydrogen_magic.transport.file_transfer import Incoming, Outgoing, keep

if TYPE_CHECKING:
    import mmap

    from hydrogen_magic.driver.placements import EventSink

__all__ = ["RemoteAgentPool", "RemoteAgent", "agent_pool"]


class AttemptWaiter(Protocol):
    """The receiver of an attempt's tasks."""

    def kill(self) -> None:
        """Cancel the attempt."""
        ...

    def on_attached(self, agent: RemoteAgent, about: dict[str, Any]) -> None:
        """A task has attached to its machine's agent."""
        ...

    def on_detached(self, about: dict[str, Any], why: str) -> None:
        """A task has exited before its rank was started."""
        ...


class RemoteAgent(AgentClient):
    """A possible agent: its keys are sent with a task, which starts it if there is none yet."""

    def __init__(self, hub: Hub, agent_pool: RemoteAgentPool) -> None:
        super().__init__(hub)
        self.host = ""
        self.interface = ""
        """The network interface that faces the other hosts."""
        self.outgoing = Outgoing(self._send_part)
        self.job: Attempt | None = None
        """The gang that runs there."""
        self._agent_pool = agent_pool
        self._incoming = Incoming()
        self._closure_of = ""
        self._log_problem = ""

    def _send_part(self, message: dict[str, Any], data: memoryview) -> None:
        self.hub.send(self.keys.key, {**message, "do": "part"}, data)

    def kill(self) -> None:
        self.send("quit")

    # ── messages from the agent ──

    def take(self, message: dict[str, Any]) -> None:
        if "beat" in message:
            self.send("clock", sent=message["beat"], at=time.monotonic())
        elif "got" in message:
            self.outgoing.acknowledged()
        elif "part" in message:
            self.send("got")
            self._take_part(message["part"], message["blob"])
        elif "bye" in message:
            self._agent_pool.drop(self)
        elif "attached" in message:
            self._agent_pool.attached(self, message["attached"])
        elif "detached" in message:
            self._agent_pool.detached(message["detached"], message["why"])
        else:
            if "hello" in message:
                self.host = message["hello"]["host"]
                self.interface = message["hello"]["interface"]
            super().take(message)

    def _take_part(self, label: dict[str, Any], data: memoryview) -> None:
        is_ours = self.attempt is not None and label["gang"] == self.attempt[0]
        if "log" in label or "timeline" in label:
            if is_ours:
                self._write_on(label, data)
            return
        fd = self._incoming.take(label, data)
        if fd is None:
            return
        try:
            if is_ours and self.attempt == (label["gang"], label["attempt"]):
                self._take_file(label, fd)
        finally:
            os.close(fd)

    def _take_file(self, label: dict[str, Any], fd: int) -> None:
        assert self.sink is not None
        rank = int(label["rank"])
        if "checkpoint" in label:
            self._keep_checkpoint(Path(str(label["checkpoint"])).name, fd)
        elif "profile" in label:
            self._take_trace(rank, int(label["profile"]), fd)
        else:
            part = checked(ResultPart, label["result"], "a result's label")
            self.sink.deliver(rank, part, payload.from_memfd(fd))

    def _take_trace(self, rank: int, number: int, fd: int) -> None:
        import mmap

        if os.fstat(fd).st_size:  # an empty file cannot be mapped, and needs no answer
            trace: mmap.mmap = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            assert self.sink is not None
            self.sink.take_trace(rank, number, trace)

    def _write_on(self, label: dict[str, Any], data: memoryview) -> None:
        """Append to a log or timeline in the run's record: optional, so failures do not affect the run."""
        assert self.job is not None and self.sink is not None
        if "log" in label:
            name, rest, flags = f"rank-{int(label['log'])}.log", b"", os.O_APPEND
        else:  # the next piece overwrites the closing bracket, as in Horovod
            name, rest, flags = Path(f"horovod-timeline-{label['timeline']}.json").name, b"]", 0
        flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        try:
            fd = os.open(self.job.job.record_dir / name, flags, 0o600)
            with os.fdopen(fd, "wb") as file:
                if not flags & os.O_APPEND:
                    file.seek(int(label["offset"]))
                file.write(data)
                file.write(rest)
        except OSError as error:
            if not self._log_problem:
                self._log_problem = f"the ranks' logs cannot be written here: {error.strerror}"
                self.sink.emit(ev.Notice(self.job.job.now_s(), "warning", self._log_problem))

    def _keep_checkpoint(self, name: str, fd: int) -> None:
        assert self.job is not None
        folder = self.job.job.checkpoints
        folder.mkdir(exist_ok=True)
        keep(fd, folder / name)

    # ── messages to the agent ──

    def launch(
        self, attempt: Attempt, sink: EventSink, message: dict[str, Any]
    ) -> asyncio.Future[None]:
        """Start the ranks of ``message``; return a future that is done when nothing of them is left."""
        self.sink, self.job = sink, attempt
        self.attempt = (attempt.gang, attempt.number)
        swept = self.expect_sweep()
        self.send("launch", **message)
        return swept

    async def bring_checkpoint(self, attempt: Attempt) -> None:
        """Send the last checkpoint of earlier attempts, and remove others: hosts must agree."""
        self.send("forget", gang=attempt.gang)
        for path in sorted(attempt.job.checkpoints.glob("[!.]*")):
            with path.open("rb") as file:
                label = {"gang": attempt.gang, "checkpoint": path.name}
                await self.outgoing.send_file(label, file.fileno())

    async def send_closure(self, attempt: Attempt) -> None:
        """Send the closure, once for all attempts of a gang."""
        if self._closure_of != attempt.gang:
            assert isinstance(attempt.job.closure, ClosureFile)
            fd = attempt.job.closure.dup()
            try:
                await self.outgoing.send_file({"closure": attempt.gang}, fd)
                self._closure_of = attempt.gang
            finally:
                os.close(fd)

    def let_go(self) -> None:
        """The attempt is over."""
        self.sink = self.attempt = self.job = None
        self._log_problem = ""

    def end(self) -> None:
        """Stop all communication."""
        if self.alive:
            self.alive = False
            self.hub.dismiss(self.keys.key)
            self._incoming.drop()


class RemoteAgentPool:
    """The remote agents of this kernel: warm ones and those whose keys have just been sent."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.token = secrets.token_hex(16)
        """Tasks find this kernel's agents on their machine by it."""
        self.owner = run_log.owner_of_this_process()
        self.crews: dict[tuple[str, int], AttemptWaiter] = {}
        self._agents: set[RemoteAgent] = set()
        self._relays: dict[str, tuple[Relay, str]] = {}
        """Application -> relay for its executors, and its address."""
        self._closing: asyncio.Future[None] | None = None
        local_agents.before_closing(self.close)

    def endpoints(self, session: Session) -> list[str]:
        """Return addresses where executors may reach this process, after listening on them; best first."""
        if session.application in self._relays:
            return [self._relays[session.application][1]]
        return _listen(self.hub, session.addresses())

    async def use_relay(self, session: Session) -> str:
        """Connect this application's executors through the Spark Connect server; return the address.

        Raises PlacementError if the server does not allow that.
        """
        host, _, port = self.hub.listen("127.0.0.1").removeprefix("tcp://").rpartition(":")
        relay = Relay(session.spark, (host, int(port)))
        relay.on_failure = lambda text: self._on_relays_end(session.application)
        address = await asyncio.to_thread(relay.start)
        where = f"{address[0]}:{address[1]}, on the Spark driver's host"
        self._relays[session.application] = (relay, f"tcp://{address[0]}:{address[1]}")
        return where

    def _on_relays_end(self, application: str) -> None:
        """Called in a thread of the relay. The agents behind it detect the failure themselves."""
        self.hub.loop.call_soon_threadsafe(self._relays.pop, application, None)

    def invite(self, count: int) -> list[RemoteAgent]:
        """Create keys for all agents that tasks may have to start."""
        invited = [RemoteAgent(self.hub, self) for _ in range(count)]
        self._agents.update(invited)
        return invited

    def uninvite(self, invited: list[RemoteAgent]) -> None:
        """Revoke the keys of those agents that did not connect."""
        for agent in invited:
            if not agent.is_ready:
                self.drop(agent)

    def drop(self, agent: RemoteAgent) -> None:
        self._agents.discard(agent)
        agent.end()
        if not self._agents and self._relays:  # they would ask the server every second for nothing
            self._closing = asyncio.ensure_future(self._close_relays())

    async def _close_relays(self) -> None:
        relays, self._relays = self._relays, {}
        await asyncio.gather(*(asyncio.to_thread(relay.close) for relay, _ in relays.values()))

    def attached(self, agent: RemoteAgent, about: dict[str, Any]) -> None:
        agent_group = self.crews.get((about["gang"], about["attempt"]))
        if agent_group is not None:
            agent_group.on_attached(agent, about)
        else:  # it connected after the wait was over
            agent.send("release", gang=about["gang"], attempt=about["attempt"])

    def detached(self, about: dict[str, Any], why: str) -> None:
        agent_group = self.crews.get((about["gang"], about["attempt"]))
        if agent_group is not None:
            agent_group.on_detached(about, why)

    async def close(self) -> None:
        """End all agents, and the gangs that run there or wait for them."""
        there = [agent for agent in self._agents if agent.is_ready]
        for agent_group in self.crews.values():
            agent_group.kill()
        for agent in there:
            agent.send("quit")
            agent.fail(ChildProcessError("this kernel's agents and their ranks were ended"))
        if there:
            await asyncio.sleep(0.05)  # until ZeroMQ has sent the message
        await self._close_relays()
        for agent in list(self._agents):
            self.drop(agent)


def _listen(hub: Hub, addresses: tuple[str, ...]) -> list[str]:
    """Listen on those addresses that belong to this machine; the driver's name may belong to another."""
    endpoints: list[str] = []
    refused: list[PlacementError] = []
    for address in addresses:
        try:
            endpoints.append(hub.listen(address))
        except PlacementError as error:
            refused.append(error)
    if not endpoints:
        raise refused[0] if refused else PlacementError("this machine has no address to listen on")
    return endpoints


_agent_pool: RemoteAgentPool | None = None


def agent_pool() -> RemoteAgentPool:
    """Return this kernel's agent pool; used on the hub's loop."""
    global _agent_pool
    current = local_agents.hub()
    if _agent_pool is None or _agent_pool.hub is not current:
        _agent_pool = RemoteAgentPool(current)
    return _agent_pool
