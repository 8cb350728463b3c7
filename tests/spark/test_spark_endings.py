"""Every way a gang on a cluster can end: nothing of it is left, and the culprit is named with its host."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.errors import GangStoppedError, GangTimeoutError, HydrogenError
from hydrogen_magic.handle import Gang
from hydrogen_magic.placements import Attempt, agents
from hydrogen_magic.placements.spark import plans
from hydrogen_magic.placements.spark.agents import RemoteAgent, fleet
from tests import ranks, spark_ranks, spark_rig
from tests.gangs import alive, ended, failure_of, family_of, said, until
from tests.spark_gangs import agent_pids, launch

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.usefixtures("spark", "warm_agents"),
    pytest.mark.timeout(180),
]

HOST = os.uname().nodename


@pytest.fixture(autouse=True)
def works_again_at_once(spark: Any, no_leaks: None) -> Iterator[None]:
    """After every ending the next gang runs, and runs right."""
    yield
    assert ended(launch(ranks.gather, np=2), 60).result == [0, 1]


def training(np: int = 4) -> tuple[Gang, list[int]]:
    """Return a gang as users have them, and the pids of all that belongs to it."""
    gang = launch(ranks.family, 1, False, np=np)
    until(gang, said(gang, "batch"), 60)
    family = family_of(gang)
    assert len(family) >= 3 * np, "ranks with a DataLoader worker and a helper in its own session"
    return gang, family


def gone_within(pids: list[int], seconds: float) -> None:
    spark_rig.until(lambda: not alive(pids), seconds, lambda: f"{alive(pids)} are still there")


# ── a rank fails ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("culprit", [0, 3])
def test_the_culprit_is_named_with_its_host(culprit: int, tmp_path: Path) -> None:
    env = {"LAST_ACT": str(tmp_path / "last_act")}
    gang = launch(ranks.fail_on, culprit, 0.0, False, np=4, env=env)
    error = failure_of(gang)
    assert error.rank == culprit
    assert "ValueError: bad batch 17" in error.report
    assert 'raise ValueError("bad batch 17")' in error.report
    assert gang.ranks[culprit].host == HOST


def test_a_rank_that_is_killed() -> None:
    error = failure_of(launch(ranks.end_one, 1, "SIGKILL", np=2))
    assert error.rank == 1 and "SIGKILL" in str(error)


def test_failed_attempts_are_retried_with_fresh_stores(tmp_path: Path) -> None:
    gang = launch(spark_ranks.fail_once, str(tmp_path / "tried"), np=2, retries=1)
    assert ended(gang).result == [0, 1]
    assert gang.snapshot().attempt == 1


# ── it is stopped ────────────────────────────────────────────────────────────────────────────────


def test_stop_leaves_nothing_but_sparks_own_workers(spark: Any) -> None:
    before = spark_rig.process_ids(spark, 4)
    gang, family = training()
    begun = time.monotonic()
    gang.stop()
    gone_within(family, 1.0)
    assert ended(gang, 5).state == "STOPPED"
    assert time.monotonic() - begun < 2.0
    assert ended(launch(ranks.gather, np=4)).result == [0, 1, 2, 3]
    assert spark_rig.process_ids(spark, 4) == before


def test_stop_does_not_wait_for_the_deaf() -> None:
    gang = launch(ranks.hang, "deaf", np=2)
    until(gang, said(gang, "deaf"))
    family = family_of(gang)
    gang.stop()
    gone_within(family, 1.0)
    ended(gang, 5)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.3])
def test_stop_while_it_starts(delay_s: float) -> None:
    gang = launch(ranks.hang, "collective", np=2)
    time.sleep(delay_s)  # any moment of the launch
    gang.stop()
    assert ended(gang, 8).state == "STOPPED"


def test_timeout() -> None:
    gang = launch(ranks.hang, "sleep", np=2, timeout=2.0)
    with pytest.raises(GangTimeoutError, match="2"):
        ended(gang, 10).raise_for_state()


# ── somebody takes it away ───────────────────────────────────────────────────────────────────────


def lost(gang: Gang, family: list[int]) -> HydrogenError:
    """Check that it ends whole within five seconds; return what the user is told."""
    gone_within(family, 5.0)
    with pytest.raises(HydrogenError) as caught:
        ended(gang, 10).raise_for_state()
    assert gang.state == "FAILED"
    return caught.value


@pytest.mark.parametrize("count", [1, 2])  # with the second the host's agent has lost its last
def test_executors_are_killed(count: int, spark: Any, standalone: spark_rig.Standalone) -> None:
    gang, family = training()
    for pid in standalone.executors()[:count]:
        os.kill(pid, signal.SIGKILL)
    told = str(lost(gang, family))
    assert "executor" in told and HOST in told
    spark_rig.wait_for_executors(spark, 2)


def test_a_lost_executor_costs_an_attempt(spark: Any, standalone: spark_rig.Standalone) -> None:
    """The next one starts when Spark has replaced it, which takes some seconds."""
    gang = launch(spark_ranks.count, 50, np=4, retries=1)
    until(gang, said(gang, "step 5"), 60)
    os.kill(standalone.executors()[0], signal.SIGKILL)
    assert ended(gang, 90).result == 50
    assert gang.snapshot().attempt == 1


def test_a_python_worker_is_killed(standalone: spark_rig.Standalone) -> None:
    gang, family = training()
    os.kill(spark_rig.python_workers(standalone.executors()[0])[0], signal.SIGKILL)
    told = str(lost(gang, family))
    assert "Spark task" in told and HOST in told


def test_an_agent_is_killed() -> None:
    gang, family = training()
    for pid in agent_pids():
        if b"hydrogen_magic.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    told = str(lost(gang, family))
    assert "agent" in told and HOST in told


def test_an_agent_that_was_given_up_takes_no_gang() -> None:
    """One that was silent for too long may come back: the next gangs must not wait for it."""

    async def give_up() -> list[int]:
        given_up = agent_pids()
        for agent in list(fleet()._agents):
            fleet().drop(agent)
        return given_up

    ended(launch(ranks.gather, np=2)).raise_for_state()
    given_up = asyncio.run_coroutine_threadsafe(give_up(), agents.hub().loop).result(5)
    gone_within(given_up, 10.0)


def test_agents_are_closed_under_it() -> None:
    """As when the notebook's kernel exits: whoever waits for the gang must not do so for ever."""
    gang, family = training()
    agents.close()
    assert "agents were ended" in str(lost(gang, family))


