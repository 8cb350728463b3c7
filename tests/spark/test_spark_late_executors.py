"""Gangs that wait for executors which start late, or replace lost ones, on a cluster of their own."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import spark_rig

pytestmark = [
    pytest.mark.spark,
    pytest.mark.exhaustive,  # a dozen JVMs: half a minute of two processors
    pytest.mark.timeout(600),
]

SHOWN = ["4 ranks · queued, 2 of 4 slots · 12 s", "! waiting for slots: 1 of 2 executors so far"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What :mod:`tests.spark_late_executors` has seen."""
    folder = str(tmp_path_factory.mktemp("late"))
    told: dict[str, Any] = spark_rig.answer_of(
        "spark_late_executors", folder, env=os.environ, within_s=580
    )
    return told


def test_an_executor_that_comes_late(found: dict[str, Any]) -> None:
    assert found["comes_late"] == {
        "refused": "np 4, the cluster has 2 slots (1 executor x 2 cores, 1 core per task): wait for more "
        "executors with `--wait 10m`, use `--np 2`, or start the session with more executors or cores",
        "shown": SHOWN,
        "result": [0, 1, 2, 3],
    }


def test_an_executor_that_is_lost_before_the_launch(found: dict[str, Any]) -> None:
    assert found["is_lost_before"] == {"shown": SHOWN, "result": [0, 1, 2, 3]}


def test_an_executor_that_is_lost_while_a_gang_runs(found: dict[str, Any]) -> None:
    again = [f"{SHOWN[0]} · attempt 2", SHOWN[1]]
    assert found["is_lost_meanwhile"] == {"shown": again, "result": 50, "attempt": 1}


def test_an_executor_that_is_replaced(found: dict[str, Any]) -> None:
    assert found["is_replaced"] == {"result": [0, 1, 2, 3], "is_lost": False}
