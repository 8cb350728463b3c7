"""Launch: from the call to rank 0's result after one all_reduce, two ranks on this machine.

    python benchmarks/launch.py --rounds 5

The caller has imported torch, as a notebook has. ``warm`` is the second and every later launch of
a kernel, ``cold`` the first one of a fresh process (interpreter and torch import not counted),
``session`` a later call on ranks that stay and have joined before: the others join, reduce and leave.
Launchers without a return value have rank 0 write a file, read when their call returns.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from _common import (
    ForkFloor,
    Peer,
    answer_file,
    checked,
    chosen_peers,
    free_port,
    lacks,
    lacks_spark,
    local_spark,
    on_standard_error,
    peer_table,
    round_robin,
    torchrun,
    warm_up,
)
from _results import parse_arguments, report

NP = 2
PAUSE_S = 1.0
"""For what a launcher leaves running when it returns."""


def all_reduce_once(path: str = "") -> float:
    """What every rank runs. Returns the number of ranks; rank 0 also writes it to ``path``."""
    import json
    import os

    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if path and os.environ.get("RANK") == "0":
        with open(path, "w") as file:
            json.dump(ones.item(), file)
    dist.destroy_process_group()
    return float(ones.item())


def by_file(launch: Callable[[str], Any]) -> float:
    """Time a launcher that returns nothing: its call, and reading what rank 0 wrote."""
    with answer_file() as path:

        def call() -> Any:
            launch(str(path))
            return json.loads(path.read_text())

        return checked(call, NP)


# ── the ways ─────────────────────────────────────────────────────────────────────────────────────


def product_warm() -> float:
    import hydrogen_magic as hm

    with on_standard_error():
        return checked(lambda: hm.run(all_reduce_once, np=NP), NP)


def reduce_in_session() -> float:
    """As :func:`all_reduce_once`, on ranks that stay: they join once, and do not leave."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones.item())


def product_session(on: str = "local") -> float:
    import hydrogen_magic as hm

    with on_standard_error():
        return checked(lambda: hm.run(reduce_in_session, np=NP, on=on, session=f"bench {on}"), NP)


def product_cold() -> float:
    command = [sys.executable, __file__, "--one-cold-launch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def one_cold_launch() -> None:
    """Run in a process of its own: the first launch after ``import torch``."""
    import torch  # noqa: F401 - a notebook that trains has imported it

    print(product_warm())


def notebook_launcher() -> float:
    # Forks this process, which therefore must never initialise CUDA or a process group itself.
    from accelerate import notebook_launcher as launch

    def call(path: str) -> None:
        with on_standard_error():
            launch(all_reduce_once, (path,), num_processes=NP, use_port=str(free_port()))

    return by_file(call)


def by_torchrun() -> float:
    return by_file(lambda path: torchrun(__file__, "--rank", path))


def torch_distributor() -> float:
    # Insists on a Spark session, which main() has started.
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=NP, local_mode=True, use_gpu=False)
    return checked(lambda: distributor.run(all_reduce_once), NP)


def torchrunx() -> float:
    import torchrunx

    os.environ["TORCHRUNX_LOG_DIR"] = ""  # or it writes a folder of logs where it is called
    launcher = torchrunx.Launcher(hostnames=["localhost"], workers_per_host=NP, backend="gloo")
    return checked(lambda: launcher.run(all_reduce_once).rank(0), NP)


@functools.cache
def floor() -> ForkFloor:
    started = ForkFloor()
    atexit.register(started.close)
    return started


def fork_floor() -> float:
    server = floor()
    seconds = checked(lambda: server.all_reduce(NP), NP)
    server.settled()
    return seconds


def main() -> None:
    packages = ("torch", "accelerate", "torchrunx", "pyspark")
    run = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2, packages=packages)
    import torch  # noqa: F401 - as a notebook has

    stays_warm = [
        Peer("fork floor", fork_floor),
        Peer(
            "hydrogen_magic, session", product_session
        ),  # keeps its agent: the next one has another
        Peer("hydrogen_magic, warm", product_warm),
    ]
    starts_anew = [
        Peer("hydrogen_magic, cold", product_cold),
        Peer("notebook_launcher", notebook_launcher, lacks("accelerate")),
        Peer("torchrun", by_torchrun),
        Peer("torchrunx", torchrunx, lacks("torchrunx")),
        Peer("TorchDistributor, local", torch_distributor, lacks_spark()),
    ]
    peers = chosen_peers([*stays_warm, *starts_anew], run.only)
    print(f"launch: np {NP}, {run.machine}", flush=True)
    if any(peer.measure is torch_distributor and not peer.missing for peer in peers):
        atexit.register(local_spark().stop)
    warm_up([peer for peer in peers if peer in stays_warm])
    round_robin(peers, run.rounds, PAUSE_S)
    title = "call to rank 0's result after one all_reduce"
    report(run, peer_table("launch", title, peers, "fork floor"))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        all_reduce_once(sys.argv[-1])
    elif "--one-cold-launch" in sys.argv:
        one_cold_launch()
    else:
        main()
