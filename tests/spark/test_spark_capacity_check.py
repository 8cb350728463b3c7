"""What the survey of a cluster finds before anything is submitted: slots, GPUs, obstacles."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.spark import capacity_check as surveys
from hydrogen_magic.driver.placements.spark import session as sessions
from hydrogen_magic.driver.placements.spark.application_limits import registered_cores
from hydrogen_magic.driver.placements.spark.application_status import (
    Executor,
    ExecutorList,
    executors_of_tasks,
    other_jobs,
    roster,
    running_tasks,
)
from hydrogen_magic.driver.placements.spark.capacity_check import (
    ClusterCapacity,
    capacity,
    free_slots,
)
from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.errors import PlacementError
from tests import spark_rig
from tests.gangs import PATIENCE_S

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def report_gpus() -> Callable[[Any], Any]:
    """Return a task that yields its GPUs; made here, so that it travels by value."""

    def task(batches: Any) -> Iterator[Any]:
        import pyarrow
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        assert context is not None
        gpus = [address for r in context.resources().values() for address in r.addresses]
        yield pyarrow.RecordBatch.from_pydict({"o": [" ".join(gpus).encode()]})

    return task


def sleep() -> Callable[[Any], Any]:
    def task(batches: Any) -> Iterator[Any]:
        import time

        time.sleep(60)
        yield from batches

    return task


# ── on clusters ──────────────────────────────────────────────────────────────────────────────────


def test_gpus_by_a_profile(classic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_SETTLED_S", "_FIRST_S"):  # executors may have just started, or been replaced
        monkeypatch.setattr(surveys, limit, 0.0)
    session = sessions._session(classic)
    found = capacity(session, JobSpec(np=4, gpu=True))
    assert (found.slots, found.gpus, found.notes) == (4, True, ())
    gpus = session.run_tasks(report_gpus(), 4, found.profile, "gpus")
    assert len(set(gpus)) == 4 and set(map(int, gpus)) <= set(range(spark_rig.GPUS))
    with pytest.raises(PlacementError) as refused:
        capacity(session, JobSpec(np=8, gpu=True))
    assert str(refused.value) == (
        "np 8, the cluster has 4 slots (2 executors x 2 cores and 2 GPUs, 1 core and 1 GPU per "
        "task): use `--np 4`, or start the session with more executors or cores"
    )
    without = capacity(session, JobSpec(np=4, gpu=False))
    assert not without.gpus and without.profile is None
    spark_rig.until(lambda: free_slots(session, without) == 4, PATIENCE_S)
    running = threading.Thread(target=_run_until_cancelled, args=(session,), daemon=True)
    running.start()
    spark_rig.until(lambda: free_slots(session, without) == 2, PATIENCE_S)
    session.cancel("busy")
    running.join(PATIENCE_S)


def _run_until_cancelled(session: Session) -> None:
    with pytest.raises(sessions.SparkJobError):
        session.run_tasks(sleep(), 2, None, "busy")


@pytest.mark.exhaustive
def test_gpus_by_the_sessions_own_settings(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone
) -> None:
    """In a process of its own, whose session gives every task a GPU."""
    options = {**spark_rig.GPU_OPTIONS, "spark.task.resource.gpu.amount": "1"}
    out = subprocess.run(
        [sys.executable, "-c", _OWN_SETTINGS, standalone.url], capture_output=True, text=True,
        env={**spark_site.driver(**options), "PYTHONPATH": os.getcwd()}, timeout=240,
    )  # fmt: skip
    assert out.stdout.splitlines()[-1:] == ["4 different GPUs, and none"], out.stderr


_OWN_SETTINGS = """
import sys
from pyspark.sql import SparkSession
from hydrogen_magic.driver.placements.spark import session as sessions
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, capacity
from hydrogen_magic.core.job import JobSpec
from tests import spark_rig
from tests.gangs import PATIENCE_S
from tests.spark.test_spark_capacity_check import report_gpus

