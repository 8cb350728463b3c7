"""Gangs on a standalone cluster: ranks, what travels, what comes back, what stays unchanged, slots."""

from __future__ import annotations

import json
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.application_status import running_tasks
from hydrogen_magic.errors import GangStoppedError, PlacementError
from tests import jax_ranks, leaks, plain_ranks, ranks, spark_rig
from tests.documented import covers
from tests.gangs import ended, until, wait_until, wait_until_gone
from tests.nesting_ranks import REFUSAL, refusals
from tests.spark_gangs import agent_pids, busy, launch

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("spark", "warm_agents"),
    pytest.mark.timeout(300),
]

MB = 1_000_000
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def containers(standalone: spark_rig.Standalone) -> Iterator[list[str]]:
    """Give each executor a control group of its own; return their ``/proc/PID/cgroup``."""
    if not os.access(GROUPS, os.W_OK):
        pytest.skip("needs a writable memory cgroup")
    executors = standalone.executors()
    with ExitStack() as stack:
        for executor in executors:
            stack.enter_context(control_group_of(executor))
        yield [Path(f"/proc/{pid}/cgroup").read_text() for pid in executors]
        local_agents.close()
        wait_until_gone(agent_pids())


@contextmanager
def control_group_of(executor: int) -> Iterator[None]:
    group = GROUPS / f"hydrogen-test-{executor}"
    group.mkdir()
    try:
        for pid in (executor, *leaks.tree(executor)):
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            for number in left:
                with suppress(ProcessLookupError):
                    (GROUPS / "cgroup.procs").write_text(number)
        group.rmdir()


def test_ranks_stay_in_the_container_of_their_executor(containers: list[str]) -> None:
    """With its memory and its devices; the containers count as hosts."""
    found = launch(plain_ranks.control_group, np=4).results
    assert [host[:2] for host in found] == [("0", "2"), ("0", "2"), ("1", "2"), ("1", "2")]
    assert found[0][2] == found[1][2] and found[2][2] == found[3][2]
    assert {found[0][2], found[2][2]} == set(containers)


