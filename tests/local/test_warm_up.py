"""What is done ahead of time: the first gang of a notebook finds an agent, and its optimizers are quick."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic.driver import session
from hydrogen_magic.driver.placements import local_agents
from tests.gangs import wait_until
from tests.plain_ranks import has_imported

pytestmark = pytest.mark.usefixtures("cold")


def _touch_at_exit(path: str) -> bool:
    atexit.register(Path(path).touch)
    return has_imported("torch")


@pytest.mark.exhaustive  # the other tests warm up for gangs
def test_a_gang_beside_a_session_finds_an_agent_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, get_ready: Callable[..., None]
) -> None:
    """The session keeps the one that was warmed up, and its ranks may run their exit handlers there."""
    monkeypatch.setattr(local_agents.AgentPool, "get_ready", get_ready)
    left = tmp_path / "left"
    local_agents.warm_up(["torch"])
    for _ in range(2):
        assert hm.run(_touch_at_exit, str(left), np=1, session="lab") is True
        wait_until(lambda: [agent.is_ready for agent in local_agents.pool().idle] == [True])
    assert hm.run(has_imported, "torch", np=1) is True
    assert len(local_agents.pool().all) == 2
    (held,) = session.sessions()
    held.end()
    wait_until(left.exists)
    wait_until(lambda: len(local_agents.pool().all) == 1)


def test_the_forkserver_imports_what_an_optimizer_needs_in_the_gangs_environment() -> None:
    """Libraries read such variables when they are imported, which is before ranks get their environment."""
    import torch

    def train() -> tuple[bool, bool]:
        from torch import optim

        before = has_imported("torch._dynamo")
        optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return before, _is_verbose()

    assert hm.run(train, np=1, quiet=True, env={"TORCH_LOGS": "+dynamo"}) == (True, True)


def _is_verbose() -> bool:
    from torch._logging import _internal

    return "torch._dynamo" in _internal.log_state.log_qname_to_level


def test_the_first_gang_takes_the_agent_that_was_warmed_up() -> None:
    """Small modules stand for torch and what an optimizer imports."""
    local_agents.warm_up(["wsgiref", "wsgiref.validate"])
    assert hm.run(has_imported, "wsgiref.validate", np=1) is True
    assert len(local_agents.pool().all) == 1
