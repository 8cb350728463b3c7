"""Eight machines of two slots each, of which two have GPUs and two have the same host name.

Like :mod:`tests.spark_machines`, whose process plays these scenes; each machine has a control group, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.messages import AgentReport, ClosureServed
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.driver.placements.remote.closure_transfer import ClosureTransfer
from tests import (
    leaks,
    plain_ranks,
    spark_gangs,
    spark_machines,
    spark_ranks,
)
from tests import spark_rig as rig
from tests.spark_machines import AWAY_S, Machine, Stage

NAMES = ("one", "two", "three", "four", "five", "six", "twin", "twin")
WITH_GPUS = ("two", "five")
N_BYTES = 40_000_000
"""Of a closure: as large as agents pass on to each other."""


def machines() -> Iterator[Machine]:
    """Make the machines."""
    for number, name in enumerate(NAMES):
        n_gpus = 2 if name in WITH_GPUS else 0
        yield Machine(name, f"10.77.0.{number + 2}", group=f"host-{number}", n_gpus=n_gpus)


def launch(function: Callable[..., Any], *arguments: Any, **options: Any) -> Gang:
    import hydrogen_magic as hm

    return hm.launch(function, *arguments, on="spark", **options)


# ── scenes ───────────────────────────────────────────────────────────────────────────────────────


def sixteen(stage: Stage) -> Any:
    """Say where sixteen ranks are, and what the machines are."""
    return {
        "ranks": launch(spark_ranks.where, np=16).result,
        "machines": {machine.pid_space: machine.control_group for machine in stage.machines},
    }


def packed_and_spread(stage: Stage) -> Any:
    """Say on how many machines gangs are, by their size and option."""
    sizes = {"pack": (2, 4), "spread": (8,)}
    return {
        f"{option} {np}": _n_machines(stage, np, option == "pack")
        for option, every in sizes.items()
        for np in every
    }


def _n_machines(stage: Stage, np: int, pack: bool) -> int:
    rig.until(lambda: _n_free(stage) == 2 * len(stage.machines), AWAY_S)
    return len(set(launch(plain_ranks.pid_space, np=np, pack=pack).results))


def beside_a_job(stage: Stage) -> Any:
    """Say where a packed gang is while a job leaves both slots of one machine free, and what it reports."""
    n_machines = len(stage.machines)
    rig.until(lambda: _n_free(stage) == 2 * n_machines, AWAY_S)
    planned = launcher.plan(JobSpec(np=2, placement="spark", pack=True))
    with (
        TemporaryDirectory() as folder,
        spark_gangs.busy(stage.spark, n_machines - 1, Path(folder)),
    ):
        # Spark's scheduler goes from executor to executor and gives each a task.
        rig.until(lambda: _n_free(stage) == n_machines + 1, AWAY_S)
        [free] = [address for address, n_free in _free_slots(stage).items() if n_free == 2]
        gang = launch(plain_ranks.pid_space, np=2, pack=True)
        found = set(gang.results)
    return {
        "planned_hosts": len({slot.host for slot in planned.slots}),
        "note": planned.hosts_note,
        "is_there": found == {m.pid_space for m in stage.machines if m.address == free},
        "notices": [event.text for event in gang.events() if isinstance(event, ev.Notice)],
    }


def _n_free(stage: Stage) -> int:
    return sum(_free_slots(stage).values())


def _free_slots(stage: Stage) -> dict[str, int]:
    """Return what a gang finds that is packed or spread: tasks return a moment after their gang's end."""
    from hydrogen_magic.driver.placements.spark import spark_session as sessions
    from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, slots_by_host

    session = sessions._session(stage.spark)
    slots = slots_by_host(session, ClusterCapacity(None, False, None))
    return {address: n_free for address, (n_free, _) in slots.items()}