spark = SparkSession.builder.master(sys.argv[1]).getOrCreate()
spark_rig.wait_for_executors(spark, 2)
session = sessions._session(spark)
assert capacity(session, JobSpec(np=4)) == ClusterCapacity(4, True, None)
gpus = session.run_tasks(report_gpus(), 4, None, "gpus")
without = capacity(session, JobSpec(np=4, gpu=False))
assert not without.gpus
none = session.run_tasks(report_gpus(), 4, without.profile, "cpu")
assert none == [b""] * 4
print(len(set(gpus)), "different GPUs, and none")
"""


def test_a_connect_server_is_asked_by_its_ui(connect: Any) -> None:
    session = sessions._session(connect)
    spark_rig.until(
        lambda: roster(session, 5.0) is not None, PATIENCE_S
    )  # its first answer is slow
    assert capacity(session, JobSpec(np=2)) == ClusterCapacity(4, False, None)
    spark_rig.until(lambda: free_slots(session, ClusterCapacity(4, False, None)) == 4, PATIENCE_S)
    with pytest.raises(PlacementError) as refused:
        capacity(session, JobSpec(np=8))
    assert str(refused.value) == (
        "np 8, local[4] has 4 slots (4 cores, 1 core per task): use `--np 4`, or start the "
        "session with master local[8]"
    )


def test_the_jobs_of_a_connect_session_are_those_of_its_ui(connect: Any) -> None:
    session = sessions._session(connect)
    spark_rig.until(lambda: roster(session, 5.0) is not None, PATIENCE_S)
    running = threading.Thread(target=_run_until_cancelled, args=(session,), daemon=True)
    running.start()
    spark_rig.until(lambda: running_tasks(session, "busy") == 2, PATIENCE_S)
    assert running_tasks(session, "other") == 0
    # A server under load does not answer in time: what is unknown is empty.
    spark_rig.until(lambda: list(other_jobs(session, "other").values()) == [2], PATIENCE_S)
    assert not other_jobs(session, "busy")
    spark_rig.until(lambda: executors_of_tasks(session, "busy").keys() == {0, 1}, PATIENCE_S)
    session.cancel("busy")
    running.join(PATIENCE_S)


def test_what_never_fits_is_refused_while_executors_are_still_coming(
    classic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions._session(classic)
    known = roster(session, 1.0)
    assert known is not None
    young = replace(known, executors=(), changed_at_s=known.at_s)
    unbounded = replace(SessionSettings.read(session), max_cores=None, executor_cores=None)
    monkeypatch.setattr(surveys, "roster", lambda session, within_s: young)
    with pytest.raises(PlacementError, match="np 8, the cluster has 4 slots"):
        capacity(session, JobSpec(np=8))
    assert capacity(session, JobSpec(np=4)).slots == 4, "Spark's scheduler knows of them"
    monkeypatch.setattr(SessionSettings, "read", lambda session: unbounded)
    n_cores = spark_rig.CORES
    with pytest.raises(PlacementError, match=f"np {n_cores + 1}, the cluster has {n_cores} slots"):
        capacity(session, JobSpec(np=n_cores + 1))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("classic", marks=pytest.mark.xdist_group("spark")),
        pytest.param("connect", marks=pytest.mark.xdist_group("connect")),
    ],
)
def test_slots_without_sparks_ui(kind: str, request: pytest.FixtureRequest) -> None:
    """The question is the same SQL for executors of a cluster and through Connect."""
    session = sessions._session(request.getfixturevalue(kind))
    assert registered_cores(session) == 4


# ── imagined clusters ──────────────────────────────────────────────────────────────────

_numbers = itertools.count()


def imagined(
    monkeypatch: pytest.MonkeyPatch, seen: ExecutorList | None, **settings: str
) -> Session:
    """Return a Connect session of which no more is known than its settings and executors."""
    monkeypatch.setattr(surveys, "roster", lambda session, within_s: seen)
    known = {name.replace("__", "."): value for name, value in settings.items()}
    application = f"app-{next(_numbers)}"
    return Session(
        _Imagined(SimpleNamespace(getAll=known, get=known.get)), True, application, "sc://there"
    )


@dataclass(frozen=True, eq=False)
class _Imagined:
    """As much of a ``SparkSession`` as a survey reads."""

    conf: Any


def executors(*gpus: tuple[str, ...], host: str = "node-{}", age_s: float = 60) -> ExecutorList:
    found = tuple(
        Executor(str(n), host.format(n), 2, 0, addresses) for n, addresses in enumerate(gpus)
    )
    return ExecutorList(found, 1000.0, 1000.0 + age_s)


STANDALONE = {"spark__master": "spark://there:7077"}
WITH_GPUS = {**STANDALONE, "spark__executor__resource__gpu__amount": "2"}


def test_dynamic_allocation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**STANDALONE, "spark__dynamicAllocation__enabled": "true"}
    with pytest.raises(PlacementError, match=r"spark\.dynamicAllocation\.enabled=false"):
        capacity(imagined(monkeypatch, executors(()), **settings), JobSpec())
    ignored = {**settings, "spark__master": "local[2]"}
    assert capacity(imagined(monkeypatch, executors(()), **ignored), JobSpec()).slots == 2


@pytest.mark.parametrize(
    "asked",
    [
        {"spark__cores__max": "4", "spark__executor__cores": "2"},
        {"spark__executor__instances": "2"},
    ],
)
def test_no_more_executors_are_awaited_than_the_session_has_asked_for(
    asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the first seconds of a session, when others could still be starting."""
    session = imagined(monkeypatch, executors((), (), age_s=1), **STANDALONE, **asked)
    with pytest.raises(PlacementError, match=r"4 slots \(2 executors x 2 cores, 1 core"):
        capacity(session, JobSpec(np=8))