def test_stop_while_a_checkpoint_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To hosts that do not see the kernel's disk, one of which does not answer."""

    async def travel(agent: RemoteAgent, attempt: Attempt) -> None:
        travels.set()
        await asyncio.sleep(60)

    def on_another_disk(*known: Any) -> plans.Meant:
        return dataclasses.replace(meant(*known), shares_disk=False)

    travels, meant = threading.Event(), plans.plan
    monkeypatch.setattr(plans, "plan", on_another_disk)
    monkeypatch.setattr(RemoteAgent, "bring_checkpoint", travel)
    gang = launch(spark_ranks.fail_once, str(tmp_path / "tried"), np=2, retries=1)
    assert travels.wait(30)
    gang.stop()
    assert ended(gang, 5).state == "STOPPED"


def test_its_job_is_cancelled_in_spark_s_ui(spark: Any) -> None:
    gang, family = training()
    press_kill(spark.sparkContext.uiWebUrl)
    assert "cancelled" in str(lost(gang, family))


def press_kill(ui: str) -> None:
    """Send what a browser sends for the "(kill)" beside the one job that runs."""
    with urllib.request.urlopen(f"{ui}/jobs/", timeout=30) as page:
        form = re.search(
            r'<form action="(\S*/jobs/job/kill/)".*?</form>', page.read().decode(), re.S
        )
    assert form is not None, "each job that runs has its (kill)"
    fields = dict(re.findall(r'name="(\w+)" value="(\w+)"', form[0]))
    sent = urllib.parse.urlencode(fields).encode()
    urllib.request.urlopen(urllib.parse.urljoin(ui, form[1]), sent, timeout=30).close()


def test_interrupt() -> None:
    """As a cell that waits is interrupted: ``hm.run`` ends the gang and raises."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        spark_rig.until(lambda: any("about to hang" in g.logs.get(0, "") for g in new()), 30)
        signal.pthread_kill(main, signal.SIGINT)

    before = set(hm.gangs())

    def new() -> list[Gang]:
        return [gang for name, gang in hm.gangs().items() if name not in before]

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(GangStoppedError):
        hm.run(ranks.hang, "sleep", np=2, on="spark")
    thread.join()
    (gang,) = new()
    assert gang.state == "STOPPED"
    assert not alive([rank.pid for rank in gang.ranks if rank.pid is not None])
