"""Placements: where ranks run. A placement plans without side effects, then opens an agent group to launch.

``plan(spec)`` assigns ranks to hosts or raises if that is impossible; ``--dry-run`` prints it. A
:class:`AgentGroup` is the kernel's handle on the agents of one gang; the activity of ranks comes back as
events.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.core.events import Event
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver.placements.surroundings import Surroundings
from hydrogen_magic.driver.rendezvous import Rendezvous
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.serialization.payload import Payload, to_memfd


class AgentLostError(HydrogenError):
    """The agents that ran an attempt have ended unexpectedly. Nothing of the attempt is left.

    Of the errors of :meth:`AgentGroup.launch`, only this one leaves the gang its retries.
    """


class WorkFeed(Protocol):
    """Sends data to the ranks while they run and receives their results, in its own thread."""

    options: Mapping[str, Any]
    """Instructions for the ranks, as JSON."""
    key: str
    """Identifies the cell and its names: ranks may be kept for the same key. Empty: they are not kept."""

    def attach(
        self,
        emit: Callable[[Event], None],
        stop: Callable[[], None],
        now_s: Callable[[], float],
        cancel_rank: Callable[[int], None],
        record: Path,
    ) -> None:
        """Set the receiver of events, the function that ends ranks, and the gang's clock.

        ``cancel_rank`` ends one rank, which counts as done: others have done its work. ``record``: the
        directory of the gang's run log.
        """

    def open(self, n_ranks: int) -> list[int]:
        """Start serving an attempt; return the ranks' ends of the channels, owned by the caller."""

    def close(self) -> None:
        """The attempt is over. Raises errors of this side."""

    def require_end(self) -> None:
        """Raise HydrogenError if ranks that have succeeded have left work undone."""

    def end(self, outcome: str, stop_reason: str = "user") -> None:
        """The gang is over, with this final state: release everything that is not needed any more.

        ``stop_reason``: why it was stopped, if it was.
        """


class SessionRun(Protocol):
    """One cell of a session, and what the session learns of it. Called on the hub's loop."""

    key: str
    """Identifies the session for its agents."""
    cell: msg.SessionCell | None
    """None for a gang whose ranks ``%%infer`` keeps."""
    ranks: tuple[int, ...]
    """Those that take part."""

    def begin(self, gang: str, stop: Callable[[str, bool], None]) -> None:
        """The cell begins as this gang; ``stop`` stops it, for a reason of
        :class:`~hydrogen_magic.core.events.StopRequested`, and at once if the second argument is true.
        """

    def note(self, event: Event) -> None:
        """Take an event of the cell."""

    def finish(self) -> str:
        """The cell is over; return a text for the user if the session is over, too."""


class ClosureFile:
    """A closure as a memory file, in its state at the launch, until it is released.

    It holds no references to the notebook's arrays: they may be deleted while the gang runs.
    """

    def __init__(self, closure: Payload) -> None:
        self._fd = to_memfd(closure, "closure")

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._fd).st_size

    def dup(self) -> int:
        """Return a descriptor of the file, owned by the caller."""
        return os.dup(self._fd)

    def release(self) -> None:
        """Close the file: no further rank needs it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Job:
    """State that all attempts of a gang share."""

    spec: JobSpec
    plan: Plan
    closure: ClosureFile
    """The closure that the ranks run."""
    preload: tuple[str, ...]
    """Modules that the ranks will import."""
    needs: tuple[str, ...]
    """Those of them that the ranks cannot run without."""
    rendezvous: Rendezvous
    record_dir: Path
    clock_zero_s: float
    """``time.monotonic()`` of this process at ``at_s == 0``."""
    surroundings: Surroundings = field(default_factory=Surroundings.now)
    """The notebook's, for every attempt."""
    secrets: tuple[str, ...] = ()
    """Of the kernel's secrets those that travel with the gang: agents mask them too."""
    observers: tuple[msg.ObserverSpec, ...] = ()
    """What the ranks attach."""
    feed: WorkFeed | None = None
    """Source of data for the ranks after the cell has run, None if the cell is all."""
    datasets: Mapping[str, str] = field(default_factory=dict)
    """Data that only this machine has; see :attr:`hydrogen_magic.capture.Captured.datasets`."""
    session: SessionRun | None = None
    """Set for a cell of a session, and for ``%%infer`` if its ranks are kept."""

    @property
    def env(self) -> dict[str, str]:
        """The environment of ranks on this machine, without what tells them apart."""
        return {**self.surroundings.env, **dict(self.spec.env)}

    @property
    def session_cell(self) -> msg.SessionCell | None:
        """Which cell of a session it is."""
        return None if self.session is None else self.session.cell

    @property
    def idle_ranks(self) -> list[int]:
        """The session's ranks that the cell leaves out."""
        taking_part = None if self.session is None else self.session.ranks
        ranks = (slot.rank for slot in self.plan.slots)
        return [rank for rank in ranks if taking_part is not None and rank not in taking_part]

    def now_s(self) -> float:
        """Return the gang's time for events."""
        return time.monotonic() - self.clock_zero_s

    @property
    def checkpoints(self) -> Path:
        """Directory where ranks on this machine save checkpoints for the next attempt."""
        return self.record_dir / run_log.CHECKPOINTS

    def close(self, outcome: str, stop_reason: str = "user") -> None:
        """Release the closure, and what is needed only until the gang has ended, with this final state."""
        self.closure.release()
        if self.feed is not None:
            self.feed.end(outcome, stop_reason)

    def delete_checkpoints(self) -> None:
        """Delete the ranks' checkpoints: the gang has succeeded, and its results are safe."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks."""

    gang: str
    number: int
    job: Job
    is_recording: Callable[[], bool] = lambda: False
    """Whether ranks that start now record spans."""


