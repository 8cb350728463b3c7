"""Simulated cluster: what gangs of up to 800 ranks on 100 hosts cost the kernel, without a cluster.

    python benchmarks/simulated_cluster.py --ranks 16 64 256 800

Hosts are objects in a few processes (``_simulated_hosts.py``). They speak the protocol of agents on other
machines to this process, which is the kernel: launcher, controller, encrypted channel, state, run log and
the model of the live view are the real ones. There are no ranks, and no page: events as ranks of a training
send them are made up, at the intervals of real ranks.

    start    call to the first line of the last rank
    kernel   processor time of this process while ranks train, of one core
    view     the part of it that the live view takes
    memory   growth of this process's memory while ranks train, for the gang's events
    log      growth of the run log on disk, the same events
    stop     Stop to the end of the gang
    task     size of the instructions that each task is sent, apart from the package

``--closure`` sends that many MB to the hosts: ``start`` has the transfer then, ``launch`` the processor time
of this process until then, and ``sent`` the bytes that left it. ``memory`` and ``log`` are left out, because
the closure is freed meanwhile. ``--profile`` prints where the kernel's event loop spends its time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _results import Table, parse_arguments, report

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes
from hydrogen_magic.core.events import Event
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver import attending, calls
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import Attempt, EventSink, local_agents
from hydrogen_magic.driver.placements.remote import (
    HostProvider,
    HostTasks,
    RemoteAgentGroup,
    unassigned,
)
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.plugins import Placement
from hydrogen_magic.testing.entry_points import declare
from hydrogen_magic.transport.channel import Hub
from hydrogen_magic.views.widget.page_updates import PageUpdates

RANKS_PER_HOST = 8
_HOSTS = Path(__file__).with_name("_simulated_hosts.py")
_PROCESSES = 2
_PATIENCE_S = 300.0
_COLUMNS = {
    "ranks": "", "hosts": "", "start": "s", "launch": "s", "kernel": "%", "view": "%", "events": "1/s",
    "memory": "MB/min", "log": "MB/min", "stop": "s", "task": "kB", "sent": "MB",
}  # fmt: skip


class SimulatedPlacement(Placement):
    """Eight ranks on every host."""

    on_this_machine = False
    behaviour = (10.0, 1.0)
    """Points and lines that each rank sends per second."""

    def plan(self, spec: JobSpec) -> Plan:
        return unassigned(spec, "simulated")

    def open(self, spec: JobSpec) -> RemoteAgentGroup:
        return RemoteAgentGroup(SimulatedHosts)


class SimulatedHosts(HostProvider):
    """See :class:`hydrogen_magic.driver.placements.remote.HostProvider`."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    async def acquire(self, attempt: Attempt, sink: EventSink) -> None: ...

    async def start_agents(self, tasks: HostTasks, sink: EventSink) -> None:
        n_hosts = tasks.attempt.job.spec.np // RANKS_PER_HOST
        boot = tasks.instructions(tasks.pool.listen(["127.0.0.1"]))
        shares = [list(range(n, n_hosts, _PROCESSES)) for n in range(min(_PROCESSES, n_hosts))]
        self._running = [_started(boot, hosts) for hosts in shares]
        while any(process.poll() is None for process in self._running):
            await asyncio.sleep(0.05)

    async def release(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


def _started(boot: object, hosts: Sequence[int]) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, str(_HOSTS)], stdin=subprocess.PIPE, text=True)
    behaviour = SimulatedPlacement.behaviour
    asked = {"boot": boot, "hosts": hosts, "ranks_per_host": RANKS_PER_HOST, "behaviour": behaviour}
    assert process.stdin is not None
    print(json.dumps(asked), file=process.stdin, flush=True)  # and stays open
    return process


class ModelView:
    """The live view without a page: what it would send."""

    interval_s = 0.1

    def __init__(self) -> None:
        self._feed = PageUpdates()
        self._began_s = time.monotonic()
        self.spent_s = 0.0

    def update(self, state: GangState, fresh: Sequence[Event]) -> None:
        began_s = time.thread_time()
        message = self._feed.update(state, fresh, time.monotonic() - self._began_s)
        if message is not None:
            json.dumps(message.content)
        self.spent_s += time.thread_time() - began_s

    def withdraw_input(self) -> None: ...

    def close(self, state: GangState) -> None: ...


@dataclass
class Reading:
    """What has been spent at one moment."""

    now_s: float
    n_events: int
    processor_s: float
    view_s: float
    memory_bytes: int
    log_bytes: int


def _reading(gang: Gang, view: ModelView) -> Reading:
    log_bytes = (gang.folder / "events.jsonl").stat().st_size
    spent = time.process_time(), view.spent_s
    return Reading(
        time.monotonic(), len(gang.events()), *spent, processes.own_rss_bytes(), log_bytes
    )


