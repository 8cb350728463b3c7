"""The closure of one gang on a host: arrives from the kernel or from another agent, and is passed on.

A large closure leaves the kernel once. The agents form a tree, in which each passes the bytes on while they
arrive. An agent whose parent is lost asks the kernel for the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.transport.background_tasks import BackgroundTasks
from hydrogen_magic.transport.channel import AgentLink, LinkError, Listener, Receiver
from hydrogen_magic.transport.file_transfer import ArrivingFile, Outgoing
from hydrogen_magic.transport.multiplexer import cancelled

_REPORT_S = 0.5
_ENTRY_S = 5.0
"""How long the connection to another agent may take, where a firewall may drop its packets."""
_SILENCE_MS = 6000
"""After this time without an answered ping, another agent is lost. ZeroMQ's own threads answer pings."""


class HostClosure:
    """A closure, complete or not. ``report``: sends a message to the kernel."""

    def __init__(self, gang: str, report: Callable[[msg.AgentReport], None]) -> None:
        self.gang = gang
        self.file = ArrivingFile()
        self._report = report
        self._reported_s = time.monotonic()
        self._listener: Listener | None = None
        self._tasks = BackgroundTasks()

    def take(self, part: msg.FilePart, data: memoryview) -> None:
        """Add a part."""
        self.file.take(part, data)
        if self.file.is_complete or time.monotonic() - self._reported_s > _REPORT_S:
            self._report_progress()

    def _report_progress(self) -> None:
        self._reported_s = time.monotonic()
        self._report(msg.ClosureArriving(self.gang, self.file.arrived, self.file.size))

    def close(self) -> None:
        """Break connections to other agents, and let go of the file."""
        self.stop_serving()
        self.file.close()

    def stop_serving(self) -> None:
        """Break connections to other agents: all agents of the attempt have the closure, or need none."""
        self._tasks.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # ── to other agents ──

    def serve(self, command: msg.ServeClosure, address: str, ports: PortRange | None) -> None:
        """Listen on ``address`` for other agents, at one of ``ports``."""
        try:
            listener = self._listener or Listener()
            if self._listener is None:
                listener.open()
                self._listener = listener
            for key in command.clients:
                listener.admit_key(key, self._receiver(listener, key))
            found = msg.ClosureServed(
                self.gang, listener.listen(address, ports), listener.server_key
            )
        except (PlacementError, LinkError):  # the kernel sends it to them
            found = msg.ClosureServed(self.gang, "", "")
        self._report(found)

    def _receiver(self, listener: Listener, key: str) -> Receiver:
        """Return what takes the messages of the agent with this key."""
        outgoing = Outgoing(lambda part, data: listener.send(key, part, data))

        def on_message(message: object, data: memoryview | None) -> None:
            match msg.decode(message, msg.AgentReport):
                case msg.SendClosure(offset=offset):
                    work = outgoing.pass_on(msg.ClosureLabel(self.gang), self.file, offset)
                    self._tasks.start(work)
                case msg.PartTaken():
                    outgoing.acknowledged()

        return on_message

    # ── from another agent ──

    def fetch(self, command: msg.FetchClosure, secret: str) -> None:
        """Fetch the closure from another agent, or from the kernel if that is not possible."""
        if self.file.is_complete:  # of an earlier attempt, which was over before the kernel knew
            self._report_progress()
        else:
            self._tasks.start(self._fetch(command, secret))

    async def _fetch(self, command: msg.FetchClosure, secret: str) -> None:
        with suppress(LinkError):
            await self._fetch_from(
                AgentLink(command.endpoint, command.server_key, secret, _SILENCE_MS)
            )
        if not self.file.is_complete:
            self._report(msg.SendClosure(self.gang, self.file.arrived))

    async def _fetch_from(self, link: AgentLink) -> None:
        lost = asyncio.ensure_future(link.lost(_ENTRY_S))
        receiving = asyncio.ensure_future(self._receive(link))
        try:
            await asyncio.wait([lost, receiving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled([lost, receiving])
            link.close()

    async def _receive(self, link: AgentLink) -> None:
        link.send(msg.SendClosure(self.gang, self.file.arrived))
        while not self.file.is_complete:
            message, data = await link.receive()
            part = msg.decode(message, msg.FilePart)  # else it serves this gang no longer
            self.take(part, memoryview(b"") if data is None else data)
            link.send(msg.PartTaken())
