"""A notebook's process with a session whose settings matter to its ranks; see ``test_spark_settings``.

``python -m tests.spark_settings MASTER N_EXECUTORS NAME...`` prints one line of JSON: what the functions of
these names return.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.application_status import roster
from hydrogen_magic.driver.placements.spark.capacity_check import (
    ClusterCapacity,
    capacity,
    free_slots,
)
from tests import leaks, plain_ranks, spark_ranks, spark_rig
from tests.gangs import ended, failure_of, wait_until
from tests.shells import loaded_shell
from tests.spark_gangs import launch, report_gpus

ANY = ClusterCapacity(None, False, None)
HANG_S = 30.0
"""How long ranks have to start whose Python never does, and other Pythons on a busy machine do."""


def many(spark: Any) -> dict[str, Any]:
    """Return what ranks inherit of a session with many settings, and how they fail at its limits."""
    use_profile(spark)
    found = ended(launch(spark_ranks.inherited, np=2)).results
    again = ended(launch(spark_ranks.inherited, np=2)).results
    return {
        "found": found,
        "again": found == again,
        "refused": refusal(),
        "memory": failure_of(launch(plain_ranks.allocate, 64 << 30, np=1)).report,
        "abort": failure_of(launch(plain_ranks.abort, np=1)).report,
        "ended": error_after_its_end(spark),
    }


def error_after_its_end(spark: Any) -> str:
    """Return the message about a gang whose session has stopped by itself, after its executors have ended."""
    context = spark.sparkContext._jsc.sc()
    for executor in [each.id for each in roster(sessions.find(), 5.0).executors]:
        context.killExecutor(executor)
    wait_until(lambda: private_calls.most_tasks_at_once(sessions.find(), None) == 0)
    context.stop()
    return str(error_of(launch(plain_ranks.parent, np=2)))


def use_profile(spark: Any) -> None:
    """Run a job of the user's own with a resource profile."""
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    spark.range(2).mapInArrow(lambda batches: batches, "id long", profile=profile).collect()


def refusal() -> str:
    try:
        launch(plain_ranks.parent, np=3)
    except hm.errors.PlacementError as error:
        return str(error)
    return ""


def packed(spark: Any) -> dict[str, Any]:
    """Return the Python of ranks where Spark has unpacked the executors' environment."""
    prefix, *_ = ended(launch(plain_ranks.interpreter, np=1)).result
    return {"prefix": prefix, "ranks": ended(launch(spark_ranks.ranks.gather, np=2)).result}


def gpus(spark: Any) -> dict[str, Any]:
    """Return what is found of a session that gives every task a GPU, and how many GPUs its tasks have."""
    session = sessions.find()
    found = capacity(session, JobSpec(np=2))
    without = capacity(session, JobSpec(np=2, gpu=False))
    return {
        "found": found == ClusterCapacity(2, True, None),
        "gpus": len(set(session.run_tasks(report_gpus(), 2, None, "gpus"))),
        "none": session.run_tasks(report_gpus(), 2, without.profile, "cpu") == [b""] * 2,
    }


def modules(spark: Any) -> dict[str, Any]:
    """Return what ranks import of modules that Spark has distributed, and how another one is refused."""
    spark.sparkContext.addPyFile("added.py")
    spark.sparkContext.addPyFile("added_archive.zip")
    sys.path.append("only_here.zip")
    magic = "%%distributed --np 2 --on spark --cpu\n"
    with loaded_shell() as shell:
        shell.user_ns["spark"] = spark
        shell.run_cell("import by_file, by_archive, added, added_archive, only_here").raise_error()
        names = "by_file, by_archive, added, added_archive"
        answers = shell.run_cell(f"{magic}import unpacked\n[m.ANSWER for m in ({names}, unpacked)]")
        answers.raise_error()
        refused = shell.run_cell(f"{magic}({names}, only_here)").error_in_exec
    return {"found": answers.result, "refused": str(refused)}


def hangs(spark: Any) -> dict[str, Any]:
    """Return how a gang ends, and how others fare, where Python never starts on one executor of two.

    The gang has waited before: Java has held slots for a while.
    """
    holds = "java_method('java.lang.Thread', 'sleep', 10000L)"
    busy = threading.Thread(target=spark.range(0, 3, 1, 3).selectExpr(holds).collect)
    busy.start()
    wait_until(lambda: free_slots(sessions.find(), ANY) == 1)
    gang = launch(plain_ranks.parent, np=4, start_timeout=HANG_S)
    error = failure_of(gang)
    busy.join()
    events = gang.events()
    queued = [event for event in events if isinstance(event, ev.Queued)]
    failed_s = next(event.at_s for event in events if isinstance(event, ev.RankFailed))
    return {
        "gang": gang.id,
        "queued": [(event.have, event.waits_for) for event in queued],
        "late_s": failed_s - queued[-1].at_s,
        "report": error.report,
        "few": ended(launch(plain_ranks.rank, np=2)).results,
        "many": str(error_of(launch(plain_ranks.rank, np=4, wait=3))),
    }


def error_of(gang: Gang) -> hm.errors.HydrogenError:
    try:
        ended(gang).raise_for_state()
    except hm.errors.HydrogenError as error:
        return error
    raise AssertionError("it succeeded")


def main(master: str, n_executors: str, *names: str) -> None:
    from pyspark.sql import SparkSession

    leaks.mark_session()
    spark = SparkSession.builder.master(master).getOrCreate()
    spark_rig.wait_for_executors(spark, int(n_executors))
    asked = {each.__name__: each for each in (many, packed, gpus, modules, hangs)}
    answer = {name: asked[name](spark) for name in names}
    local_agents.close()
    spark.stop()
    spark_rig.tell(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
