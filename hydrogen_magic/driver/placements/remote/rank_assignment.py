"""From attached tasks to a plan: ranks are grouped by host and contiguous, whatever the tasks' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import LOOPBACK, JobSpec, Plan, Slot
from hydrogen_magic.driver.placements.remote import forwarded_settings
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.errors import PlacementError


@dataclass(frozen=True)
class AttachedTask:
    """A task that waits for its rank."""

    agent: RemoteAgent
    about: msg.TaskHello


@dataclass(frozen=True)
class RankAssignment:
    """The assignment of ranks to agents."""

    plan: Plan
    placed: tuple[RemoteAgent, ...]
    """By rank."""
    tasks: tuple[int, ...]
    """Their numbers, by rank."""
    on_other_disks: frozenset[RemoteAgent] = frozenset()
    """Agents of hosts that do not see the directory of this gang's record."""

    @property
    def shares_disk(self) -> bool:
        """Whether all hosts see that directory."""
        return not self.on_other_disks

    @property
    def agents(self) -> tuple[RemoteAgent, ...]:
        """Each of them once, that of rank 0 first."""
        return tuple(dict.fromkeys(self.placed))

    def ranks_on(self, agent: RemoteAgent) -> list[int]:
        return [rank for rank, placed in enumerate(self.placed) if placed is agent]


def unassigned(
    spec: JobSpec, where: str, gpu: str | None = None, notes: tuple[str, ...] = ()
) -> Plan:
    """Return a plan before there are hosts: only what provides them, ``where``, is known."""
    slot = Slot(0, 0, 0, spec.np, spec.np, 1, where, gpu, address="")
    slots = tuple(replace(slot, rank=rank) for rank in range(spec.np))
    return Plan(slots, notes, forwarded_settings.forwarded())


def expected(plan: Plan, hosts: Sequence[str], note: str) -> Plan:
    """Return ``plan`` with the host that each rank will most likely get, and why."""
    slots = (replace(slot, host=host) for slot, host in zip(plan.slots, hosts, strict=True))
    return replace(plan, slots=tuple(slots), hosts_note=note)


def plan(spec: JobSpec, places: Mapping[int, AttachedTask], uses_gpus: bool) -> RankAssignment:
    """Return the plan for the attached tasks. Raises PlacementError if they cannot be ranks."""
    # Not by agent: another one may have become free between two tasks of one machine.
    by_machine: dict[str, list[int]] = {}
    for number in sorted(places):
        by_machine.setdefault(places[number].about.machine, []).append(number)
    slots: list[Slot] = []
    for node, numbers in enumerate(by_machine.values()):
        gpus = _gpus([places[n] for n in numbers]) if uses_gpus else {}
        for local_rank, number in enumerate(numbers):
            agent = places[number].agent
            slots.append(
                Slot(
                    rank=len(slots),
                    local_rank=local_rank,
                    node_rank=node,
                    world_size=spec.np,
                    local_world_size=len(numbers),
                    n_nodes=len(by_machine),
                    host=agent.host,
                    gpu=gpus.get(number),
                    address=agent.held[0],
                    interface=agent.interface if len(by_machine) > 1 else LOOPBACK,
                )
            )
    order = tuple(n for numbers in by_machine.values() for n in numbers)
    placed = tuple(places[n].agent for n in order)
    apart = frozenset(each.agent for each in places.values() if not each.about.shares_disk)
    return RankAssignment(Plan(tuple(slots), _notes(places)), placed, order, apart)


def _gpus(places: list[AttachedTask]) -> dict[int, str]:
    """Return the GPU of each task of one host; addresses may be indices into a shorter list."""
    found: dict[int, str] = {}
    for place in places:
        host, addresses = place.agent.host, place.about.gpus
        if not addresses:
            raise PlacementError(f"a task on host {host} was given no GPU: drop `--gpu`")
        gpu = _visible(addresses[0], place.about.gpus_visible)
        if gpu in found.values():
            raise PlacementError(
                f"GPU {gpu} of host {host} was given to more than one task, but every rank needs "
                "its own: give each task one GPU, or drop `--gpu`"
            )
        found[place.about.number] = gpu
    return found


def _visible(address: str, visible: str | None) -> str:
    """Return CUDA's name of an address if the task itself sees only some GPUs."""
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if names and address.isdigit() and address not in names:
        return names[int(address)] if int(address) < len(names) else address
    return address


def _notes(places: Mapping[int, AttachedTask]) -> tuple[str, ...]:
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
            notes.append(f"hosts have {name} {', '.join(others)}, the notebook has {here}")
    return tuple(notes)
