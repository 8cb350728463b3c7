"""A gang on two machines: what travels to them, and what happens when the network loses one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import spark_machines
from tests.spark_machines import MachineProcess

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("warm_agents"),
    pytest.mark.exhaustive,  # the cluster takes 15 s of CPU; other tests lose executors and agents
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def machines(
    warm_agents: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MachineProcess]:
    if reason := spark_machines.why_not():
        pytest.skip(reason)
    machines = MachineProcess(tmp_path_factory.mktemp("machines"), "tests.spark_machines")
    try:
        assert machines.answer() == "ready"
        yield machines
    finally:
        machines.close()


def test_a_checkpoint_travels_by_the_kernel_to_machines_that_share_no_disk(
    machines: MachineProcess,
) -> None:
    everyone = machines.play("carried")
    assert [(step, n_bytes) for step, n_bytes, _ in everyone] == [(3, 20_000_000)] * 4
    assert len({folder for _, _, folder in everyone}) == 2, "each machine has its own"


def test_data_travels_to_machines_that_share_no_disk(machines: MachineProcess) -> None:
    found = machines.play("sent_data")
    assert found == {"is_complete": True, "folders": 2}


@pytest.mark.horovod
def test_horovod_knows_who_is_where(machines: MachineProcess) -> None:
    """Three ranks: two on one machine, or one; across machines only equals have each other."""
    places = machines.play("by_horovod")
    assert [rank for rank, *_ in places] == [0, 1, 2] and {place[-1] for place in places} == {3.0}
    told = sorted(tuple(place[1:5]) for place in places)
    assert told in (
        [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)],
        [(0, 1, 1, 2), (0, 2, 0, 2), (1, 2, 0, 1)],
    )


@pytest.mark.exhaustive
@pytest.mark.jax
def test_ranks_of_jax_meet_across_machines(machines: MachineProcess) -> None:
    """The names of these machines lead nowhere: Gloo has to be given the interface."""
    seen = machines.play("by_jax")
    assert seen == [seen[0]] * 4 and sorted(Counter(seen[0]).values()) == [2, 2]


@pytest.mark.horovod
def test_elastic_commits_travel_to_machines_that_share_no_disk(machines: MachineProcess) -> None:
    everyone = machines.play("committed")
    assert [found["begun_at"] for found in everyone] == [4] * 4
    assert {found["spread"] for found in everyone} == {0}


def test_a_notebook_that_no_executor_reaches_goes_through_the_server(
    machines: MachineProcess,
) -> None:
    """Killed, it leaves nothing on the machines, nor on the server's."""
    told = machines.play("visited")
    assert "np 8, the cluster has 4 slots" in told["refused"]
    assert told["hosts"] == ["one", "two"]
    assert any("executors cannot reach this machine" in text for text in told["notices"])
    assert told["n_processes"] >= 4 and told["n_relays"] == 1


def test_a_machine_that_comes_back_loses_nothing(machines: MachineProcess) -> None:
    ended = machines.play("away_for_a_while")
    assert ended == {"state": "SUCCEEDED", "lost": []}


def test_a_machine_that_stays_away_ends_the_gang_on_both_sides(machines: MachineProcess) -> None:
    ended = machines.play("away_for_ever")
    assert ended["n_processes"] >= 4
    assert ended["state"] == "FAILED", ended
    assert ended["ended_after_s"] is not None and ended["gone_after_s"] is not None, ended
    assert "two" in ended["reason"] or ended["culprit_host"] == "two", ended


def test_the_next_gang_runs_when_the_machine_is_back(machines: MachineProcess) -> None:
    assert machines.play("again") == 2


def test_machines_without_ipv4(tmp_path: Path) -> None:
    """The kernel, its agents, torch's store and Gloo, on hosts of a provider that is not Spark."""
    if reason := spark_machines.why_not():
        pytest.skip(reason)
    machines = MachineProcess(tmp_path, "tests.ipv6_machines")
    try:
        assert machines.answer() == [["fd77::2", [0, 1]]] * 2
    finally:
        machines.close()
