"""Gangs on eight machines of two slots each: who is where, what travels, and the loss of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pytest

from tests import spark_eight_hosts, spark_machines, spark_rig
from tests.spark_machines import MachineProcess

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("warm_agents"),
    pytest.mark.exhaustive,  # seventeen JVMs and sixteen ranks: a minute of two processors
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def machines(
    warm_agents: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MachineProcess]:
    if reason := spark_machines.why_not():
        pytest.skip(reason)
    with spark_machines.control_groups() as groups:
        if groups is None:
            pytest.skip("needs writable control groups")
        folder = tmp_path_factory.mktemp("eight")
        machines = MachineProcess(folder, "tests.spark_eight_hosts", groups)
        try:
            assert machines.answer() == "ready"
            yield machines
        finally:
            machines.close()


def test_two_ranks_on_each_host(machines: MachineProcess) -> None:
    """In its control group and among its processes, and apart where two hosts have the same name."""
    found = machines.play("sixteen")
    everyone = found["ranks"]
    assert [rank["RANK"] for rank in everyone] == [str(rank) for rank in range(16)]
    assert {rank["WORLD_SIZE"] for rank in everyone} == {"16"}
    by_host = [list(group) for _, group in groupby(everyone, lambda rank: rank["pid_space"])]
    assert len(by_host) == 8, "ranks of a host are contiguous"
    assert {rank["pid_space"]: rank["control_group"] for rank in everyone} == found["machines"]
    assert len(set(found["machines"].values())) == 8
    for node, local in enumerate(by_host):
        assert [rank["LOCAL_RANK"] for rank in local] == ["0", "1"]
        assert {rank["LOCAL_WORLD_SIZE"] for rank in local} == {"2"}
        assert {rank["GROUP_RANK"] for rank in local} == {str(node)}
        assert len({rank["agent"] for rank in local}) == 1
    names = sorted(local[0]["host"] for local in by_host)
    assert names == sorted(spark_eight_hosts.NAMES)
    assert {rank["gloo"] for rank in everyone} == {"eth0"}


def test_gangs_are_packed_and_spread(machines: MachineProcess) -> None:
    assert machines.play("packed_and_spread") == {"pack 2": 1, "pack 4": 2, "spread 8": 8}


def test_a_packed_gang_finds_the_host_that_is_free(machines: MachineProcess) -> None:
    """Its plan, of a moment without other jobs, names one host and the reason, too."""
    found = machines.play("beside_a_job")
    said = "`--pack`: Spark is asked for 1 of the cluster's 8 hosts, by their free slots"
    assert (found["planned_hosts"], found["note"]) == (1, said)
    assert found["is_there"] and said in found["notices"], found


def test_the_loss_of_a_host_that_passes_a_closure_on(machines: MachineProcess) -> None:
    found = machines.play("closure_with_a_loss")
    assert found.pop("n_killed") > 0
    assert found == {"n_machines": 8, "is_right": True, "attempts": 2}


def test_the_loss_of_a_host_is_not_that_of_another_with_its_name(machines: MachineProcess) -> None:
    found = machines.play("twins")
    assert found["is_over"] and found["works"] == 8
    assert found["hosts"] == ["twin"] * 2 and found["lost"][1] == found["lost"][0] + 1


def test_ranks_with_gpus_are_on_the_hosts_that_have_them(machines: MachineProcess) -> None:
    four, two = machines.play("gpus")
    assert {rank["host"] for rank in four} == set(spark_eight_hosts.WITH_GPUS)
    for local in (four[:2], four[2:], two):
        assert len({rank["host"] for rank in local}) == 1, "two ranks fit on a host"
    # All GPUs of the gang on a host are visible; a rank's own is that of its LOCAL_RANK.
    names = spark_eight_hosts.NAMES
    for rank in (*four, *two):
        first = spark_rig.GPUS * names.index(rank["host"])
        assert sorted(rank["gpus"].split(",")) == sorted([str(first), str(first + 1)])
    assert [rank["LOCAL_RANK"] for rank in (*four, *two)] == ["0", "1"] * 3


def test_a_gang_starts_again_without_a_host_that_is_lost(machines: MachineProcess) -> None:
    found = machines.play("lost")
    assert found["n_there"] > 0
    assert found["state"] == "SUCCEEDED", found
    assert any("host one has not responded" in text for text in found["notices"]), found
    assert found["away"] not in found["machines"] and len(found["machines"]) == 8