@pytest.mark.parametrize(
    ("seen", "settings", "reason"),
    [
        (executors(()), STANDALONE, "no GPUs known to Spark"),
        (executors(()), {**STANDALONE, "spark__master": "local[2]"}, r"local mode \(local\[2\]\)"),
        (
            executors(("0", "1")),
            {**WITH_GPUS, "spark__task__resource__gpu__amount": "0.5"},
            "spark.task.resource.gpu.amount is 0.5, so tasks share a GPU",
        ),
        (
            executors(("0", "1"), ("0", "1"), host="one"),
            WITH_GPUS,
            "executors 0, 1 on one all report GPU 0, so ranks would share it",
        ),
        (
            executors(("0",), ()),
            WITH_GPUS,
            "2 ranks need 2 GPUs, the cluster has 1: wait for more executors with `--wait 10m`, use `--np 1`",
        ),
    ],
)
def test_gpus_that_ranks_cannot_have_for_themselves(
    monkeypatch: pytest.MonkeyPatch, seen: ExecutorList, settings: dict[str, str], reason: str
) -> None:
    session = imagined(monkeypatch, seen, **settings)
    with pytest.raises(PlacementError, match=reason):
        capacity(session, JobSpec(gpu=True))
    unasked = capacity(session, JobSpec())
    assert not unasked.gpus
    assert bool(unasked.notes) == ("spark__executor__resource__gpu__amount" in settings)


def test_gpus_of_a_session_that_gives_every_task_one(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**WITH_GPUS, "spark__task__resource__gpu__amount": "1"}
    session = imagined(monkeypatch, executors(("0", "1"), ("2", "3")), **settings)
    assert capacity(session, JobSpec(np=4)) == ClusterCapacity(4, True, None)


def test_executors_that_are_still_coming_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    young = executors((), age_s=2)
    found = capacity(imagined(monkeypatch, young, **STANDALONE), JobSpec(np=4))
    assert found.slots is None
    assert found.notes == ("2 slots of 4 so far: executors are still starting",)
    known = {**STANDALONE, "spark__executor__instances": "1"}
    with pytest.raises(PlacementError, match="np 4, the cluster has 2 slots"):
        capacity(imagined(monkeypatch, young, **known), JobSpec(np=4))
    bounded = {**STANDALONE, "spark__cores__max": "3"}
    with pytest.raises(PlacementError, match="np 4, the cluster has 3 slots"):
        capacity(imagined(monkeypatch, young, **bounded), JobSpec(np=4))
    assert capacity(imagined(monkeypatch, young, **bounded), JobSpec(np=3)).slots is None


def test_a_lost_executor_is_waited_for_as_long_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_lost, age_s, waits in ((True, 1, True), (True, 45, True), (False, 45, False)):
        seen = replace(executors((), age_s=age_s), has_lost=is_lost)
        session = imagined(monkeypatch, seen, **STANDALONE)
        with nullcontext() if waits else pytest.raises(PlacementError, match="has 2 slots"):
            assert capacity(session, JobSpec(np=4)).slots is None


def test_a_gang_with_a_limit_waits_for_executors_that_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = JobSpec(np=4, wait_s=600)
    found = capacity(imagined(monkeypatch, executors(()), **STANDALONE), waits)
    text = "2 slots of 4 so far (1 executor x 2 cores, 1 core per task): waiting for more executors"
    with pytest.raises(PlacementError) as refused:
        capacity(imagined(monkeypatch, executors(()), **STANDALONE), replace(waits, wait_s=None))
    assert str(refused.value) == (
        "np 4, the cluster has 2 slots (1 executor x 2 cores, 1 core per task): wait for more executors "
        "with `--wait 10m`, use `--np 2`, or start the session with more executors or cores"
    )
    assert (found.slots, found.notes) == (None, (text,))
    none = replace(executors(()), executors=())
    assert capacity(imagined(monkeypatch, none, **STANDALONE), waits).slots is None
    bounded = {**STANDALONE, "spark__cores__max": "3"}
    with pytest.raises(PlacementError, match="np 4, the cluster has 3 slots") as refused:
        capacity(imagined(monkeypatch, executors(()), **bounded), waits)
    assert "--wait" not in str(refused.value), "it is of no use"
    one_each = {**WITH_GPUS, "spark__task__resource__gpu__amount": "1"}
    gpus = imagined(monkeypatch, executors(("0", "1")), **one_each)
    assert capacity(gpus, replace(waits, gpu=True)).gpus


def test_an_application_without_executors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    none = replace(executors(()), executors=(), at_s=1100.0)
    with pytest.raises(
        PlacementError, match="has 0 slots: this application has no executor"
    ) as refused:
        capacity(imagined(monkeypatch, none, **STANDALONE), JobSpec())
    assert "wait for more executors with `--wait 10m`" in str(refused.value)


def test_what_cannot_be_known_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**STANDALONE, "spark__default__parallelism": "8"}
    assert capacity(imagined(monkeypatch, None, **own), JobSpec(np=99)).slots is None
    named = {"spark__master": "local-cluster[2,2,1024]"}
    with pytest.raises(PlacementError, match="np 5, the cluster has 4 slots"):
        capacity(imagined(monkeypatch, None, **named), JobSpec(np=5))
