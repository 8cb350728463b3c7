"""The kernel's end of any agent: its messages and its state.

Its placement determines how it is started and which data bypasses the channel:
:mod:`~hydrogen_magic.driver.placements.local_agent` on this machine, ``placements.remote`` elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import Plan
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.placements import AgentLostError, EventSink
from hydrogen_magic.driver.rendezvous import Rendezvous
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.serialization import payload
from hydrogen_magic.transport.channel import Hub

_STOP_RESPONSE_S, _KILL_RESPONSE_S = 10.0, 3.0
"""How long an agent may stay silent after such a command. Its event loop answers within milliseconds; on a
machine under heavy load it may take seconds."""


class AgentClient(ABC):
    """The kernel's view of one agent. Created, used and ended on the hub's loop."""

    def __init__(self, hub: Hub, secret: str = "") -> None:
        """``secret``: as for :meth:`Hub.admit`."""
        self.hub = hub
        self.sink: EventSink | None = None
        self.attempt: tuple[str, int] | None = None
        self.alive = True
        self.last_message_s = time.monotonic()
        """Time of its last message."""
        self._commanded_s = -math.inf
        self._response_limit_s = math.inf
        self._message_arrived = asyncio.Event()
        self.held: tuple[str, int] = ("", 0)
        """Address for the rendezvous service."""
        self.keys = hub.admit(self._on_message, secret)
        self.greeted: asyncio.Future[None] = hub.loop.create_future()
        self._clean: asyncio.Future[None] | None = None
        self._ports: asyncio.Future[msg.PortsHeld] | None = None
        self.is_retained = False
        """The ranks of the last attempt wait for another one."""
        self.on_session_lost: Callable[[str], None] = lambda why: None
        """Called with the reason when waiting ranks of a session have ended."""

    @property
    def is_ready(self) -> bool:
        """Whether its hello message has arrived."""
        return self.greeted.done()

    @property
    def gang(self) -> str:
        """The gang that runs there, empty if none."""
        return self.attempt[0] if self.attempt else ""

    def send(self, command: msg.AgentCommand) -> None:
        self.hub.send(self.keys.key, command)

    def stop_ranks(self) -> None:
        """Ask the ranks to end, then make them. From now on the agent must respond."""
        self._send_urgent(msg.StopRanks(self.gang), _STOP_RESPONSE_S)

    def kill_ranks(self) -> None:
        """End the ranks at once. From now on the agent must respond."""
        self._send_urgent(msg.KillRanks(self.gang), _KILL_RESPONSE_S)

    def _send_urgent(self, command: msg.AgentCommand, response_s: float) -> None:
        self._commanded_s = time.monotonic()
        self._response_limit_s = min(self._response_limit_s, response_s)
        self.send(command)

    @property
    def is_unresponsive(self) -> bool:
        """Whether it has not answered the last command for too long."""
        return (
            time.monotonic() - max(self.last_message_s, self._commanded_s) > self._response_limit_s
        )

    async def responds(self) -> bool:
        """Return whether the agent answers a message. One that ends does not."""
        self._message_arrived.clear()
        self.send(msg.Ping())
        try:
            await asyncio.wait_for(self._message_arrived.wait(), _KILL_RESPONSE_S)
        except asyncio.TimeoutError:
            return False
        return self.alive

    async def hold_ports(self, count: int) -> tuple[int, ...]:
        """Have so many ports held for the ranks of the next attempt.

        Raises AgentLostError if the agent does not answer, PlacementError if no ports are free.
        """
        self._ports = self.hub.loop.create_future()
        self.send(msg.HoldPorts(count))
        try:
            held = await asyncio.wait_for(self._ports, _STOP_RESPONSE_S)
        except asyncio.TimeoutError:
            raise AgentLostError(
                f"an agent has not responded for {_STOP_RESPONSE_S:.0f} s"
            ) from None
        if len(held.ports) < count:
            raise PlacementError(f"the ranks need {counted(count, 'port')}: {held.problem}")
        return held.ports

    def expect_cleanup(self) -> asyncio.Future[None]:
        """Return a future that is done when nothing of the launched attempt is left."""
        self._response_limit_s = math.inf
        self.is_retained = False
        self._clean = self.hub.loop.create_future()
        return self._clean

    def count_as_clean(self) -> None:
        """Record that nothing of the attempt is left there; the agent itself cannot report it."""
        self.finish(self._clean)

    def fail(self, error: BaseException) -> None:
        """No more messages of the attempt will arrive."""
        if self._clean is not None and not self._clean.done():
            self._clean.set_exception(error)

    def _on_message(self, message: object, data: memoryview | None) -> None:
        self.last_message_s = time.monotonic()
        self._message_arrived.set()
        try:
            self.take(msg.decode(message, msg.AgentReport), data)
        except Exception as error:
            # An error of ours or of the agent: this gang ends, others continue.
            if self._clean is None or self._clean.done():
                raise
            self.fail(error)
            self.kill()

    @abstractmethod
    def kill(self) -> None:
        """End an agent that sends malformed messages."""

    def take(self, report: msg.AgentReport, data: memoryview | None) -> None:
        """Take a message of the agent's, and the bytes that came with it."""
        if isinstance(report, msg.Hello):
            self.held = (report.held.host, report.held.port)
            self.finish(self.greeted)
        elif isinstance(report, msg.CleanedUp) and self.attempt == (report.gang, report.attempt):
            if report.held is not None:  # else it is about to end
                self.held = (report.held.host, report.held.port)
            self.is_retained = report.is_retained
            self.finish(self._clean)
        elif isinstance(report, msg.PortsHeld):
            if self._ports is not None and not self._ports.done():
                self._ports.set_result(report)
        elif isinstance(report, msg.SessionLost):
            self.on_session_lost(report.why)
        elif isinstance(report, msg.EventBatch) and self.attempt == (report.gang, report.attempt):
            self._emit(report)

    def _emit(self, batch: msg.EventBatch) -> None:
        if self.sink is not None:
            for event in batch.events:
                self.sink.emit(ev.decode(event))

    def finish(self, future: asyncio.Future[None] | None) -> None:
        if future is not None and not future.done():
            future.set_result(None)


_Agent = TypeVar("_Agent", bound=AgentClient)


async def with_ports(
    plan: Plan, rendezvous: Rendezvous, ranks_of: Mapping[_Agent, Sequence[int]]
) -> Plan:
    """Return the plan with ports that the ranks' agents hold, if the rendezvous needs them.

    For ranks that listen themselves: see :attr:`Rendezvous.needs_rank_ports`. Raises the same errors as
    :meth:`AgentClient.hold_ports`.
    """
    if not rendezvous.needs_rank_ports:
        return plan
    holding = (agent.hold_ports(len(ranks)) for agent, ranks in ranks_of.items())
    held = await asyncio.gather(*holding)
    port_of = {
        rank: port
        for ranks, ports in zip(ranks_of.values(), held, strict=True)
        for rank, port in zip(ranks, ports, strict=True)
    }
    return replace(plan, slots=tuple(replace(s, port=port_of[s.rank]) for s in plan.slots))


def take_file(sink: EventSink, file: msg.RankFile, fd: int) -> None:
    """Give ``sink`` a result or a trace, which is in the file ``fd``."""
    content = file.content
    if isinstance(content, msg.ResultPart):
        sink.deliver(file.rank, content, payload.from_memfd(fd))
    elif isinstance(content, msg.ProfileTrace) and os.fstat(fd).st_size:
        # An empty file cannot be mapped.
        sink.take_trace(file.rank, content.number, mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
