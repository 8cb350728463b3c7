"""A notebook's process on a cluster whose executors come and go; see ``test_spark_late_executors``.

``python -m tests.spark_late_executors FOLDER`` prints one line of JSON. Workers have two cores, and the
application asks for two executors of two cores.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.spark import capacity_check
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.application_status import ExecutorList, roster
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.views.text_table import gang_lines
from tests import leaks, plain_ranks, spark_ranks, spark_rig
from tests.gangs import ended, said, until
from tests.spark_gangs import launch

WAIT_S = 240.0
"""Bound of every wait: JVMs start slowly on a busy machine."""
SMALL = spark_rig.Place(n_gpus=0, n_cores=2)
ONE_OF_TWO = "1 of 2 executors so far"


def queued(gang: Gang) -> list[str]:
    """Wait until the gang reports that an executor is missing; return how views show it."""
    until(gang, lambda: gang.snapshot().waits_for == ONE_OF_TWO, WAIT_S)
    state = gang.snapshot()
    assert state.queued == (2, 4), state.queued
    lines = gang_lines(state, 12.0, 200)
    return [lines[0].partition(" · ")[2], next(line for line in lines if ONE_OF_TWO in line)]


def comes_late(cluster: spark_rig.Standalone) -> dict[str, Any]:
    """A gang needs a second executor, whose worker is not there yet."""
    try:
        with mock.patch.object(capacity_check, "_FIRST_S", 15.0):
            ended(launch(plain_ranks.rank, np=4), WAIT_S).raise_for_state()
        refused = ""
    except PlacementError as error:
        refused = str(error)
    gang = launch(plain_ranks.rank, np=4, wait=WAIT_S)
    shown = queued(gang)
    cluster.add_worker(SMALL)
    return {"refused": refused, "shown": shown, "result": ended(gang, WAIT_S).results}


def is_lost_before(cluster: spark_rig.Standalone) -> dict[str, Any]:
    """It was killed with its worker just before; Spark may not have noticed."""
    cluster.kill_worker(cluster.workers[-1])
    gang = launch(plain_ranks.rank, np=4, wait=WAIT_S)
    shown = queued(gang)
    cluster.add_worker(SMALL)
    return {"shown": shown, "result": ended(gang, WAIT_S).results}


def is_lost_meanwhile(cluster: spark_rig.Standalone) -> dict[str, Any]:
    """It is killed with its worker while the gang runs, which is tried again."""
    gang = launch(spark_ranks.count, 50, np=4, wait=WAIT_S, retries=1)
    until(gang, said(gang, "step 5"), WAIT_S)
    cluster.kill_worker(cluster.workers[-1])
    shown = queued(gang)
    cluster.add_worker(SMALL)
    result = ended(gang, WAIT_S).result
    return {"shown": shown, "result": result, "attempt": gang.snapshot().attempt}


def is_replaced(cluster: spark_rig.Standalone) -> dict[str, Any]:
    """The executor alone was killed: its worker starts another, so no ``--wait`` is needed."""
    os.kill(cluster.executors()[0], signal.SIGKILL)
    spark_rig.until(lambda: executors().has_lost, WAIT_S)
    result = ended(launch(plain_ranks.rank, np=4), WAIT_S).results
    return {"result": result, "is_lost": executors().has_lost}


def executors() -> ExecutorList:
    found = roster(sessions.find(), 1.0)
    assert found is not None
    return found


def main(folder: Path) -> None:
    leaks.mark_session()
    os.environ["HYDROGEN_MAGIC_HOME"] = str(folder / "home")
    site = spark_rig.Site.create(folder / "site")
    with (
        closing(spark_rig.Standalone(site, [SMALL])) as cluster,
        spark_rig.session(site, cluster.url, n_executors=1),
    ):
        scenes = (comes_late, is_lost_before, is_lost_meanwhile, is_replaced)
        found = {scene.__name__: scene(cluster) for scene in scenes}
        local_agents.close()
    spark_rig.tell(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
