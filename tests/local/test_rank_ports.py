"""Ports that agents hold for ranks which listen themselves."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core.messages import HoldPorts
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.node.agent.rank_ports import RankPorts
from hydrogen_magic.plugins import JobSpec, Plan, Rendezvous, RendezvousInfo, place
from hydrogen_magic.testing.entry_points import declare
from tests import directory_hosts, plain_ranks
from tests.gangs import agent_pids, ended, free_ports, wait_until_gone
from tests.listening_ranks import PORT, listen

pytestmark = pytest.mark.usefixtures("warm_agents")


class ListeningRendezvous(Rendezvous):
    """Tells each rank its port."""

    needs_rank_ports = True

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        return RendezvousInfo(tuple({**place(slot), PORT: str(slot.port)} for slot in plan.slots))


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[None]:
    points = {
        "rendezvous": {"listening": "tests.local.test_rank_ports:ListeningRendezvous"},
        "placements": {"directories": "tests.directory_hosts:DirectoryPlacement"},
    }
    for group, named in points.items():
        declare(tmp_path, f"hydrogen_magic.{group}", named, group)
    for name in ("one", "other"):
        (tmp_path / "hosts" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.setenv(directory_hosts.ROOT, str(tmp_path / "hosts"))
        yield


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("on", ["local", "directories"])
def test_every_rank_has_a_port_that_its_agent_holds(on: str) -> None:
    """Also on an agent that has served another gang."""
    for _ in range(2):
        gang = ended(hm.launch(listen, np=2, on=on, rendezvous="listening"))
        assert gang.snapshot().state == "SUCCEEDED", gang.snapshot().reason
        ports, are_held = zip(*gang.results, strict=True)
        assert len({*ports, 0}) == 3
        assert are_held == (True, True)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the ranks
        sock.bind(("", ports[0]))


@pytest.mark.exhaustive  # it waits ten seconds for the agent
@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("rendezvous", ["torch", "listening"])
def test_a_warm_agent_that_was_stopped_is_replaced(rendezvous: str) -> None:
    """Before it is sent the gang, where it has to hold ports."""
    ended(hm.launch(plain_ranks.rank, np=2, rendezvous=rendezvous)).raise_for_state()
    pids = agent_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    assert ended(hm.launch(plain_ranks.rank, np=2, rendezvous=rendezvous)).results == [0, 1]
    wait_until_gone(pids)


def test_ports_are_those_of_the_range() -> None:
    first, *_, last = allowed = free_ports(3)
    held = RankPorts(PortRange(first, last))
    try:
        assert held.hold(HoldPorts(3)).ports == tuple(allowed)
        assert held.hold(HoldPorts(1)).ports == (first,), "the others are released"
        few = held.hold(HoldPorts(4))
        assert few.ports == ()
        assert "all ports of" in few.problem
    finally:
        held.release()
