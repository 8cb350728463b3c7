"""Stop: from the call to the end of the last process, two ranks on this machine.

    python benchmarks/stop.py --rounds 5

Ranks sleep, wait in an all_reduce that rank 1 never enters, hold the GIL in C code, or ignore SIGINT and
SIGTERM. torchrun gets SIGTERM, as from ``kill``; it waits 30 s for ranks that ignore signals.
Last, ranks sleep and their agent does not respond, because it was stopped by SIGSTOP: from Kill to the end
of agent and ranks.
``benchmarks/spark.py`` measures the same gangs on a Spark cluster.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from _common import (
    Peer,
    chosen_peers,
    on_standard_error,
    peer_table,
    round_robin,
    torchrun_command,
)
from _results import parse_arguments, report

from hydrogen_magic.core import processes

NP = 2
WAYS = ("sleep", "all_reduce", "hold the GIL", "ignore signals")
GOAL_S = 1.0
"""Within this time Stop ends all processes of a gang."""
KILL_GOAL_S = 5.0
"""The same for Kill, if the agent does not respond."""
_READY = "ready"
_START_S = 60.0
_SETTLE_S = 0.2
"""Time that ranks get to enter the code in which they hang after they report that they are ready."""
_GONE_S = 120.0


def hang(way: str) -> None:
    """What every rank runs; nothing but a stop ends it."""
    if way == "all_reduce":
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    if way == "ignore signals":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(_READY, flush=True)
    if way == "all_reduce":
        wait_in_all_reduce()
    if way == "hold the GIL":
        sum(itertools.repeat(0))
    time.sleep(1000)


def wait_in_all_reduce() -> None:
    """Enter a collective on rank 0 only."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def gone_after(stop: float, pids: Iterable[int]) -> float:
    """Wait for the end of processes; return the seconds since ``stop``."""
    pids = list(pids)
    while any(process.state != "Z" for process in processes.processes(pids)):
        if time.monotonic() - stop > _GONE_S:
            raise TimeoutError(f"still running after {_GONE_S:.0f} s")
        time.sleep(0.002)
    return time.monotonic() - stop


def product(way: str, on: str = "local", *, is_agent_stopped: bool = False) -> float:
    """Return the seconds from ``stop()`` to the end of all ranks; from Kill if the agent is stopped."""
    with on_standard_error():
        gang = hanging(way, on)
        pids = [rank.pid for rank in gang.ranks if rank.pid is not None]
        if is_agent_stopped:
            pids.append(stopped_agent(gang))
        stop = time.monotonic()
        gang.stop(kill=is_agent_stopped)
        seconds = gone_after(stop, pids)
        gang.wait(_GONE_S)
    return seconds


def hanging(way: str, on: str) -> Any:
    """Start a gang, and return it when its ranks hang."""
    import hydrogen_magic as hm

    gang = hm.launch(hang, way, np=NP, on=on)
    started = time.monotonic()
    while not all(_READY in gang.logs.get(rank, "") for rank in range(NP)):
        if gang.wait(0.01) or time.monotonic() - started > _START_S:
            raise RuntimeError(gang.snapshot().reason or "the ranks did not start")
    time.sleep(_SETTLE_S)
    return gang


def stopped_agent(gang: Any) -> int:
    """Stop the agent of a local gang (SIGSTOP); return its pid."""
    from hydrogen_magic.driver.placements import local_agents

    [agent] = [agent for agent in local_agents.pool().all if agent.gang == gang.id]
    os.kill(agent.process.pid, signal.SIGSTOP)
    return int(agent.process.pid)


def torchrun(way: str) -> float:
    command = torchrun_command(__file__, "--rank", way)
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert launcher.stdout is not None
    for _ in range(NP):
        if not launcher.stdout.readline():
            raise RuntimeError("torchrun exited before its ranks were ready")
    time.sleep(_SETTLE_S)
    ranks = [process.pid for process in processes.descendants(launcher.pid)]
    stop = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    try:
        return gone_after(stop, ranks)
    finally:
        for pid in ranks:
            processes.send_signal(pid, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        hang(sys.argv[2])
        return
    run = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=1)
    os.environ["OMP_NUM_THREADS"] = "1"
    ways = {"hydrogen_magic": product, "torchrun": torchrun}
    stops = [
        Peer(f"{name}, {way}", partial(stop, way)) for way in WAYS for name, stop in ways.items()
    ]
    kills = [
        Peer("hydrogen_magic, stopped agent", partial(product, "sleep", is_agent_stopped=True))
    ]
    stops, kills = chosen_peers(stops, run.only), chosen_peers(kills, run.only)
    print(f"stop: np {NP}, {run.machine}", flush=True)
    round_robin([*stops, *kills], run.rounds)
    report(
        run,
        peer_table(
            "stop_gang", f"Stop to the end of the last process (goal: {GOAL_S:.0f} s)", stops
        ),
    )
    title = f"Kill to the end of the last process, agent stopped (goal: {KILL_GOAL_S:.0f} s)"
    report(run, peer_table("stop_agent", title, kills))


if __name__ == "__main__":
    main()
