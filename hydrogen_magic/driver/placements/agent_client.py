"""The kernel's end of any agent: its messages and its state.

Its placement determines how it is started and which data bypasses the channel:
:mod:`~hydrogen_magic.driver.placements.local_agents` on this machine, ``placements.spark`` elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.placements import EventSink
from hydrogen_magic.transport.channel import Hub

__all__ = ["AgentClient"]

_RESPONSE_S = {"stop": 10.0, "kill": 3.0}
"""How long an agent may stay silent after a command. Its event loop answers within milliseconds; on a
machine under heavy load it may take seconds."""


class AgentClient(ABC):
    """The kernel's view of one agent. Created, used and ended on the hub's loop."""

    def __init__(self, hub: Hub) -> None:
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
        self.keys = hub.admit(self._on_message)
        self.greeted: asyncio.Future[None] = hub.loop.create_future()
        self._swept: asyncio.Future[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its hello message has arrived."""
        return self.greeted.done()

    def send(self, action: str, **fields: Any) -> None:
        gang = self.attempt[0] if self.attempt else ""
        self.hub.send(self.keys.key, {"gang": gang, **fields, "do": action})

    def command(self, action: str) -> None:
        """Send ``stop`` or ``kill``. From now on the agent must respond."""
        self._commanded_s = time.monotonic()
        self._response_limit_s = min(self._response_limit_s, _RESPONSE_S[action])
        self.send(action)

    @property
    def is_unresponsive(self) -> bool:
        """Whether it has not answered the last command for too long."""
        return (
            time.monotonic() - max(self.last_message_s, self._commanded_s) > self._response_limit_s
        )

    async def responds(self) -> bool:
        """Return whether the agent answers a message."""
        self._message_arrived.clear()
        self.send("ping")
        try:
            await asyncio.wait_for(self._message_arrived.wait(), _RESPONSE_S["kill"])
        except asyncio.TimeoutError:
            return False
        return True

    def expect_sweep(self) -> asyncio.Future[None]:
        """Return a future that is done when nothing of the launched attempt is left."""
        self._response_limit_s = math.inf
        self._swept = self.hub.loop.create_future()
        return self._swept

    def count_as_swept(self) -> None:
        """Record that nothing of the attempt is left there; the agent itself cannot report it."""
        self.finish(self._swept)

    def fail(self, error: BaseException) -> None:
        """No more messages of the attempt will arrive."""
        if self._swept is not None and not self._swept.done():
            self._swept.set_exception(error)

    def _on_message(self, message: dict[str, Any]) -> None:
        self.last_message_s = time.monotonic()
        self._message_arrived.set()
        try:
            self.take(message)
        except Exception as error:
            # An error of ours or of the agent: this gang ends, others continue.
            if self._swept is None or self._swept.done():
                raise
            self.fail(error)
            self.kill()

    @abstractmethod
    def kill(self) -> None:
        """End an agent that sends malformed messages."""

    def take(self, message: dict[str, Any]) -> None:
        """Handle a message of the agent."""
        if "hello" in message:
            self.held = tuple(message["held"])
            self.finish(self.greeted)
        elif message.get("gang", message.get("swept")) != (self.attempt or ("",))[0]:
            pass  # of a gang that has ended
        elif "swept" in message:
            if message["held"] is not None:  # otherwise it is about to end
                self.held = tuple(message["held"])
            self.finish(self._swept)
        elif self.sink is not None and self.attempt == (message["gang"], message["attempt"]):
            for encoded in message["events"]:
                self.sink.emit(ev.decode(encoded))

    def finish(self, future: asyncio.Future[None] | None) -> None:
        if future is not None and not future.done():
            future.set_result(None)
