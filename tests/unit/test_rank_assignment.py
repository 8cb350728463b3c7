"""Who becomes which rank on a cluster, whatever the order and the agents that its tasks came by."""

from __future__ import annotations

from typing import cast

import pytest

from hydrogen_magic.core.job import LOOPBACK, JobSpec
from hydrogen_magic.core.messages import TaskHello
from hydrogen_magic.driver.placements.remote import rank_assignment
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.node.agent import host_task


class _Agent:
    """What a plan asks of an agent."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.held = (f"address of {host}", 1)
        self.interface = "eth0"


def place(agent: _Agent, number: int, machine: str) -> rank_assignment.AttachedTask:
    about = TaskHello("cafe", 0, number, machine, shares_disk=True, gpus_visible=None, versions={})
    return rank_assignment.AttachedTask(cast(RemoteAgent, agent), about)


@pytest.fixture
def spec() -> JobSpec:
    return JobSpec(np=4)


def test_tasks_that_alternate_between_uneven_hosts(spec: JobSpec) -> None:
    one, other = _Agent("one"), _Agent("other")
    on = {0: one, 1: other, 2: one, 3: one}
    meant = rank_assignment.plan(spec, {p: place(a, p, a.host) for p, a in on.items()}, False)
    assert meant.tasks == (0, 2, 3, 1)
    assert [slot.local_rank for slot in meant.plan.slots] == [0, 1, 2, 0]
    assert [slot.local_world_size for slot in meant.plan.slots] == [3, 3, 3, 1]
    assert [slot.node_rank for slot in meant.plan.slots] == [0, 0, 0, 1]
    assert {slot.interface for slot in meant.plan.slots} == {"eth0"}


def test_two_agents_of_a_machine_serve_neighbours(spec: JobSpec) -> None:
    """The first was busy with another gang when the first task came, and free for the next."""
    first, second = _Agent("one"), _Agent("one")
    on = {0: second, 1: first, 2: first, 3: second}
    meant = rank_assignment.plan(spec, {p: place(a, p, "m") for p, a in on.items()}, False)
    assert [slot.local_rank for slot in meant.plan.slots] == [0, 1, 2, 3]
    assert {(s.node_rank, s.n_nodes, s.interface) for s in meant.plan.slots} == {(0, 1, LOOPBACK)}
    assert meant.agents == (second, first)
    assert [meant.ranks_on(agent) for agent in meant.agents] == [[0, 3], [1, 2]]


def test_containers_are_machines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = host_task._machine("token")
    assert host_task._machine("token") == machine != host_task._machine("another")
    read = host_task.read
    elsewhere = {"/proc/self/cgroup": b"0::/another"}
    monkeypatch.setattr(host_task, "read", lambda path: elsewhere.get(path) or read(path))
    assert host_task._machine("token") != machine