@dataclass(frozen=True)
class EventSink:
    """Receives the events of an agent group; called on the hub's loop."""

    emit: Callable[[Event], None]
    deliver: Callable[[int, msg.ResultPart, Payload], None]
    """Receives one of a rank's results; one with an error has no bytes."""
    take_trace: Callable[[int, int, mmap.mmap], None] = lambda rank, number, trace: None
    """Receives a rank's answer to ``profile``: rank, number, and the file's bytes."""


class AgentGroup(ABC):
    """The kernel's handle on the agents of one gang. Its methods are called on the hub's loop."""

    has_sessions = False
    """Ranks can stay for the next cell of a session, for which :meth:`launch` is called again. Such a group
    calls :attr:`on_lost`, and overrides :attr:`is_retained` and :meth:`end_session`."""
    on_lost: Callable[[str], None]
    """Called with the reason when waiting ranks have ended."""

    @property
    def is_retained(self) -> bool:
        """Whether the ranks wait for the next cell: :meth:`release` keeps them."""
        return False

    @abstractmethod
    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        """Start the ranks and return when nothing of this attempt is left, however it ended.

        Raises AgentLostError when another attempt may succeed, else HydrogenError.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask the ranks to end, then force them."""

    @abstractmethod
    def kill(self) -> None:
        """End the ranks at once."""

    @abstractmethod
    def send(self, command: msg.AgentCommand) -> None:
        """Pass on a command to the running ranks, or ignore it if they cannot carry it out.

        It is one of these of :mod:`hydrogen_magic.core.messages`: ``KillRanks``, which ends one rank at once
        that is no longer needed; ``ReportStacks``; ``RecordSpans``, while ranks that start later go by
        :attr:`Attempt.is_recording`; ``ProfileSteps``; ``AnswerInput``.
        """

    @abstractmethod
    async def release(self) -> None:
        """Release the agents; warm ones may be kept for the next gang."""

    async def end_session(self) -> None:
        """End the waiting ranks, and release the agents."""
        await self.release()


class Planner(ABC):
    """What both kinds of placements do."""

    on_this_machine = True
    """Ranks use the libraries installed here: the rendezvous' own is checked before the launch."""
    ends_with_kernel = "its ranks end with the kernel; keep the kernel running, or use --on local"
    """Why ``--outlive`` is refused and what to do instead; empty if a process other than the kernel can
    launch gangs there."""

    @abstractmethod
    def plan(self, spec: JobSpec) -> Plan:
        """Return who runs where; raises PlacementError when that is impossible. No effect."""

    def plan_beside(self, spec: JobSpec, gpus_in_use: Callable[[], Sequence[str]]) -> Plan:
        """Return :meth:`plan` for a gang that runs beside others.

        ``gpus_in_use``: returns the GPUs of the others on this machine, one for each of their ranks.
        """
        return self.plan(spec)

    def owner_setup(self) -> Mapping[str, object]:
        """Return the values, as JSON, that the owner of a gang needs to launch it; they may be secret.

        Raises PlacementError if gangs would end with the kernel in spite of their owner.
        """
        return {}

    def in_owner(self, setup: Mapping[str, object]) -> AbstractContextManager[None]:
        """Return a context for the launch and the life of a gang in its owner.

        ``setup``: what :meth:`owner_setup` has returned in the kernel.
        """
        return nullcontext()

    def n_at_once(self, spec: JobSpec, most: int) -> int:
        """Return how many gangs like ``spec`` can run beside each other: 1 to ``most``."""
        return 1


class Placement(Planner):
    """Where ranks run, in processes of their own. A plug-in's derives from this class."""

    @abstractmethod
    def open(self, spec: JobSpec) -> AgentGroup:
        """Return an agent group for one gang."""


class InKernelPlacement(Planner):
    """The one rank runs in the kernel."""

    @abstractmethod
    def run_here(self, attempt: Attempt, sink: EventSink) -> None:
        """Run the rank now, and deliver its result. Raises what the cell raises."""
