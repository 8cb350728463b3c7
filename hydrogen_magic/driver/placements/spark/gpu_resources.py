"""GPU scheduling in Spark: whether every rank gets its own GPU, and with which resource profile.

Spark assigns GPUs to tasks if its workers report them and the session requests them
(``spark.executor.resource.gpu.amount``). A TaskResourceProfile requests one GPU for each task, or the
session itself if its ``spark.task.resource.gpu.amount`` is 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.application_status import ExecutorList
from hydrogen_magic.driver.placements.spark.job_errors import explained
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError

_RESOURCE = "gpu"


@dataclass(frozen=True)
class TaskResources:
    """Resources of one task besides its cores."""

    per_task: int
    """GPUs that Spark reserves for each task when it counts slots."""
    for_ranks: bool
    """True if each of them belongs to one rank only."""
    profile: Any = None
    """TaskResourceProfile, None for the session's own."""
    notes: tuple[str, ...] = ()


def share(
    session: Session,
    settings: SessionSettings,
    spec: JobSpec,
    seen: ExecutorList | None,
    *,
    more_come: bool,
) -> TaskResources:
    """Return the GPUs per task. Raises PlacementError if ``--gpu`` is not possible.

    ``seen``: the executors, None if unknown. ``more_come``: more may start soon.
    """
    if spec.gpu is False:
        return _without(session, settings)
    obstacle = _obstacle(settings, spec.np, None if more_come else seen)
    if obstacle is None:
        try:
            own = None if settings.task_gpus == 1 else _profile(session, settings.task_cpus, 1)
            return TaskResources(1, True, own)
        except PlacementError as error:
            obstacle = str(error), "start the session with spark.task.resource.gpu.amount 1"
    reason, remedy = obstacle
    if spec.gpu:
        raise PlacementError(f"`--np {spec.np} --gpu` is not possible: {reason}: {remedy}")
    there_are_some = settings.executor_gpus or settings.task_gpus
    notes = (f"{reason}: all ranks use the CPU",) if there_are_some else ()
    return _without(session, settings, notes)


def _without(
    session: Session, settings: SessionSettings, notes: tuple[str, ...] = ()
) -> TaskResources:
    """Return a share without GPUs, even if the session assigns some to its tasks."""
    if not settings.task_gpus:
        return TaskResources(0, False, None, notes)
    try:
        return TaskResources(0, False, _profile(session, settings.task_cpus, 0), notes)
    except PlacementError:  # then each task holds one, which is hidden from the ranks
        return TaskResources(1, False, None, notes)


def _obstacle(
    settings: SessionSettings, np: int, seen: ExecutorList | None
) -> tuple[str, str] | None:
    """Return why ranks cannot have GPUs and a remedy, None if there seems to be no reason."""
    if settings.is_local:
        return (
            f"Spark's local mode ({settings.master}) assigns no GPUs",
            "use `--on local --gpu` or a session on a cluster, or drop `--gpu`",
        )
    if not settings.executor_gpus:
        return (
            "this session's executors have no GPUs known to Spark",
            "start it with spark.executor.resource.gpu.amount, on workers that report their GPUs "
            "(spark.worker.resource.gpu.discoveryScript), or drop `--gpu`",
        )
    if 0 < settings.task_gpus < 1:
        return (
            f"spark.task.resource.gpu.amount is {settings.task_gpus:g}, so tasks share a GPU, but "
            "every rank needs its own",
            "start the session with an amount of 1, or drop `--gpu`",
        )
    return _shared(seen) or _too_few(settings, np, seen)


def _shared(seen: ExecutorList | None) -> tuple[str, str] | None:
    """Spark stores the addresses of each worker separately; two workers of a host may report the same."""
    counts = Counter((e.host, gpu) for e in (seen.executors if seen else ()) for gpu in e.gpus)
    twice = next((where for where, n in counts.items() if n > 1), None)
    if twice is None or seen is None:
        return None
    host, gpu = twice
    who = [e.id for e in seen.executors if e.host == host and gpu in e.gpus]
    return (
        f"executors {', '.join(who)} on {host} all report GPU {gpu}, so ranks would share it",
        "make the discovery script of each worker on that host report different GPUs, or run one "
        "worker",
    )


def _too_few(
    settings: SessionSettings, np: int, seen: ExecutorList | None
) -> tuple[str, str] | None:
    if seen is None or seen.slots(settings.task_cpus, 0) < np:
        return None  # unknown, or GPUs are not the bottleneck
    found = seen.slots(settings.task_cpus, 1)
    if found >= np:
        return None
    idle = seen.n_gpus - found
    besides = f" and {idle} more without a free core" if idle else ""
    fewer = [f"use `--np {found}`"] if found else []
    ways = settings.remedies(np, *fewer, "drop `--gpu`")
    return (
        f"{counted(np, 'GPU')} needed for {counted(np, 'rank')}, the cluster has {found}{besides}",
        ways,
    )


# ── profiles ─────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=8)
def _profile(session: Session, cpus: int, n_gpus: int) -> Any:
    """Return a TaskResourceProfile that Spark has accepted; PlacementError with Spark's reason.

    Spark keeps every profile for the application's lifetime, so there is one of each kind.
    """
    from pyspark.resource import TaskResourceRequest

    requests = {"cpus": TaskResourceRequest("cpus", cpus)}
    if n_gpus:
        requests[_RESOURCE] = TaskResourceRequest(_RESOURCE, n_gpus)
    try:
        return private_calls.add_profile(session, requests)
    except Exception as error:  # exceptions of Java, gRPC and pyspark have no common base
        raise PlacementError(str(explained(error))) from error
