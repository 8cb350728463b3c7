"""Gangs of up to 800 ranks on 100 hosts: nothing is lost, and every cost is linear in the hosts.

Hosts are those of ``benchmarks/simulated_cluster.py``; the kernel's side is the real one.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes
from hydrogen_magic.driver import attending, calls
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.remote import HostTasks
from hydrogen_magic.driver.placements.remote.agents import agent_pool
from hydrogen_magic.testing.entry_points import declare
from hydrogen_magic.transport.channel import Hub
from tests.gangs import ended, until, wait_until

pytestmark = [pytest.mark.usefixtures("cold"), pytest.mark.timeout(300)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RANKS_PER_HOST = 8
PERIOD_S = 2.0
"""Between the steps of a rank, each of which logs metrics, and between its lines. With more, slow machines
would measure their other processes."""
TRAINING_S = 8.0
LINE = re.compile(r"step \d+: loss [\d.]+, 1234 samples/s")
REGULAR = (msg.ClockReading, msg.PartTaken)
"""What the kernel sends a host as long as the gang runs; the rest belongs to its start and its end."""
EVENT_BYTES = 3000
"""More than the kernel's memory takes for one event."""


@dataclass
class Traffic:
    """What the kernel sends."""

    to_hosts: Counter[str] = field(default_factory=Counter)
    """Bytes of the start and the end, with the closure, by the key of the host's agent."""
    to_tasks: int = 0
    """Bytes of the instructions for all tasks, apart from the package."""


@dataclass
class Simulation:
    """The simulated cluster, and what is noted of it."""

    module: Any
    """``benchmarks/simulated_cluster.py``."""
    traffic: Traffic
    exits: list[int | None] = field(default_factory=list)
    """Exit codes of the processes of hosts, which end by themselves when all tasks are released."""


@pytest.fixture
def simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Declare the placement ``simulated``, and note what is sent to its hosts."""
    entry_point = {"simulated": "simulated_cluster:SimulatedPlacement"}
    declare(tmp_path, "hydrogen_magic.placements", entry_point)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = Simulation(import_module("simulated_cluster"), Traffic())
    behaviour = 1 / PERIOD_S, 1 / PERIOD_S
    monkeypatch.setattr(found.module.SimulatedPlacement, "behaviour", behaviour)
    send, instructions = Hub.send, HostTasks.instructions
    release = found.module.SimulatedHosts.release

    def count(hub: Hub, key: str, message: Any, blob: Any = None) -> None:
        if not isinstance(message, REGULAR):
            n_bytes = 0 if blob is None else memoryview(blob).nbytes
            found.traffic.to_hosts[key] += len(json.dumps(msg.encode(message))) + n_bytes
        send(hub, key, message, blob)

    def measure(tasks: HostTasks, *arguments: Any) -> dict[str, Any]:
        made = instructions(tasks, *arguments)
        found.traffic.to_tasks = len(json.dumps(made))
        return made

    async def note_exits(hosts: Any) -> None:
        found.exits += [process.poll() for process in hosts._running]
        await release(hosts)

    monkeypatch.setattr(Hub, "send", count)
    monkeypatch.setattr(HostTasks, "instructions", measure)
    monkeypatch.setattr(found.module.SimulatedHosts, "release", note_exits)
    return found


def test_a_gang_of_two_hosts(simulation: Simulation) -> None:
    run(simulation, 16)


@pytest.mark.exhaustive  # twenty seconds of a processor
def test_a_gang_of_a_hundred_hosts(simulation: Simulation) -> None:
    few = run(simulation, 16)
    many = run(simulation, 800)
    assert (len(few.to_hosts), len(many.to_hosts)) == (2, 100)
    *others, of_rank_0 = sorted(many.to_hosts.values())
    digits = 1.05  # numbers of ranks are longer
    assert others[-1] < digits * max(few.to_hosts.values())
    assert of_rank_0 - others[-1] < 20 * len(many.to_hosts), "it is sent the names of all hosts"
    assert many.to_tasks < digits * few.to_tasks


def run(simulation: Simulation, np: int) -> Traffic:
    """Run a gang that trains until it is stopped; return what was sent meanwhile."""
    simulation.exits.clear()
    simulation.traffic.to_hosts.clear()
    began_bytes = processes.own_rss_bytes()
    gang = calls.launch(len, b"data", np=np, on="simulated")
    attending.follow(gang, simulation.module.ModelView())
    until_trained(gang, PERIOD_S)
    assert len(agent_pool()._agents) == np, "any task may start the agent of its host"
    first_s = time.process_time()
    until_trained(gang, PERIOD_S + TRAINING_S)
    # By the time of ranks: a kernel that cannot keep up gets the same steps, later, and works as much.
    assert (time.process_time() - first_s) / TRAINING_S < 1.0, "of one core"
    gang.stop()
    assert ended(gang, 150).state == "STOPPED"
    check_log(gang, np)
    spent_bytes = processes.own_rss_bytes() - began_bytes
    assert spent_bytes < 30e6 + EVENT_BYTES * len(gang.events())
    assert len(agent_pool()._agents) == np // RANKS_PER_HOST, "the other keys are revoked"
    wait_until(lambda: simulation.exits)
    assert set(simulation.exits) == {0}, "all tasks were released"
    local_agents.close()
    return replace(simulation.traffic, to_hosts=simulation.traffic.to_hosts.copy())


def until_trained(gang: Gang, seconds: float) -> None:
    """Wait until the steps of so many seconds of training have arrived from all ranks."""
    n_steps = int(seconds / PERIOD_S)
    until(gang, lambda: all(rank.steps >= n_steps for rank in gang.snapshot().ranks))


def check_log(gang: Gang, np: int) -> None:
    """Every rank has started and ended once, and all that it printed was shown and is in its log."""
    events = gang.events()
    for kind in (ev.RankStarted, ev.RankExited):
        assert sorted(e.rank for e in events if isinstance(e, kind)) == list(range(np))
    shown = Counter(e.rank for e in events if isinstance(e, ev.Output))
    lines = {rank: LINE.findall(gang.log_path(rank).read_text()) for rank in range(np)}
    assert {rank: len(found) for rank, found in lines.items()} == shown
    assert len(shown) == np and min(shown.values()) >= TRAINING_S / PERIOD_S
