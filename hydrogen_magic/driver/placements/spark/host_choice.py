"""The hosts that ranks are packed onto or spread over, as Spark's preferred locations of their tasks.

Locations are preferences: Spark's scheduler follows them where slots are free, and after
``spark.locality.wait`` (3 s) it takes any slots, so a gang never waits longer because of its hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, slots_by_host
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError

_ABORTS = "spark.locality.wait.legacyResetOnTaskLaunch"
"""With this setting Spark aborts a barrier stage whose preferred locations are taken."""


@dataclass(frozen=True)
class HostChoice:
    """The preferred host of each task."""

    hosts: tuple[str, ...]
    """By the task's number; tasks of one host follow each other, as the ranks will. Empty: Spark chooses."""
    note: str
    """What was chosen and why, for the user."""


def choose(
    session: Session, capacity: ClusterCapacity, spec: JobSpec, avoided: Collection[str] = ()
) -> HostChoice | None:
    """Return the hosts for this gang by the slots that are free now; None: Spark chooses.

    Slots that other jobs hold count if the free ones are not enough. Hosts in ``avoided`` are not chosen.
    Raises PlacementError if the user has requested hosts and Spark accepts no locations.
    """
    packs = spec.pack if spec.pack is not None else (capacity.gpus or None)
    if packs is None and not avoided:
        return None
    obstacle = obstacle_to_choice(session)
    if obstacle:
        if spec.pack is None:
            return None
        raise PlacementError(f"{_option(spec.pack)} is not possible: {obstacle}")
    slots = slots_by_host(session, capacity)
    if not slots and spec.pack is not None:
        unknown = "while the hosts of the cluster's executors are unknown"
        return HostChoice((), f"{_option(spec.pack)} has no effect {unknown}")
    n_hosts = len(slots)
    slots = {host: count for host, count in slots.items() if host not in avoided}
    free = {host: n_free for host, (n_free, _) in slots.items()}
    every = {host: n_all for host, (_, n_all) in slots.items()}
    is_free = sum(free.values()) >= spec.np
    if n_hosts == 1 or sum(every.values()) < spec.np:
        return None
    ranks = (packed if packs else spread)(spec.np, free if is_free else every)
    hosts = tuple(host for host, count in ranks.items() for _ in range(count))
    by = "by their free slots" if is_free else "by all their slots, since too few are free"
    asked = f"Spark is asked for {len(ranks)} of the cluster's {n_hosts} hosts"
    note = f"{_why(spec, packs)}: {asked}, {by}"
    without = ", ".join(sorted(avoided))
    return HostChoice(
        hosts, f"{note}, without {without}, which did not respond" if without else note
    )


def _why(spec: JobSpec, packs: bool | None) -> str:
    if packs is None:
        return "a lost host is avoided"
    return _option(packs) if spec.pack is not None else "ranks with GPUs are packed"


def packed(np: int, slots: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks by host, on the fewest hosts. ``slots`` has room for all ranks.

    The last host is the smallest that fits, which leaves the large ones to other gangs.
    """
    left, ranks = dict(slots), dict[str, int]()
    while np > 0:
        fitting = [host for host in left if left[host] >= np]
        host = min(fitting, key=left.__getitem__) if fitting else max(left, key=left.__getitem__)
        ranks[host] = min(np, left.pop(host))
        np -= ranks[host]
    return ranks


def spread(np: int, slots: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks by host, on the most hosts and in equal parts where there is room."""
    ranks: Counter[str] = Counter()
    for _ in range(np):
        room = [host for host in slots if ranks[host] < slots[host]]
        ranks[min(room, key=lambda host: (ranks[host], -slots[host]))] += 1
    return dict(ranks)


def obstacle_to_choice(session: Session) -> str:
    """Return why Spark cannot be given locations, with the remedy; empty if it can."""
    if session.is_connect:
        return (
            "Spark Connect has no way to choose the hosts of tasks; drop the option, or use a "
            "classic session"
        )
    if str(session.spark.conf.get(_ABORTS, "false")).lower() == "true":
        return f"with {_ABORTS}=true Spark aborts gangs whose preferred hosts are taken; unset it"
    return ""


def _option(packs: bool) -> str:
    return "`--pack`" if packs else "`--spread`"
