"""Where ranks run: a placement plans without effect, then opens a agent_group that can be launched.

``plan(spec)`` says who runs where or raises what is impossible; ``--dry-run`` prints it. A
:class:`AgentGroup` is the kernel's handle on the agents of one gang; what ranks do comes back as events.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hydrogen_magic.core.events import Event
from hydrogen_magic.core.job import PLACEMENTS, JobSpec, Plan
from hydrogen_magic.driver.rendezvous import Rendezvous
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.serialization.payload import Payload, to_memfd
from hydrogen_magic.serialization.result_stream import ResultPart

__all__ = [
    "Attempt",
    "ClosureFile",
    "AgentGroup",
    "WorkFeed",
    "Job",
    "Placement",
    "EventSink",
    "get",
]


class WorkFeed(Protocol):
    """Gives the ranks work while they run and takes what comes of it, on a thread of its own."""

    options: Mapping[str, Any]
    """What the ranks must know, as JSON."""
    key: str
    """Says what the cell and its names are: ranks may be kept for the same. Empty: they are not."""

    def attach(
        self,
        emit: Callable[[Event], None],
        stop: Callable[[], None],
        now_s: Callable[[], float],
        dismiss: Callable[[int], None],
    ) -> None:
        """Say who is told of progress, how the ranks are ended, and what the gang's time is.

        ``dismiss`` ends one rank, which counts as done: others have done its work.
        """
        ...

    def open(self, n_ranks: int) -> list[int]:
        """Begin to serve an attempt; return the ranks' ends of channels, the caller's to close."""
        ...

    def close(self) -> None:
        """The attempt is over. Raises what went wrong on this side, if anything did."""
        ...

    def abandon(self) -> None:
        """The gang is over: let go of what has not become a result."""
        ...


class ClosureFile:
    """A closure as a memory file, as it was when the gang was launched, until it is released.

    The notebook's arrays are not kept: they may be deleted while the gang runs.
    """

    def __init__(self, closure: Payload) -> None:
        self._fd = to_memfd(closure, "closure")

    def dup(self) -> int:
        """Return a descriptor of the file, the caller's to close."""
        return os.dup(self._fd)

    def release(self) -> None:
        """Close the file: no further rank needs it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True)
class Job:
    """Everything that all attempts of a gang run by."""

    spec: JobSpec
    plan: Plan
    closure: ClosureFile | Payload
    """What the ranks unpack and run; a parcel for the inline placement."""
    preload: tuple[str, ...]
    """Modules that the ranks will import."""
    needs: tuple[str, ...]
    """Of these, the ones without which they cannot run."""
    rendezvous: Rendezvous
    record_dir: Path
    clock_zero_s: float
    """``time.monotonic()`` of this process that is ``at_s == 0``."""
    secrets: tuple[str, ...] = ()
    """Of the kernel's secrets those that travel with the gang: agents mask them too."""
    feed: WorkFeed | None = None
    """What the ranks work on once the cell has run, None where the cell is all."""

    def now_s(self) -> float:
        """Return the gang's time, as events have it."""
        return time.monotonic() - self.clock_zero_s

    @property
    def checkpoints(self) -> Path:
        """Where ranks on this machine save what their next attempt goes on from."""
        return self.record_dir / "checkpoints"

    def release_closure(self) -> None:
        """Free the memory of the closure: every rank of the last attempt has loaded it."""
        if isinstance(self.closure, ClosureFile):
            self.closure.release()

    def close(self, *, keep_checkpoints: bool) -> None:
        """Let go of the closure, and of what may be gigabytes unless somebody may want it yet."""
        self.release_closure()
        if self.feed is not None:
            self.feed.abandon()
        if not keep_checkpoints:
            shutil.rmtree(self.checkpoints, ignore_errors=True)


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks."""

    gang: str
    number: int
    job: Job


@dataclass(frozen=True)
class EventSink:
    """Where a agent_group tells what happens; called on the hub's loop."""

    emit: Callable[[Event], None]
    deliver: Callable[[int, ResultPart, Payload], None]
    """Takes one of a rank's results; one with an error has no bytes."""
    take_trace: Callable[[int, int, mmap.mmap], None] = lambda rank, number, trace: None
    """Takes what a rank answers to ``profile``: rank, number, and the file's bytes."""


class AgentGroup(Protocol):
    """The kernel's handle on the agents of one gang. Its methods are called on the hub's loop."""

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        """Start the ranks and return when nothing of this attempt is left, however it ended."""
        ...

    def stop(self) -> None:
        """Ask the ranks to end, then make them."""
        ...

    def kill(self) -> None:
        """End the ranks at once."""
        ...

    def dismiss(self, rank: int) -> None:
        """End one rank at once, of which nothing is wanted any more."""
        ...

    def ask_stacks(self) -> None:
        """Have every rank's stacks sent as events."""
        ...

    def record(self, on: bool) -> None:
        """Have the ranks record what they do, or leave it; also those that start later."""
        ...

    def profile(self, number: int, steps: int) -> None:
        """Have every rank that runs profile its next ``steps`` steps; none takes that back.

        ``number`` comes back with each answer.
        """
        ...

    async def release(self) -> None:
        """Give back what the agent_group holds; warm agents may be kept for the next gang."""
        ...


class Placement(Protocol):
    """What a module of this package offers."""

    def plan(self, spec: JobSpec) -> Plan:
        """Return who runs where; raises PlacementError when that is impossible. No effect."""
        ...

    def open(self, spec: JobSpec) -> AgentGroup:
        """Return a agent_group for one gang; the inline placement has none and runs in the kernel itself."""
        ...


def get(name: str) -> Placement:
    """Return the placement of this name, or raise PlacementError with what there is."""
    if name == "local":
        from hydrogen_magic.driver.placements.local import LocalPlacement

        return LocalPlacement()
    if name == "spark":
        from hydrogen_magic.driver.placements.spark.placement import SparkPlacement

        return SparkPlacement()
    if name == "inline":
        from hydrogen_magic.driver.placements.inline import InlinePlacement

        return InlinePlacement()
    raise PlacementError(f"`--on {name}` is not supported; choose {', '.join(PLACEMENTS)}")
