"""Sessions of ranks on Spark: the barrier stage stays open, and its slots are held, between cells."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements.spark import spark_session as spark_sessions
from hydrogen_magic.driver.placements.spark.application_status import running_tasks
from hydrogen_magic.notebook.arguments.gang import GangCommand
from hydrogen_magic.notebook.gang_command import manage
from tests import spark_ranks
from tests.gangs import ended, wait_until, wait_until_gone
from tests.spark_gangs import launch

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("spark", "warm_agents"),
    pytest.mark.timeout(300),
]


CLASSIC = pytest.param("classic", marks=pytest.mark.xdist_group("spark"))
CONNECT = pytest.param(
    "connect", marks=[pytest.mark.xdist_group("connect"), pytest.mark.exhaustive]
)


@pytest.fixture(params=[CLASSIC, CONNECT])
def spark(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def first() -> Iterator[Gang]:
    """The first cell of a session of two ranks, which have joined each other and hold a variable."""
    gang = ended(launch(spark_ranks.join, session="lab", np=2))
    gang.raise_for_state()
    yield gang
    for lab in sessions.sessions():
        lab.end()


def test_the_stage_stays_open_until_the_session_ends(
    first: Gang, notebook_shell: InteractiveShell
) -> None:
    found, again = (ended(launch(spark_ranks.joined, session="lab")).results for _ in range(2))
    assert [rank for rank, _, _ in found] == [0, 1] and found == again
    stage = f"hydrogen_magic-{first.id}-0"
    held = functools.partial(running_tasks, spark_sessions.find(), stage)
    wait_until(lambda: held() in (2, None))  # None: the server does not tell
    listed: list[str] = []
    manage(GangCommand(), listed.append)
    assert f"spark: 2 slots on {os.uname().nodename}" in "".join(listed)
    notebook_shell.push({"rows": pd.DataFrame({"x": [1]})})
    body = "import os\ndef predict(batch):\n    return {'y': batch['x'], 'pid': os.getpid()}"
    notebook_shell.run_cell_magic("infer", "rows --session lab --quiet --out scored", body)
    scored = notebook_shell.user_ns["scored"]
    assert list(scored["y"]) == [1] and scored["pid"][0] in [pid for _, _, pid in found]
    sessions.sessions()[0].end()
    wait_until_gone([pid for _, _, pid in found])
    wait_until(lambda: not held())


def test_an_idle_session_releases_its_slots(first: Gang) -> None:
    held = functools.partial(running_tasks, spark_sessions.find(), f"hydrogen_magic-{first.id}-0")
    wait_until(lambda: held() in (2, None))  # Spark's UI may be late
    (lab,) = sessions.sessions()
    ended(launch(spark_ranks.joined, session="lab", idle=0.5)).raise_for_state()
    wait_until(lambda: lab.why_ended)
    assert lab.why_ended == "0.5 s without a cell"
    wait_until(lambda: not held())


def test_a_rank_that_ends_between_cells_ends_the_session(first: Gang) -> None:
    (lab,) = sessions.sessions()
    (_, _, pid), *_ = ended(launch(spark_ranks.joined, session="lab")).results
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: lab.why_ended)
    assert lab.why_ended == "rank 0 ended while no cell ran" and "joined" in lab.loss
