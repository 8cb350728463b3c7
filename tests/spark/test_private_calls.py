"""Gangs on a Spark that refuses what is not part of its public interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.driver.placements.spark import (
    gpu_resources,
    placement,
    private_calls,
    spark_session,
)
from hydrogen_magic.driver.placements.spark.capacity_check import ONE_TASK, free_slots
from hydrogen_magic.errors import PlacementError
from tests import ranks
from tests.gangs import ended, until, wait_until
from tests.spark_gangs import busy, launch

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("spark", "warm_agents"),
    pytest.mark.timeout(300),
]

_SAYS = (
    "py4j.security.Py4JSecurityException: Method public java.lang.Object "
    "org.apache.spark.SparkContext.{}() is not whitelisted on class class org.apache.spark.SparkContext"
)
METHODS = (
    "isStopped",
    "maxNumConcurrentTasks",
    "progressBar",
    "resourceProfileManager",
    "statusStore",
    "statusTracker",
    "taskScheduler",
)
"""Of Spark's SparkContext."""


class Forbidding:
    """A SparkContext without one of its methods, or without any."""

    def __init__(self, context: Any, method: str) -> None:
        self._context = context
        self._method = method

    def __getattr__(self, name: str) -> Any:
        if self._method in ("", name):
            return self._refuse
        return getattr(self._context, name)

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(_SAYS.format(self._method or "any"))


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that forbids a method of the SparkContext; an empty name forbids all."""
    real = private_calls._context

    def forbid(method: str) -> None:
        monkeypatch.setattr(private_calls, "_context", lambda s: Forbidding(real(s), method))
        monkeypatch.setattr(placement._cluster, "_last", None)
        gpu_resources._profile.cache_clear()

    return forbid


def test_a_gang_runs_where_all_of_them_are_refused(forbid: Callable[[str], None]) -> None:
    forbid("")
    gang = launch(ranks.gather, np=2)
    assert ended(gang).result == [0, 1]
    with pytest.raises(PlacementError, match=r"np 8, the cluster has 4 slots \(1 core per task\)"):
        launch(ranks.gather, np=8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
def test_a_gang_runs_where_one_is_refused(method: str, forbid: Callable[[str], None]) -> None:
    forbid(method)
    assert ended(launch(ranks.gather, np=2)).result == [0, 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["statusStore", "taskScheduler"])
def test_a_gang_waits_where_the_holders_of_slots_are_unknown(
    method: str, spark: Any, forbid: Callable[[str], None], tmp_path: Path
) -> None:
    with busy(spark, 4, tmp_path) as let_go:
        forbid(method)
        # Without its scheduler, Spark knows of tasks that started at the same time by the next heartbeat.
        wait_until(lambda: free_slots(spark_session.find(), ONE_TASK) == 0)
        gang = launch(ranks.gather, np=2)
        until(gang, lambda: gang.snapshot().queued is not None)
        assert "holds" not in gang.snapshot().waits_for
        let_go()
        assert ended(gang).result == [0, 1]


def test_gpus_are_refused_where_profiles_are(forbid: Callable[[str], None]) -> None:
    forbid("resourceProfileManager")
    with pytest.raises(
        PlacementError, match=r"forbids SparkContext\.resourceProfileManager"
    ) as error:
        launch(ranks.gather, np=2, gpu=True)
    assert "start the session with spark.task.resource.gpu.amount 1" in str(error.value)
