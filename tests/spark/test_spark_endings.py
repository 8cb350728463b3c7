"""Endings of gangs that only Spark has: executors, tasks, agents and jobs that end under them.

What every gang promises, on Spark too, is in ``tests/local/test_contract.py``.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import Attempt, local_agents
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent, agent_pool
from hydrogen_magic.driver.placements.spark import barrier_job
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.spark_session import Session, wait_for_jobs
from hydrogen_magic.errors import GangStoppedError, HydrogenError, PlacementError
from tests import ending_ranks, leaks, plain_ranks, ranks, spark_rig
from tests.gangs import (
    PATIENCE_S,
    agents_that_hang,
    alive,
    ended,
    family_of,
    hosts_on_other_disks,
    noticed_after_s,
    said,
    until,
    wait_until,
    wait_until_gone,
)
from tests.spark_gangs import agent_pids, launch

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("spark", "warm_agents"),
    pytest.mark.timeout(300),
]

HOST = os.uname().nodename
ON_CONNECT = pytest.param(signal.SIGUSR1, "connect", marks=pytest.mark.xdist_group("connect"))


@pytest.fixture
def spark(request: pytest.FixtureRequest) -> Any:
    """The classic session, but for tests that name another one."""
    return request.getfixturevalue(getattr(request, "param", "classic"))


def training(np: int = 2, **options: Any) -> tuple[Gang, list[int]]:
    """Return a gang whose ranks have children, and the pids of all its processes."""
    gang = launch(plain_ranks.family, np=np, **options)
    until(gang, said(gang, "batch"))
    family = family_of(gang)
    assert len(family) >= 4 * np, "ranks with two children and a helper in its own session"
    assert {rank.host for rank in gang.ranks} == {HOST}
    return gang, family


def lost(gang: Gang, family: list[int]) -> HydrogenError:
    """Wait for the end of all its processes and for its failure; return the error."""
    wait_until_gone(family)
    with pytest.raises(HydrogenError) as caught:
        ended(gang).raise_for_state()
    assert gang.state == "FAILED"
    return caught.value


# ── stopped ──────────────────────────────────────────────────────────────────────────────────────


def test_stop_keeps_sparks_own_workers(spark: Any) -> None:
    workers = spark_rig.process_ids(spark, 4)
    gang, family = training()
    gang.stop()
    wait_until_gone(family)
    assert ended(gang).state == "STOPPED"
    assert ended(launch(plain_ranks.rank, np=4)).results == [0, 1, 2, 3]
    assert set(alive(workers)) == set(workers)


@pytest.mark.exhaustive
def test_spark_may_end_idle_python_workers(spark: Any) -> None:
    """The task of a rank is one, as long as the rank runs."""
    prefix = "spark.sql.execution.pyspark.udf"
    settings = {f"{prefix}.idleTimeoutSeconds": "5", f"{prefix}.killOnIdleTimeout": "true"}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        gang = launch(time.sleep, 8.0, np=2)
        assert ended(gang).state == "SUCCEEDED", gang.snapshot().reason
    finally:
        for name in settings:
            spark.conf.unset(name)


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_stop_during_the_start(delay_s: float) -> None:
    gang = launch(plain_ranks.hang, np=2)
    time.sleep(delay_s)  # any moment of the launch
    gang.stop()
    assert ended(gang).state == "STOPPED"


def test_stop_before_spark_has_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for slots before the next gang, and take them."""
    is_packing, is_stopped = threading.Event(), threading.Event()
    run_tasks, kinds = Session.run_tasks, list[str]()

    def task_after_the_stop(*_: Any) -> Any:
        """Return one that ends by a cancel alone; a gang's own ends soon when its gang has ended."""

        def task(batches: Any) -> Any:
            yield from batches
            time.sleep(PATIENCE_S)

        is_packing.set()
        assert is_stopped.wait(PATIENCE_S)
        return task

    def noted(session: Session, *arguments: Any) -> list[bytes]:
        try:
            return run_tasks(session, *arguments)
        except SparkJobError as error:
            kinds.append(error.kind)
            raise

    wait_for_jobs(PATIENCE_S)  # of earlier tests, which would be noted
    monkeypatch.setattr(barrier_job, "_task", task_after_the_stop)
    monkeypatch.setattr(Session, "run_tasks", noted)
    gang = launch(plain_ranks.hang, np=2)
    assert is_packing.wait(PATIENCE_S)
    gang.stop()
    assert ended(gang).state == "STOPPED"
    is_stopped.set()
    wait_until(lambda: kinds)
    assert kinds == ["cancelled"]