def measured(np: int, seconds: float, closure_bytes: int, profile: bool) -> dict[str, Any]:
    """Run one gang; return what each column of the table has."""
    _closure_bytes.clear()
    view, data = ModelView(), os.urandom(closure_bytes)
    began_s, spent_s = time.monotonic(), time.process_time()
    gang = calls.launch(len, data, np=np, on="simulated")
    attending.follow(gang, view)
    _wait(gang, lambda state: all(rank.phase == "running" for rank in state.ranks))
    start_s, launch_s = time.monotonic() - began_s, time.process_time() - spent_s
    time.sleep(1.0)
    first = _reading(gang, view)
    _profiled(seconds) if profile else time.sleep(seconds)
    last = _reading(gang, view)
    stop_s = _stopped(gang)
    s = last.now_s - first.now_s
    return {
        "ranks": np,
        "hosts": np // RANKS_PER_HOST,
        "start": start_s,
        "launch": launch_s,
        "kernel": 100 * (last.processor_s - first.processor_s) / s,
        "view": 100 * (last.view_s - first.view_s) / s,
        "events": (last.n_events - first.n_events) / s,
        "memory": (last.memory_bytes - first.memory_bytes) * 60 / s / 1e6,
        "log": (last.log_bytes - first.log_bytes) * 60 / s / 1e6,
        "stop": stop_s,
        "task": _instructions_bytes[-1] / 1e3,
        "sent": sum(_closure_bytes) / 1e6,
    }


def _stopped(gang: Gang) -> float:
    """Stop the gang; return the seconds to its end."""
    began_s = time.monotonic()
    gang.stop()
    if not gang.wait(_PATIENCE_S):
        raise RuntimeError("the gang did not end")
    return time.monotonic() - began_s


def _wait(gang: Gang, condition: Callable[[GangState], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition(gang.snapshot()):
        if gang.wait(0.02) or time.monotonic() > deadline_s:
            gang.raise_for_state()
            raise RuntimeError(f"the gang came no further than {gang!r}")


def _profiled(seconds: float) -> None:
    """Profile the event loop for a while, and print where it spends its time."""
    profile, loop = cProfile.Profile(), local_agents.hub().loop
    loop.call_soon_threadsafe(profile.enable)
    time.sleep(seconds)
    loop.call_soon_threadsafe(profile.disable)
    time.sleep(0.5)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


_closure_bytes: list[int] = []
_instructions_bytes: list[int] = []


def _count_bytes() -> None:
    """Count what the kernel sends of closures from now on, and the size of instructions."""
    send, instructions = Hub.send, HostTasks.instructions

    def counting(hub: Hub, key: str, message: object, blob: object = None) -> None:
        if isinstance(message, msg.FilePart) and isinstance(blob, memoryview):
            _closure_bytes.append(blob.nbytes)
        send(hub, key, message, blob)  # type: ignore[arg-type]

    def noting(tasks: HostTasks, *arguments: object) -> dict[str, object]:
        found = instructions(tasks, *arguments)  # type: ignore[arg-type]
        _instructions_bytes.append(len(json.dumps(found)))
        return found

    Hub.send, HostTasks.instructions = counting, noting  # type: ignore[method-assign, assignment]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 800])
    parser.add_argument("--seconds", type=float, default=10.0, help="of training to measure")
    parser.add_argument("--closure", type=float, default=0.0, help="MB that every host is sent")
    parser.add_argument("--points", type=float, default=10.0, help="per rank and second")
    parser.add_argument("--lines", type=float, default=1.0, help="per rank and second")
    parser.add_argument("--profile", action="store_true", help="of the kernel's event loop")


def main() -> None:
    asked = parse_arguments(__doc__.splitlines()[0], packages=(), more=_add_arguments)
    SimulatedPlacement.behaviour = (asked.points, asked.lines)
    entry_point = "simulated_cluster:SimulatedPlacement"
    declare(Path(asked.home.name), "hydrogen_magic.placements", {"simulated": entry_point})
    sys.path.insert(0, asked.home.name)
    sys.modules["simulated_cluster"] = sys.modules[measured.__module__]
    _count_bytes()
    found = []
    for np in asked.ranks:
        found.append(measured(np, asked.seconds, int(asked.closure * 1e6), asked.profile))
        print(f"  {np} ranks", file=sys.stderr, flush=True)
    local_agents.close()
    name, title, columns = "simulated_cluster", "ranks that train", dict(_COLUMNS)
    if asked.closure:
        name, title = (
            "simulated_cluster_closure",
            f"{title}, with a closure of {asked.closure:g} MB",
        )
        del columns["memory"], columns["log"]
    rows = [[each[column] for column in columns] for each in found]
    report(asked, Table(name, title, columns, rows))


if __name__ == "__main__":
    main()
