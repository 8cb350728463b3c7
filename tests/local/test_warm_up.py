"""What is done ahead of time: the first gang of a notebook finds an agent, and its optimizers are quick."""

from __future__ import annotations

import sys
import time

import pytest

import hydrogen_magic as hm
from hydrogen_magic.driver.placements import local_agents

pytestmark = pytest.mark.usefixtures("cold")


def _has_imported(name: str) -> bool:
    return name in sys.modules


def test_the_first_gang_takes_the_agent_that_was_warmed_up() -> None:
    local_agents.warm_up(["torch"])
    assert hm.run(_has_imported, "torch", np=1) is True
    assert len(local_agents.pool().all) == 1


def test_the_forkserver_imports_for_all_ranks_what_an_optimizer_would_import() -> None:
    import torch

    def train() -> bool:
        from torch import optim

        before = _has_imported("torch._dynamo")
        optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return before

    assert hm.run(train, np=1) is True


def test_an_idle_agent_imports_what_an_optimizer_would_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_agents, "PRELOADED_WHEN_IDLE", ("torch._dynamo",))
    local_agents.warm_up(["torch"])
    deadline = time.monotonic() + 60
    while not hm.run(_has_imported, "torch._dynamo", np=1):
        assert time.monotonic() < deadline
        time.sleep(3.0)  # a launch is what keeps an agent from being idle
