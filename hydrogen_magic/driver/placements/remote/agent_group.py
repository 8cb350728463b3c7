"""The agents of one gang on other machines, whatever provides the hosts."""

from __future__ import annotations

from collections.abc import Callable

from hydrogen_magic.core.messages import (
    AgentCommand,
    AnswerInput,
    KillRanks,
    ProfileSteps,
    RecordSpans,
    ReportStacks,
)
from hydrogen_magic.driver.placements import Attempt, EventSink
from hydrogen_magic.driver.placements.remote.attempt import RemoteAttempt
from hydrogen_magic.driver.placements.remote.provider import HostProvider


class RemoteAgentGroup:
    """See :class:`hydrogen_magic.driver.placements.AgentGroup`."""

    def __init__(self, hosts: Callable[[], HostProvider]) -> None:
        """``hosts``: returns the provider of an attempt's hosts."""
        self._hosts = hosts
        self._running: RemoteAttempt | None = None
        self._lost_hosts: dict[str, float] = {}
        """See :attr:`HostProvider.lost_hosts`."""
        self._is_recording: bool | None = None
        """Requested recording state; None: as in the job."""

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        hosts = self._hosts()
        hosts.lost_hosts = dict(self._lost_hosts)
        self._running = RemoteAttempt(attempt, sink, hosts, self._is_recording)
        try:
            await self._running.run()
        finally:
            self._lost_hosts.update(self._running.lost_hosts)
            self._running = None

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()

    def kill(self) -> None:
        if self._running is not None:
            self._running.kill()

    def cancel_rank(self, rank: int) -> None:
        self._send(lambda gang: KillRanks(gang, rank))

    def ask_stacks(self) -> None:
        self._send(lambda gang: ReportStacks())

    def record(self, on: bool) -> None:
        self._is_recording = on
        if self._running is not None:
            self._running.is_recording = on
        self._send(lambda gang: RecordSpans(gang, on))

    def profile(self, number: int, steps: int) -> None:
        self._send(lambda gang: ProfileSteps(gang, number, steps))

    def _send(self, command: Callable[[str], AgentCommand]) -> None:
        """Send ``command(gang)`` to all agents whose ranks run."""
        if self._running is not None:
            self._running.send(command)

    def answer_input(self, rank: int, number: int, text: str, error: str) -> None:
        self._send(lambda gang: AnswerInput(gang, rank, number, text, error))

    async def release(self) -> None:
        """Agents stay warm by themselves, and the last hosts are released in the background."""
