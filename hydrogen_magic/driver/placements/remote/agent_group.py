"""The agents of one gang on other machines, whatever provides the hosts."""

from __future__ import annotations

from collections.abc import Callable

from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import Attempt, EventSink
from hydrogen_magic.driver.placements.remote.attempt import RemoteAttempt
from hydrogen_magic.driver.placements.remote.provider import HostProvider


class RemoteAgentGroup:
    """See :class:`hydrogen_magic.driver.placements.SessionAgentGroup`."""

    def __init__(self, hosts: Callable[[], HostProvider]) -> None:
        """``hosts``: returns the provider of an attempt's hosts."""
        self.on_lost: Callable[[str], None] = lambda why: None
        self._hosts = hosts
        self._session: RemoteAttempt | None = None
        """The first cell's, which keeps the hosts and ranks of a session."""
        self._running: RemoteAttempt | None = None
        self._lost_hosts: dict[str, float] = {}
        """See :attr:`HostProvider.lost_hosts`."""

    @property
    def is_retained(self) -> bool:
        """Whether ranks wait for the next cell of a session."""
        return self._session is not None and self._session.is_retained

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        if self._session is not None and self._session.is_retained:
            await self._run_cell(self._session, attempt, sink)
            return
        hosts = self._hosts()
        hosts.lost_hosts = dict(self._lost_hosts)
        self._running = RemoteAttempt(attempt, sink, hosts)
        self._running.on_lost = self.on_lost
        try:
            await self._running.run()
        finally:
            self._lost_hosts.update(self._running.lost_hosts)
            self._session, self._running = self._running, None

    async def _run_cell(self, session: RemoteAttempt, attempt: Attempt, sink: EventSink) -> None:
        self._running = session
        try:
            await session.run_cell(attempt, sink)
        finally:
            self._running = None

    async def end_session(self) -> None:
        if self._session is not None:
            self._session.end_session()

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()

    def send(self, command: msg.AgentCommand) -> None:
        if self._running is not None:
            self._running.send(command)

    async def release(self) -> None:
        """Agents stay warm by themselves, and the last hosts are released in the background."""
