"""The capacity of a cluster for a gang, checked before a job is submitted.

Spark itself answers late: a gang larger than the cluster waits ten minutes in silence, and one that its
scheduler refuses fails after the set-up. So slots, GPUs and dynamic allocation are checked here, in well
under a second; unknown values are None.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.application_status import (
    GLANCE_S,
    ExecutorList,
    other_jobs,
    roster,
)
from hydrogen_magic.driver.placements.spark.gpu_resources import TaskResources, share
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError

_CHECK_S = 0.8
"""How long a capacity check may take if more executors may start, or if answers are slow."""
_POLL_S = 0.05
_SETTLED_S = 10.0
"""Executors of one application start within seconds of each other."""
_FIRST_S = 60.0
"""How long the first executor may take, and one known to be missing: a container, its image, a JVM."""
_MOST_JOBS = 3
"""Number of jobs that are named to a gang that waits for their slots."""
_PARALLELISM = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism")
_SPLITS = re.compile(r"\bRange\b.*\bsplits=(?:Some\()?(\d+)")
_GUESS = 2
"""Spark's number of cores if there are fewer."""


@dataclass(frozen=True)
class ClusterCapacity:
    """The capacity of the cluster."""

    slots: int | None
    """Tasks of this job that can run at once, None if unknown."""
    gpus: bool
    """Every rank will get its own GPU from Spark."""
    profile: Any
    """TaskResourceProfile, None for the session's own."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


ONE_TASK = ClusterCapacity(None, gpus=False, profile=None)
"""For tasks of the session's own resources, one at a time or more."""


