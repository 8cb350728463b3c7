"""The agents of one gang on other machines, whatever provides the hosts."""

from __future__ import annotations

from collections.abc import Callable

from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import AgentGroup, Attempt, EventSink
from hydrogen_magic.driver.placements.remote.attempt import RemoteAttempt
from hydrogen_magic.driver.placements.remote.provider import HostProvider
from hydrogen_magic.errors import PlacementError


class RemoteAgentGroup(AgentGroup):
    """The agents on the hosts of a provider."""

    has_sessions = True

    def __init__(self, hosts: Callable[[], HostProvider]) -> None:
        """``hosts``: returns the provider of an attempt's hosts, such as its class.

        Raises PlacementError if this lacks a method.
        """
        if missing := sorted(getattr(hosts, "__abstractmethods__", ())):
            raise PlacementError(
                f"the provider of hosts {hosts!r} does not define {' and '.join(missing)}: update its plug-in"
            )
        self.on_lost = lambda why: None
        self._hosts = hosts
        self._attempt: RemoteAttempt | None = None
        """The last one; the first cell's keeps the hosts and ranks of a session for the later ones."""
        self._lost_hosts: dict[str, float] = {}
        """See :attr:`HostProvider.lost_hosts`."""

    @property
    def is_retained(self) -> bool:
        return self._attempt is not None and self._attempt.is_retained

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        if self._attempt is not None and self._attempt.is_retained:
            await self._attempt.run_cell(attempt, sink)
            return
        hosts = self._hosts()
        hosts.lost_hosts = dict(self._lost_hosts)
        self._attempt = RemoteAttempt(attempt, sink, hosts)
        self._attempt.on_lost = self.on_lost
        try:
            await self._attempt.run()
        finally:
            self._lost_hosts.update(self._attempt.lost_hosts)

    async def end_session(self) -> None:
        if self._attempt is not None:
            self._attempt.end_session()

    def stop(self) -> None:
        if self._attempt is not None:
            self._attempt.stop()

    def kill(self) -> None:
        if self._attempt is not None:
            self._attempt.kill()

    def send(self, command: msg.AgentCommand) -> None:
        if self._attempt is not None:
            self._attempt.send(command)

    async def release(self) -> None:
        """Agents stay warm by themselves, and the last hosts are released in the background."""