def closure_with_a_loss(stage: Stage) -> Any:
    """Pass a closure on to sixteen ranks where the host that does so dies as soon as it could."""
    data = os.urandom(N_BYTES)
    with _first_host_dies_once(stage) as killed:
        gang = launch(plain_ranks.machine_and_digest, data, np=16, retries=1)
        machines, digests = zip(*gang.results, strict=True)
    return {
        "n_killed": sum(killed),
        "n_machines": len(set(machines)),
        "is_right": set(digests) == {plain_ranks.digest(data)},
        "attempts": gang.snapshot().attempt + 1,
    }


@contextmanager
def _first_host_dies_once(stage: Stage) -> Iterator[list[int]]:
    """Kill what gangs run on the first host that can pass a closure on; give their number."""
    take, killed = ClosureTransfer.take, list[int]()

    def killing(transfer: ClosureTransfer, agent: RemoteAgent, report: AgentReport) -> None:
        is_first = agent is transfer._agents[0]
        if isinstance(report, ClosureServed) and is_first and not killed:
            machine = next(m for m in stage.machines if m.address == agent.held[0])
            killed.append(machine.kill_gangs())
        take(transfer, agent, report)

    with mock.patch.object(ClosureTransfer, "take", killing):
        yield killed


def gpus(stage: Stage) -> Any:
    """Say where ranks with GPUs are, in a session of its own that has two GPUs in each executor."""
    size = {"spark.cores.max": "4", **rig.GPU_OPTIONS}
    env = {**os.environ, **stage.site.driver(**size)}
    return rig.answer_of("spark_eight_hosts", "gpus", stage.cluster.url, env=env)


def with_gpus(master: str) -> None:
    """Print where four ranks with GPUs are, and two."""
    from pyspark.sql import SparkSession

    from hydrogen_magic.driver.placements import local_agents

    leaks.mark_session()
    spark = SparkSession.builder.master(master).getOrCreate()
    rig.wait_for_executors(spark, 2)
    found = [launch(spark_ranks.where, np=np, gpu=True).result for np in (4, 2)]
    local_agents.close()
    spark.stop()
    rig.tell(found)


def twins(stage: Stage) -> Any:
    """Kill a gang's processes on one of the hosts of the same name; say which ranks count as lost there."""
    gang = launch(spark_ranks.count, 1_000_000, np=16)
    rig.until(lambda: all("step 5" in text for text in gang.logs.values()), AWAY_S)
    twin = next(machine for machine in stage.machines if machine.name == "twin")
    twin.kill_gangs()
    is_over = gang.wait(AWAY_S)
    ended = [event for event in gang.events() if isinstance(event, ev.RankExited)]
    lost = [event.rank for event in ended if event.hint == "its host was lost"]
    found = {"is_over": is_over, "lost": lost, "hosts": [gang.ranks[rank].host for rank in lost]}
    return {**found, "works": len(set(launch(plain_ranks.pid_space, np=16).results))}


def lost(stage: Stage) -> Any:
    """Cut one machine off for good from a gang that may start again; say what came of both."""
    gang = launch(spark_ranks.count_until_attempt, 1, np=8, pack=False, retries=1)
    away = stage.machines[0]
    rig.until(lambda: all("step 5" in text for text in gang.logs.values()), AWAY_S)
    n_there = len(away.gang_pids())
    away.cut()
    is_over = gang.wait(AWAY_S)
    snapshot = gang.snapshot()
    rig.until(lambda: not away.gang_pids(), AWAY_S)
    return {
        "n_there": n_there,
        "is_over": is_over,
        "state": gang.state,
        "reason": snapshot.reason,
        "notices": [notice.text for notice in snapshot.notices],
        "machines": gang.results if gang.state == "SUCCEEDED" else [],
        "away": away.pid_space,
    }


SCENES: spark_machines.Scenes = {
    scene.__name__: scene
    for scene in (
        sixteen,
        packed_and_spread,
        beside_a_job,
        closure_with_a_loss,
        twins,
        gpus,
        lost,
    )
}


def main(folder: Path) -> None:
    spark_machines.prepare_network()
    spark_machines.play(folder, list(machines()), SCENES)


if __name__ == "__main__":
    if sys.argv[1] == "gpus":
        with_gpus(sys.argv[2])
    else:
        main(Path(sys.argv[1]))
