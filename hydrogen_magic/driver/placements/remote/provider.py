"""What a placement on other machines has of its own: where it finds hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import AgentLostError, Attempt, EventSink
from hydrogen_magic.driver.placements.remote.host_tasks import HostTasks
from hydrogen_magic.errors import HydrogenError, PlacementError


class HostLostError(AgentLostError):
    """The agent of one host has ended; those of other hosts may be alive."""

    def __init__(self, problem: msg.TaskProblem) -> None:
        super().__init__(f"{problem.text} (host {problem.host})")
        self.problem = problem


class HostsRevokedError(HydrogenError):
    """The hosts were taken away on purpose, which says more than the reports of their agents.

    The gang is not tried again.
    """


class HostProvider(ABC):
    """The hosts of one attempt. Its methods are called on the hub's loop, each once and in this order."""

    noun: ClassVar[str] = "hosts"
    """What its hosts are called in messages."""
    lost_hosts: Mapping[str, float] = MappingProxyType({})
    """Hosts that stopped responding in earlier attempts of the gang: ``TaskHello.host`` -> the monotonic time
    of the last message. A provider that may not have noticed should choose others.
    """

    @property
    def gives_gpus(self) -> bool:
        """Whether every task has a GPU of its own: the first of its ``TaskHello.gpus``, which a program takes
        from ``CUDA_VISIBLE_DEVICES``.
        """
        return False

    @abstractmethod
    async def acquire(self, attempt: Attempt, sink: EventSink) -> None:
        """Wait until there is room for all ranks; report a wait as :class:`~.events.Queued`.

        Raises PlacementError if there will never be room. It is cancelled when the gang is stopped.
        """

    @abstractmethod
    async def start_agents(self, tasks: HostTasks, sink: EventSink) -> None:
        """Run one task per rank on the hosts, all at once, and return when all of them have ended.

        A task starts the agent of its host unless that runs already, and waits until its rank is over.
        Raises the error of a task that fails: the others cannot go on without it.
        """

    @abstractmethod
    async def release(self) -> None:
        """End the tasks that still run, and give the hosts back. Called whatever has happened before.

        The end of a task also ends an agent that hangs, which the kernel cannot reach. A task that is killed
        leaves that to a process in its own session, for up to two seconds.
        """


def task_error(
    problem: msg.TaskProblem, advice: Mapping[str, str] = MappingProxyType({})
) -> HydrogenError:
    """Return the user's error for a task's problem. ``advice``: kind of the problem -> its remedy."""
    if problem.kind == "agent_ended":
        return HostLostError(problem)
    remedy = advice.get(problem.kind, "")
    return PlacementError(f"{problem.text} (host {problem.host}){remedy and f': {remedy}'}")
