"""What is done ahead of time: the first gang of a notebook finds an agent, and its optimizers are quick."""

from __future__ import annotations

import sys
import time

import hydrogen_magic as hm
from hydrogen_magic.driver.placements import local_agents


def _has_imported(name: str) -> bool:
    return name in sys.modules


def test_the_first_gang_takes_the_agent_that_was_warmed_up() -> None:
    local_agents.warm_up(["torch"])
    assert hm.run(_has_imported, "torch", np=1) is True
    assert len(local_agents.pool().all) == 1


def test_an_idle_agent_imports_what_an_optimizer_would_import() -> None:
    local_agents.warm_up(["torch"])
    deadline = time.monotonic() + 60
    while not hm.run(_has_imported, "torch._dynamo", np=1):
        assert time.monotonic() < deadline
        time.sleep(3.0)  # a launch is what keeps an agent from being idle