def test_modules_and_files_that_spark_distributes_are_found(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that came before the agents, and those that are added while agents are warm."""
    local_agents.close()  # as the test before has left none, this costs nothing
    wait_until_gone(agent_pids())
    monkeypatch.setattr(sys, "path", list(sys.path))  # addPyFile extends the driver's
    (tmp_path / "alone.py").write_text("ANSWER = 42\n")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "later.txt").write_text("later")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("packed.py", "ANSWER = 43\n")

    spark.sparkContext.addFile(str(tmp_path / "text.txt"))
    spark.sparkContext.addPyFile(str(tmp_path / "alone.py"))
    found = ended(launch(plain_ranks.distributed, "text.txt", "alone", np=2)).results
    assert found == [("text", [42])] * 2
    spark.sparkContext.addFile(str(tmp_path / "later.txt"))
    spark.sparkContext.addPyFile(str(tmp_path / "packed.zip"))
    found = ended(launch(plain_ranks.distributed, "later.txt", "alone", "packed", np=2)).results
    assert found == [("later", [42, 43])] * 2


def test_ranks_have_an_environment_that_no_python_worker_gets(spark: Any) -> None:
    """Both executors are on this machine: all four ranks are local to each other.

    Few tests here need torch, which an agent imports for seconds. The contract suite has collectives.
    """
    before = environments(spark)
    assert len(before) == 4
    env = {"CUDA_VISIBLE_DEVICES": "7", "MINE": "1"}
    found = launch(plain_ranks.environment, np=4, env=env).results
    assert environments(spark) == before
    for rank, environment in enumerate(found):
        expected = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4,
            "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 4,
            "TORCHELASTIC_RESTART_COUNT": 0, **env,
        }  # fmt: skip
        assert {name: environment.get(name) for name in expected} == {
            name: str(value) for name, value in expected.items()
        }


def environments(spark: Any) -> dict[int, dict[str, str]]:
    """Return the environment of every Python worker, as a plain pandas UDF sees it."""
    import pandas
    from pyspark.sql.functions import pandas_udf

    def look(ids: pandas.Series) -> pandas.Series:
        meet()
        seen = json.dumps([os.getpid(), dict(os.environ)])
        return pandas.Series([seen] * len(ids))

    # Not by decorator: the annotations are text here, which Spark does not read.
    udf = pandas_udf(look, returnType="string", functionType=200)  # 200: Series to Series
    with spark_rig.meeting(4) as meet:
        rows = spark.range(0, 4, 1, 4).select(udf("id").alias("seen")).collect()
    return dict(json.loads(row.seen) for row in rows)


def test_ranks_of_one_agent_run_in_the_executors_python() -> None:
    """What they have of us, and of what this notebook uses, came along; what starts gangs did not."""
    prefix, has_ipython, agent = launch(plain_ranks.interpreter, np=1).result
    assert prefix.endswith("site/python") and not has_ipython
    assert set(launch(refusals, np=1).result) == {REFUSAL}
    *_, next_agent = launch(plain_ranks.interpreter, np=1).result
    assert next_agent == agent


@covers("""a notebook with `np` above 1 that imports from other relative files""")
def test_local_modules_and_values_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "FACTOR = 2\ndef scale(values): return [FACTOR * value for value in values]\n"
    (tmp_path / "only_here.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    weights = {"all": [1, 2, 3]}
    gang = launch(only_here.scale, weights["all"], np=2)
    assert gang.results == [[2, 4, 6], [2, 4, 6]]


def test_output_and_metrics_arrive_while_tasks_hold_their_slots(tmp_path: Path) -> None:
    go_on = tmp_path / "go_on"
    gang = launch(plain_ranks.log_and_wait, str(go_on), np=2)
    until(gang, lambda: all("begun" in text for text in gang.logs.values()) and gang.logs != {})
    until(gang, lambda: len(gang.metrics) == 2)
    assert gang.state == "RUNNING"
    session = sessions.find()
    assert running_tasks(session, f"hydrogen_magic-{gang.id}-0") == 2
    assert running_tasks(session, "hydrogen_magic-none-0") == 0
    go_on.touch()
    assert ended(gang).result == "done"
    assert sorted(gang.metrics["rank"]) == [0, 1] and set(gang.metrics["loss"]) == {0.5}


def test_large_closures_and_results() -> None:
    import numpy

    data = numpy.arange(9 * MB, dtype="float64")
    result, total = ended(launch(plain_ranks.double, data, np=2)).results
    assert data.nbytes == 72 * MB
    assert numpy.array_equal(result, 2 * data) and total == float(data.sum())


def test_all_of_a_long_output_reaches_the_record() -> None:
    gang = ended(launch(plain_ranks.talk, 12 * MB, np=1))
    gang.raise_for_state()
    with gang.log_path(0).open("rb") as log:
        log.seek(12 * MB)
        assert log.read() == b"the last line\n"


@pytest.mark.exhaustive  # it waits for the end of warm agents, and imports JAX
@pytest.mark.jax
def test_the_first_gang_of_a_host_imports_libraries_with_its_settings() -> None:
    """Its agent may import them before it gets the gang: JAX reads this variable as it is imported."""
    local_agents.close()  # those that are warm have had other gangs
    wait_until_gone(agent_pids())
    env = {"JAX_ENABLE_X64": "1"}
    assert launch(jax_ranks.doubles, np=2, gpu=False, env=env).results == [True, True]


# ── slots ────────────────────────────────────────────────────────────────────────────────────────


def test_more_ranks_than_slots_are_refused_with_the_numbers() -> None:
    """By :func:`launch` itself: no gang waits in vain."""
    known = set(hm.gangs())
    with pytest.raises(PlacementError, match=r"np 8\b.*\b4 slots"):
        launch(ranks.gather, np=8)
    assert set(hm.gangs()) == known


def test_a_gang_waits_for_slots_as_long_as_it_may(spark: Any, tmp_path: Path) -> None:
    with busy(spark, 3, tmp_path):
        gang = launch(plain_ranks.rank, np=2, wait=5)
        holder = r"2 executors; job \d+ \(collect.* at .*\) holds 3 slots"
        until(gang, lambda: re.fullmatch(holder, gang.snapshot().waits_for))
        with pytest.raises(PlacementError, match=rf"np 2 .* within 5 s .*: 1 slot free; {holder}"):
            ended(gang).raise_for_state()
        launch(plain_ranks.rank, np=1, wait=60).raise_for_state()


def test_a_queued_gang_is_stopped_or_runs_when_slots_are_free(spark: Any, tmp_path: Path) -> None:
    with busy(spark, 3, tmp_path) as let_go:
        gang = launch(plain_ranks.rank, np=2)
        until(gang, lambda: gang.snapshot().queued == (1, 2))
        assert "holds 3 slots" in gang.snapshot().waits_for
        tracker = spark.sparkContext._jsc.sc().statusTracker()
        tag = f"hydrogen_magic-{gang.id}-0"
        until(gang, lambda: tracker.getJobIdsForTag(tag))
        gang.stop()
        with pytest.raises(GangStoppedError):
            ended(gang).raise_for_state()
        (job,) = tracker.getJobIdsForTag(tag)
        wait_until(lambda: str(tracker.getJobInfo(job).get().status()) == "FAILED")

        gang = launch(plain_ranks.rank, np=2)
        until(gang, lambda: gang.snapshot().queued == (1, 2))
        let_go()
        assert ended(gang).results == [0, 1]
        assert gang.snapshot().queued is None
