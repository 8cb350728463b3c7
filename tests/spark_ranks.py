"""What tests run on ranks of a cluster, beside ``tests.ranks``: a plain local module that travels."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tests import plain_ranks, ranks


def meeting_place() -> tuple[str, list[int]]:
    """Return the address of the rendezvous, and what a collective of those who met there returns."""
    return os.environ["MASTER_ADDR"], ranks.gather()


def count_until_attempt(attempt: int) -> str:
    """Step together with all ranks for good, in this attempt a few times; return the machine's id."""
    count(5 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= attempt else 1_000_000)
    return plain_ranks.pid_space()


def go_on() -> tuple[int, int, str]:
    """Save on the first attempt, and fail; return what the second finds, and where."""
    import torch.distributed as dist

    import hydrogen_magic as hm

    ranks.meet()
    state = hm.checkpoint.load()
    dist.barrier()  # nobody loads what is saved below
    if state is None:
        hm.checkpoint.save({"step": 3, "weights": b"w" * 20_000_000})
        dist.barrier()
        raise ConnectionError("the first attempt is over")
    return state["step"], len(state["weights"]), os.environ["HYDROGEN_MAGIC_CHECKPOINTS"]


def where() -> list[dict[str, str]]:
    """Return what each rank says of where it is, after an all_reduce among them."""
    import torch.distributed as dist

    ranks.meet()
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    mine = {name: os.environ[name] for name in names}
    mine["host"] = socket.gethostname()
    mine["gloo"] = os.environ.get("GLOO_SOCKET_IFNAME", "")
    mine["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    mine["control_group"] = Path("/proc/self/cgroup").read_text()
    mine["pid_space"] = os.readlink("/proc/self/ns/pid")
    mine["agent"] = str(os.getppid())
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return everyone


def count(n_steps: int) -> int:
    """Step together with all ranks, ten times a second; each prints every step."""
    import torch
    import torch.distributed as dist

    ranks.meet()
    for step in range(n_steps):
        dist.all_reduce(torch.ones(1))
        print(f"step {step}", flush=True)
        time.sleep(0.1)
    return n_steps


def inherited() -> dict[str, Any]:
    """Return what this rank has of its session's settings; all ranks meet first."""
    pyspark: Any = importlib.import_module(
        "pyspark"
    )  # every agent would follow an import statement
    archive = Path(pyspark.SparkFiles.get("data"))
    sys.path.insert(0, str(archive))
    return {
        "ranks": ranks.gather(),
        "mine": os.environ.get("MINE"),
        "proxy": os.environ.get("http_proxy"),
        "python": sys.executable,
        "file": (archive / "labels.txt").read_text(),
        "module": importlib.import_module("in_archive").ANSWER,
    }


def join() -> None:
    """Join the other ranks, and leave a variable for later cells of the session."""
    sys.modules["__main__"].joined = ranks.meet()  # type: ignore[attr-defined]


def joined() -> tuple[int, list[int], int]:
    """Return that variable, those of all ranks, and this process's pid."""
    rank = sys.modules["__main__"].joined
    return rank, ranks.numbers(rank), os.getpid()
