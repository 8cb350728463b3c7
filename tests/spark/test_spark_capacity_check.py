"""What the survey of a cluster finds before anything is submitted: slots, GPUs, obstacles.

``tests/unit/test_capacity_check.py`` has clusters that are imagined, and ``test_spark_settings`` a session
whose tasks have a GPU each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.spark import application_status
from hydrogen_magic.driver.placements.spark import capacity_check as surveys
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.application_status import (
    executors_of_tasks,
    other_jobs,
    roster,
    running_tasks,
)
from hydrogen_magic.driver.placements.spark.capacity_check import (
    ClusterCapacity,
    capacity,
    free_slots,
    registered_cores,
)
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError
from tests import spark_rig
from tests.gangs import PATIENCE_S
from tests.spark.test_spark_session import InThread, sleep
from tests.spark_gangs import report_gpus

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


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
    running = InThread(lambda: session.run_tasks(sleep(), 2, None, "busy"))
    spark_rig.until(lambda: free_slots(session, without) == 2, PATIENCE_S)
    _cancel(session, running)


def _cancel(session: Session, running: InThread) -> None:
    session.cancel("busy")
    assert isinstance(running.ended(), SparkJobError)


def test_a_connect_server_is_asked_by_its_ui(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The refusal names the executors only if the UI answers in time.
    monkeypatch.setattr(surveys, "_CHECK_S", PATIENCE_S)
    session = sessions._session(connect)
    spark_rig.until(
        lambda: roster(session, 5.0) is not None, PATIENCE_S
    )  # its first answer is slow
    assert capacity(session, JobSpec(np=2)) == ClusterCapacity(4, False, None)
    spark_rig.until(lambda: free_slots(session, ClusterCapacity(4, False, None)) == 4, PATIENCE_S)
    with pytest.raises(PlacementError) as refused:
        capacity(session, JobSpec(np=8))
    assert str(refused.value) == (
        "np 8, local[4] has 4 slots (1 executor x 4 cores, 1 core per task): use `--np 4`, or start "
        "the session with master local[8]"
    )


def test_the_jobs_of_a_connect_session_are_those_of_its_ui(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a late answer the jobs are unknown, which looks like no jobs.
    monkeypatch.setattr(application_status, "GLANCE_S", PATIENCE_S)
    session = sessions._session(connect)
    spark_rig.until(lambda: roster(session, 5.0) is not None, PATIENCE_S)
    running = InThread(lambda: session.run_tasks(sleep(), 2, None, "busy"))
    spark_rig.until(lambda: running_tasks(session, "busy") == 2, PATIENCE_S)
    assert running_tasks(session, "other") == 0
    spark_rig.until(lambda: list(other_jobs(session, "other").values()) == [2], PATIENCE_S)
    assert not other_jobs(session, "busy")
    spark_rig.until(lambda: executors_of_tasks(session, "busy").keys() == {0, 1}, PATIENCE_S)
    _cancel(session, running)


def test_what_never_fits_is_refused_while_executors_are_still_coming(
    classic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions._session(classic)
    known = roster(session, 1.0)
    assert known is not None
    young = replace(known, executors=(), changed_at_s=known.at_s)
    monkeypatch.setattr(surveys, "roster", lambda session, within_s: young)
    with pytest.raises(PlacementError, match="np 8, the cluster has 4 slots"):
        capacity(session, JobSpec(np=8))
    assert capacity(session, JobSpec(np=4)).slots == 4, "Spark's scheduler knows of them"


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
