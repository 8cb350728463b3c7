"""On which hosts of a cluster the tasks of a gang run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hydrogen_magic.driver.placements.spark import session as sessions
from tests import spark_rig

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_sparks_scheduler_gets_the_preferred_host_of_each_task(classic: Any) -> None:
    session = sessions._session(classic)
    wanted = ("one", "two", "two")
    stage = session._stage(_empty, 3, None, wanted)._jdf.queryExecution().toRdd()
    locations = [session.context().getPreferredLocs(stage, n).head().host() for n in range(3)]
    assert tuple(locations) == wanted
    here = (spark_rig.HOST,) * 2
    assert session.run_tasks(_one_row(), 2, None, "located", hosts=here) == [b"0", b"1"]


def _empty(batches: Any) -> Iterator[Any]:
    yield from batches


def _one_row() -> Any:
    def task(batches: Any) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        assert context is not None
        yield pyarrow.RecordBatch.from_pydict({"o": [str(context.partitionId()).encode()]})

    return task


@pytest.mark.exhaustive  # a cluster of its own; the other tests cover the parts
def test_gangs_are_packed_and_spread(spark_site: spark_rig.Site) -> None:
    """Three hosts of two slots, in a process of its own."""
    places = [spark_rig.Place(f"127.0.0.{n}") for n in (2, 3, 4)]
    cluster = spark_rig.Standalone(spark_site, places)
    try:
        out = subprocess.run(
            [sys.executable, "-c", _GANGS, cluster.url], capture_output=True, text=True,
            env={**spark_site.driver(**{"spark.cores.max": "6"}), "PYTHONPATH": os.getcwd()},
            timeout=240,
        )  # fmt: skip
    finally:
        cluster.close()
    assert out.stdout.splitlines()[-1:] == ["as requested"], out.stderr


_GANGS = """
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import SparkSession
import hydrogen_magic as hm
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, slots_by_host
from hydrogen_magic.driver.placements.spark import session as sessions
from tests import spark_rig, spark_gangs, ranks
from tests.gangs import PATIENCE_S

spark = SparkSession.builder.master(sys.argv[1]).getOrCreate()
spark_rig.wait_for_executors(spark, 3)
session = sessions._session(spark)

def n_tasks():
    rows = session.context().statusStore().executorList(False)
    rows = [rows.apply(n) for n in range(rows.size())]
    return {row.hostPort().split(":")[0]: row.totalTasks() for row in rows if row.totalCores()}

def hosts_of(np, **options):
    before = n_tasks()
    gang = spark_gangs.launch(ranks.gather, np=np, **options)
    assert gang.result == list(range(np))
    spark_rig.until(lambda: sum(n_tasks().values()) == sum(before.values()) + np, PATIENCE_S)
    notices = [e.text for e in gang.events() if type(e).__name__ == "Notice"]
    return {h: n - before[h] for h, n in n_tasks().items() if n > before[h]}, notices

for _ in range(3):
    found, notices = hosts_of(2, pack=True)
    assert list(found.values()) == [2], found
    assert any(text.startswith("`--pack`: 1 of the cluster's 3 hosts") for text in notices), notices
    assert list(hosts_of(2, pack=False)[0].values()) == [1, 1]
assert sorted(hosts_of(4, pack=True)[0].values()) == [2, 2]
assert sorted(hosts_of(4, pack=False)[0].values()) == [1, 1, 2]

plan = launcher.plan(JobSpec(np=2, placement="spark", pack=True))
(packed,) = {slot.host for slot in plan.slots}
assert packed.startswith("127.0.0."), plan
with TemporaryDirectory() as folder, spark_gangs.busy(spark, 3, Path(folder)):
    slots = slots_by_host(session, ClusterCapacity(None, False, None))
    free = {host for host, (n_free, _) in slots.items() if n_free == 2}
    for host in free:
        assert hosts_of(2, pack=True)[0] == {host: 2}
print("as requested")
"""
