"""From attached tasks to a plan: ranks are grouped by host and contiguous, whatever Spark's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydrogen_magic.core.job import LOOPBACK, JobSpec, Plan, Slot
from hydrogen_magic.core.messages import TaskHello
from hydrogen_magic.driver.placements.spark.remote_agents import RemoteAgent
from hydrogen_magic.errors import PlacementError

__all__ = ["RankAssignment", "BarrierTask", "plan"]


@dataclass(frozen=True)
class BarrierTask:
    """A barrier task that waits for its rank."""

    agent: RemoteAgent
    about: TaskHello


@dataclass(frozen=True)
class RankAssignment:
    """The assignment of ranks to agents."""

    plan: Plan
    placed: tuple[RemoteAgent, ...]
    """By rank."""
    partitions: tuple[int, ...]
    """By rank."""
    shares_disk: bool
    """All hosts share the directory of this gang's record."""

    @property
    def agents(self) -> tuple[RemoteAgent, ...]:
        """Each of them once, that of rank 0 first."""
        return tuple(dict.fromkeys(self.placed))

    def ranks_on(self, agent: RemoteAgent) -> list[int]:
        return [rank for rank, placed in enumerate(self.placed) if placed is agent]


def plan(spec: JobSpec, places: Mapping[int, BarrierTask], uses_gpus: bool) -> RankAssignment:
    """Return the plan for the attached tasks. Raises PlacementError if they cannot be ranks."""
    # Not by agent: another one may have become free between two tasks of one machine.
    by_machine: dict[str, list[int]] = {}
    for partition in sorted(places):
        by_machine.setdefault(places[partition].about.machine, []).append(partition)
    slots: list[Slot] = []
    for node, partitions in enumerate(by_machine.values()):
        gpus = _gpus([places[p] for p in partitions]) if uses_gpus else {}
        for local_rank, partition in enumerate(partitions):
            agent = places[partition].agent
            slots.append(
                Slot(
                    len(slots), local_rank, node, spec.np, len(partitions), len(by_machine),
                    agent.host, gpus.get(partition), agent.held[0],
                    agent.interface if len(by_machine) > 1 else LOOPBACK,
                )
            )  # fmt: skip
    order = tuple(p for partitions in by_machine.values() for p in partitions)
    placed = tuple(places[p].agent for p in order)
    shares = all(place.about.shares_disk for place in places.values())
    return RankAssignment(Plan(tuple(slots), _notes(places)), placed, order, shares)


def _gpus(places: list[BarrierTask]) -> dict[int, str]:
    """Return the GPU of each task of one host; Spark's addresses may be indices into a shorter list."""
    found: dict[int, str] = {}
    for place in places:
        host, addresses = place.agent.host, place.about.gpus
        if not addresses:
            raise PlacementError(f"Spark assigned no GPU to a task on host {host}: drop `--gpu`")
        gpu = _visible(addresses[0], place.about.gpus_visible)
        if gpu in found.values():
            raise PlacementError(
                f"Spark assigned GPU {gpu} of host {host} to more than one task, but every rank "
                "needs its own: set spark.task.resource.gpu.amount to 1"
            )
        found[place.about.partition] = gpu
    return found


def _visible(address: str, visible: str | None) -> str:
    """Return CUDA's name of an address if the executor itself sees only some GPUs."""
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if names and address.isdigit() and address not in names:
        return names[int(address)] if int(address) < len(names) else address
    return address


def _notes(places: Mapping[int, BarrierTask]) -> tuple[str, ...]:
    """Warn of libraries with other versions there: pickles may not be compatible."""
    from importlib import metadata

    notes = []
    for name in ("torch", "numpy"):
        there = {p.about.versions.get(name, "") for p in places.values()} - {""}
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        others = sorted(v for v in there if v != here)
        if others:
            notes.append(f"executors have {name} {', '.join(others)}, the notebook has {here}")
    return tuple(notes)