def test_stop_while_a_checkpoint_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """To hosts that do not see the kernel's disk, one of which does not answer."""

    async def travel(agent: RemoteAgent, attempt: Attempt) -> None:
        travels.set()
        await asyncio.Event().wait()

    travels = threading.Event()
    monkeypatch.setattr(RemoteAgent, "bring_checkpoint", travel)
    with hosts_on_other_disks():
        gang = launch(ending_ranks.fail_first, np=2, retries=1)
        assert travels.wait(PATIENCE_S)
        gang.stop()
        assert ended(gang).state == "STOPPED"


def test_interrupt() -> None:
    """An interrupted cell that waits in ``hm.run``: the gang ends, and ``hm.run`` raises."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        spark_rig.until(
            lambda: any("about to hang" in gang.logs.get(0, "") for gang in new()), PATIENCE_S
        )
        signal.pthread_kill(main, signal.SIGINT)

    before = set(hm.gangs())

    def new() -> list[Gang]:
        return [gang for name, gang in hm.gangs().items() if name not in before]

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(GangStoppedError):
        hm.run(plain_ranks.hang, np=2, on="spark")
    thread.join()
    (gang,) = new()
    assert gang.state == "STOPPED"
    assert not alive([rank.pid for rank in gang.ranks if rank.pid is not None])


def test_cancelled_in_sparks_ui(spark: Any) -> None:
    gang, family = training()
    press_kill(spark.sparkContext.uiWebUrl)
    assert "cancelled" in str(lost(gang, family))


@pytest.mark.exhaustive
def test_cancelled_by_the_job_group_of_its_cell(spark: Any) -> None:
    context = spark.sparkContext
    context.setJobGroup("of a cell", "its jobs")
    try:
        gang, family = training()
        assert context.getLocalProperty("spark.job.description") == "its jobs"
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)
    context.cancelJobGroup("of a cell")
    assert "cancelled" in str(lost(gang, family))


def press_kill(ui: str) -> None:
    """Send what a browser sends for the "(kill)" beside the one job that runs."""
    with urllib.request.urlopen(f"{ui}/jobs/", timeout=PATIENCE_S) as page:
        form = re.search(
            r'<form action="(\S*/jobs/job/kill/)".*?</form>', page.read().decode(), re.S
        )
    assert form is not None, "each job that runs has its (kill)"
    fields = dict(re.findall(r'name="(\w+)" value="(\w+)"', form[0]))
    sent = urllib.parse.urlencode(fields).encode()
    urllib.request.urlopen(urllib.parse.urljoin(ui, form[1]), sent, timeout=PATIENCE_S).close()


# ── ended by themselves ──────────────────────────────────────────────────────────────────────────


# ── agents end ───────────────────────────────────────────────────────────────────────────────────


def test_an_agent_is_killed() -> None:
    gang, family = training()
    for pid in agent_pids():
        if "hydrogen_magic.node.agent" in leaks.command(pid):  # it may end with its parent
            processes.send_signal(pid, signal.SIGKILL)
    error = str(lost(gang, family))
    assert "agent" in error and HOST in error


@pytest.mark.exhaustive  # test_endings has a local one
@pytest.mark.parametrize(
    ("how", "spark"),
    [(signal.SIGSTOP, "classic"), ON_CONNECT],
    indirect=["spark"],
)
def test_an_agent_that_does_not_respond_is_given_up(how: signal.Signals) -> None:
    """The kernel cannot signal it; its task can, and ends what it has started."""
    with agents_that_hang():
        gang, family = training()
        started = signal_agents(family, how)
        gang.stop(kill=True)
        assert ended(gang).state == "STOPPED"
        wait_until_gone([*family, *started])
        assert noticed_after_s(gang, f"host {HOST} has not responded") < 10
    assert ended(launch(ranks.gather, np=4), 2 * PATIENCE_S).result == [0, 1, 2, 3]


@pytest.mark.exhaustive
def test_an_agent_that_was_given_up_ends() -> None:
    """One that was silent for too long may come back: the next gangs must not wait for it."""

    async def give_up() -> list[int]:
        given_up = agent_pids()
        for agent in list(agent_pool()._agents):
            agent_pool().drop(agent)
        return given_up

    ended(launch(ranks.gather, np=2)).raise_for_state()
    given_up = asyncio.run_coroutine_threadsafe(give_up(), local_agents.hub().loop).result(
        PATIENCE_S
    )
    wait_until_gone(given_up)
    assert ended(launch(ranks.gather, np=2)).result == [0, 1]


# ── executors and tasks end ──────────────────────────────────────────────────────────────────────


def test_a_python_worker_is_killed_and_then_agents_are_closed(
    standalone: spark_rig.Standalone,
) -> None:
    """The first costs an attempt. The second is the end, as when the notebook's kernel exits: the wait for
    the gang must end, too.
    """
    gang, family = training(np=3, retries=1)  # each executor has one at least
    executor = executors_of_this_session(standalone)[0]
    for pid in spark_rig.python_workers(executor):  # those of earlier tests may be idle
        processes.send_signal(pid, signal.SIGKILL)
    wait_until_gone(family)
    until(gang, lambda: gang.snapshot().attempt == 1 and said(gang, "batch")())
    # A log has the output of both attempts.
    until(gang, lambda: all(log.count("batch") == 2 for log in gang.logs.values()))
    failed = [e for e in gang.events() if isinstance(e, (ev.AttemptFailed, ev.RankFailed))]
    assert any("Spark task" in str(e.error) and HOST in str(e.error) for e in failed), failed
    again = family_of(gang)
    local_agents.close()
    assert "agents were ended, and their ranks" in str(lost(gang, again))


@pytest.mark.exhaustive  # new JVMs; the test above kills a task
@pytest.mark.parametrize(("count", "agents_are"), [(1, "stopped"), (2, "running"), (2, "stopped")])
def test_executors_are_killed(
    count: int, agents_are: str, spark: Any, standalone: spark_rig.Standalone
) -> None:
    """With the second one the host's agent has lost its last task. A stopped one cannot see that."""
    spark_rig.until(has_four_slots, PATIENCE_S)  # an earlier test's executors may just be replaced
    gang, family = training(np=3)
    if agents_are == "stopped":
        family += signal_agents(family, signal.SIGSTOP)
    for pid in executors_of_this_session(standalone)[:count]:
        os.kill(pid, signal.SIGKILL)
    error = str(lost(gang, family))
    assert "executor" in error
    if agents_are == "running":
        assert HOST in error
    spark_rig.wait_for_executors(spark, 2)


def has_four_slots() -> bool:
    try:
        launcher.plan(JobSpec(np=4, placement="spark", gpu=False))
    except PlacementError:
        return False
    return True


def signal_agents(family: list[int], how: signal.Signals) -> list[int]:
    """Signal the agents; return their pids, and those of what waits beside the ranks."""
    started = [pid for pid in agent_pids() if pid not in family]
    for pid in started:
        if b"hydrogen_magic.node.agent\0" in processes.read(f"/proc/{pid}/cmdline"):
            processes.send_signal(pid, how)
    return started


def executors_of_this_session(standalone: spark_rig.Standalone) -> list[int]:
    """Return the pids of the executors: no other application runs beside this process's session."""
    spark_rig.until(lambda: len(standalone.executors()) == 2, PATIENCE_S)
    return standalone.executors()