def capacity(session: Session, spec: JobSpec) -> ClusterCapacity:
    """Return the capacity for this job. Raises PlacementError if it could never run."""
    settings = SessionSettings.read(session)
    _refuse_dynamic_allocation(settings)
    seen, more_come = _watched(session, settings, spec)
    waits = spec.wait_s is not None and not settings.is_local
    part = share(session, settings, spec, seen, more_come=more_come or (waits and spec.gpu is True))
    slots = _slots(session, settings, part.profile, part.per_task, seen)
    if slots is None or spec.np <= slots:
        return ClusterCapacity(slots, part.for_ranks, part.profile, part.notes)
    # A cluster may get more workers, an application no more than it has asked for.
    most = settings.most_cores if waits or more_come else None
    if most is not None and spec.np > most // settings.task_cpus:
        raise PlacementError(_too_many(settings, spec, part, most // settings.task_cpus, None))
    if not (more_come or waits):
        raise PlacementError(_too_many(settings, spec, part, slots, seen))
    so_far = f"{counted(slots, 'slot')} of {spec.np} so far"
    if more_come:
        note = f"{so_far}: executors are still starting"
    else:
        note = f"{so_far} ({_made_of(settings, part, seen)}): waiting for more executors"
    return ClusterCapacity(None, part.for_ranks, part.profile, (*part.notes, note))


def slots_now(session: Session, capacity: ClusterCapacity) -> int | None:
    """Return how many tasks of this job could run at once now; None if unknown.

    Executors come and go. Spark checks only every fifteen seconds whether a gang fits.
    """
    seen = roster(session, GLANCE_S) if session.is_connect else None
    settings = SessionSettings.read(session)
    return _slots(session, settings, capacity.profile, int(capacity.gpus), seen)


def free_slots(session: Session, capacity: ClusterCapacity) -> int | None:
    """Return how many of the capacity's slots are free now; None if unknown.

    Classic sessions ask the scheduler itself: the UI's values may be ten seconds old.
    """
    if not session.is_connect:
        slots = private_calls.most_tasks_at_once(session, capacity.profile)
        running = private_calls.running_tasks(session)
        if slots is not None and running is not None:
            return max(0, slots - sum(running.values()))
    seen = roster(session, GLANCE_S)
    if seen is None:
        return None
    cpus = SessionSettings.read(session).task_cpus
    free = seen.free_slots(cpus, int(capacity.gpus))
    return free if capacity.slots is None else min(free, capacity.slots)


def slots_by_host(session: Session, capacity: ClusterCapacity) -> dict[str, tuple[int, int]]:
    """Return the number of free slots and of all slots by host, for a classic session."""
    seen = roster(session, GLANCE_S)
    cpus = SessionSettings.read(session).task_cpus
    running = private_calls.running_tasks(session)
    found: dict[str, tuple[int, int]] = {}
    for executor in () if seen is None else seen.executors:
        n_all = executor.slots(cpus, int(capacity.gpus))
        held = executor.active_tasks if running is None else running.get(executor.id, 0)
        n_free = max(0, n_all - held)
        before = found.get(executor.host, (0, 0))
        found[executor.host] = (before[0] + n_free, before[1] + n_all)
    return found


def waits_for(session: Session, tag: str) -> str:
    """Return what is there of the executors, and which jobs hold slots, for a gang that waits.

    ``tag``: of its own job. Empty if unknown.
    """
    return _waits_for(session, other_jobs(session, tag))


def lack_of_slots(session: Session, capacity: ClusterCapacity, *tags: str) -> str:
    """Return what jobs under these tags wait for while others hold all slots; empty if they do not.

    Also if that is unknown.
    """
    jobs = other_jobs(session, *tags)
    slots = slots_now(session, capacity) if jobs else None
    is_full = slots is not None and sum(jobs.values()) >= slots
    return _waits_for(session, jobs) if is_full else ""


def _waits_for(session: Session, jobs: Mapping[str, int]) -> str:
    seen = roster(session, GLANCE_S)
    largest = sorted(jobs.items(), key=lambda job: -job[1])
    held = [f"{name} holds {counted(n, 'slot')}" for name, n in largest[:_MOST_JOBS]]
    if rest := len(largest) - len(held):
        held.append(f"{counted(rest, 'more job')} {'holds' if rest == 1 else 'hold'} slots")
    return "; ".join([*_started(session, seen), *held])


def _started(session: Session, seen: ExecutorList | None) -> list[str]:
    if seen is None:
        return []
    expected, n = SessionSettings.read(session).expected_executors, len(seen.executors)
    if expected is not None and n < expected:
        return [f"{n} of {counted(expected, 'executor')} so far"]
    return [counted(n, "executor")]


def _refuse_dynamic_allocation(settings: SessionSettings) -> None:
    if settings.has_dynamic_allocation and not settings.is_local:  # local mode ignores it
        raise PlacementError(
            "this session uses dynamic allocation, with which Spark cannot run a gang "
            "(SPARK-24942): start it with spark.dynamicAllocation.enabled=false, and set its "
            "size with spark.executor.instances or spark.cores.max"
        )


# ── slots ────────────────────────────────────────────────────────────────────────────────────────


def _watched(
    session: Session, settings: SessionSettings, spec: JobSpec
) -> tuple[ExecutorList | None, bool]:
    """Return the executors, and whether more may start; waits until there are enough, if more may."""
    deadline_s = time.monotonic() + _CHECK_S
    seen = roster(session, _CHECK_S)
    while seen is not None and not _is_complete(seen, settings, spec):
        time.sleep(_POLL_S)
        left_s = deadline_s - time.monotonic()
        again = roster(session, left_s) if left_s > 0 else None
        if again is None:
            return seen, True
        seen = again
    return seen, False


def _is_complete(seen: ExecutorList, settings: SessionSettings, spec: JobSpec) -> bool:
    """True if there are enough executors, or no more are expected."""
    slots = [each.slots(settings.task_cpus, int(spec.gpu is True)) for each in seen.executors]
    expected = settings.expected_executors
    is_reached = expected is not None and len(slots) >= expected
    if settings.is_local or sum(slots) >= spec.np or is_reached:
        return True
    # Missing ones come, and a lost one is replaced, as slowly as the first one starts.
    could_fit = expected is not None and expected * max(slots, default=0) >= spec.np
    is_slow = seen.has_lost or not slots or could_fit
    return seen.at_s - seen.changed_at_s > (_FIRST_S if is_slow else _SETTLED_S)


def _slots(
    session: Session,
    settings: SessionSettings,
    profile: Any,
    gpus_per_task: int,
    seen: ExecutorList | None,
) -> int | None:
    if not session.is_connect:
        by_scheduler = private_calls.most_tasks_at_once(session, profile)
        if by_scheduler is not None:
            return by_scheduler
    if seen is not None:
        return seen.slots(settings.task_cpus, gpus_per_task)
    if settings.slots is not None or gpus_per_task:
        return settings.slots
    cores = registered_cores(session)
    return None if cores is None else cores // settings.task_cpus


def registered_cores(session: Session) -> int | None:
    """Return the current number of cores of all executors, by the number of partitions of a range.

    Every session provides this number, even if the UI is off or not reachable: it is in a query plan,
    without running a job (``CoarseGrainedSchedulerBackend.defaultParallelism``). None if a setting
    overrides it.
    """
    settings = (session.spark.conf.get(name, None) for name in _PARALLELISM)
    if any(value is not None for value in settings):
        return None
    (plan,) = session.spark.sql("EXPLAIN SELECT id FROM range(1)").collect()
    found = _SPLITS.search(plan[0])
    return int(found[1]) if found and int(found[1]) > _GUESS else None


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def _too_many(
    settings: SessionSettings,
    spec: JobSpec,
    part: TaskResources,
    slots: int,
    seen: ExecutorList | None,
) -> str:
    who = settings.master if settings.is_local else "the cluster"
    found = f"np {spec.np}, {who} has {counted(slots, 'slot')}"
    if seen is not None and not seen.executors:
        ways = "stop the applications that hold them", "request smaller executors"
        return (
            f"{found}: this application has no executor. Its master ({settings.master}) may have "
            f"no cores or memory left for it: {settings.remedies(spec.np, *ways)}"
        )
    fewer = [f"use `--np {slots}`"] if slots else []
    more = (
        f"start the session with master local[{spec.np * settings.task_cpus}]"
        if settings.is_local
        else "start the session with more executors or cores"
    )
    return f"{found} ({_made_of(settings, part, seen)}): {settings.remedies(spec.np, *fewer, more)}"


def _made_of(settings: SessionSettings, part: TaskResources, seen: ExecutorList | None) -> str:
    """Describe the slots: ``2 executors x 2 cores, 1 core per task``."""
    executors = () if seen is None else seen.executors
    alike = Counter(_of_one(executor.cores, len(executor.gpus), part) for executor in executors)
    made_of = [f"{counted(n, 'executor')} x {each}" for each, n in alike.items()]
    return ", ".join([*made_of, f"{_of_one(settings.task_cpus, part.per_task, part)} per task"])


def _of_one(n_cores: int, n_gpus: int, part: TaskResources) -> str:
    gpus = f" and {counted(n_gpus, 'GPU')}" if part.per_task else ""
    return f"{counted(n_cores, 'core')}{gpus}"
