"""What the survey of imagined clusters finds: slots, GPUs, obstacles, executors that may still come."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.spark import capacity_check as surveys
from hydrogen_magic.driver.placements.spark.application_status import Executor, ExecutorList
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, capacity
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError

_numbers = itertools.count()


def imagined(
    monkeypatch: pytest.MonkeyPatch, seen: ExecutorList | None, **settings: str
) -> Session:
    """Return a Connect session of which no more is known than its settings and executors."""
    monkeypatch.setattr(surveys, "roster", lambda session, within_s: seen)
    monkeypatch.setattr(surveys, "_CHECK_S", 0.0)  # nothing changes while one waits
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
        pytest.param(
            executors(("0", "1")),
            {**WITH_GPUS, "spark__task__resource__gpu__amount": "0.5"},
            "spark.task.resource.gpu.amount is 0.5, so tasks share a GPU",
            marks=pytest.mark.spark,  # a profile of pyspark's is made
        ),
        (
            executors(("0", "1"), ("0", "1"), host="one"),
            WITH_GPUS,
            "executors 0, 1 on one all report GPU 0, so ranks would share it",
        ),
        (
            executors(("0",), ()),
            WITH_GPUS,
            "2 GPUs needed for 2 ranks, the cluster has 1: wait for more executors with `--wait 10m`, "
            "use `--np 1`",
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


@pytest.mark.parametrize(
    ("is_lost", "asked", "age_s", "waits"),
    [
        (True, {}, 1, True),
        (True, {}, 45, True),
        (False, {}, 45, False),
        (False, {"spark__executor__instances": "2"}, 45, True),
        (False, {"spark__executor__instances": "2"}, 75, False),
        (False, {"spark__cores__max": "4", "spark__executor__cores": "2"}, 45, True),
        (False, {"spark__cores__max": "4"}, 45, False),
    ],
)
def test_a_missing_executor_is_waited_for_as_long_as_the_first(
    is_lost: bool,
    asked: dict[str, str],
    age_s: float,
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was lost, or that the session has asked for."""
    seen = replace(executors((), age_s=age_s), has_lost=is_lost)
    session = imagined(monkeypatch, seen, **STANDALONE, **asked)
    with nullcontext() if waits else pytest.raises(PlacementError, match="has 2 slots"):
        assert capacity(session, JobSpec(np=4)).slots is None
    if asked:
        with pytest.raises(PlacementError, match="np 8, the cluster has"):
            capacity(session, JobSpec(np=8))


def test_a_local_master_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    session = imagined(monkeypatch, executors(age_s=1), spark__master="local[2]")
    with pytest.raises(PlacementError, match=r"local\[2\] has 0 slots"):
        capacity(session, JobSpec(np=2))


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
