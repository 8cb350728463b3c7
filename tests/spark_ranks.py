"""What tests run on ranks of a cluster, beside ``tests.ranks``: a plain local module that travels."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tests import ranks


def interpreter() -> tuple[str, bool]:
    """Return the prefix of the Python here, and whether it has IPython."""
    return sys.prefix, importlib.util.find_spec("IPython") is not None


def host_and_package() -> tuple[str, str]:
    """Return the number of this host, and the file of the package that the rank imports."""
    import hydrogen_magic

    return os.environ["GROUP_RANK"], hydrogen_magic.__file__


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def meeting_place() -> tuple[str, list[int]]:
    """Return the address of the rendezvous, and what a collective of those who met there returns."""
    return os.environ["MASTER_ADDR"], ranks.gather()


def wait_unless_first(over: str) -> str:
    """Return at once on rank 0 of several; others wait for the file ``over``."""
    if os.environ["WORLD_SIZE"] == "1" or os.environ["RANK"] != "0":
        print("waiting", flush=True)
        while not Path(over).exists():
            time.sleep(0.02)
    return "over"


def parent() -> int:
    return os.getppid()


def pid_space() -> str:
    """Return what tells apart machines that have processes of their own."""
    return os.readlink("/proc/self/ns/pid")


def count_until_attempt(attempt: int) -> str:
    """Step together with all ranks for good, in this attempt a few times; return the machine's id."""
    count(5 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= attempt else 1_000_000)
    return pid_space()


def machine_and_digest(data: bytes) -> tuple[str, str]:
    return pid_space(), digest(data)


def control_group() -> tuple[str, str, str]:
    """Return the number of this host, of the ranks on it, and the control groups of this rank."""
    groups = Path("/proc/self/cgroup").read_text()
    return os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"], groups


def answers(*names: str) -> list[int]:
    """Return ``ANSWER`` of these modules."""
    return [importlib.import_module(name).ANSWER for name in names]


def text_of(name: str) -> str:
    """Return the text of a file that Spark has distributed."""
    from pyspark import SparkFiles

    return Path(SparkFiles.get(name)).read_text()


def removes_its_log() -> int:
    """Leave a directory in the place of this rank's log; return the agent's pid."""
    import hydrogen_magic

    folder = Path(hydrogen_magic.__file__).parents[2]  # of the agent
    (log,) = folder.glob("runs/*/rank-*.log")
    log.unlink()
    log.mkdir()
    return os.getppid()


def log_and_wait(go_on: str) -> str:
    """Print and log once, then wait for a file."""
    import hydrogen_magic as hm

    print("begun", flush=True)
    hm.log(step=1, loss=0.5)
    while not os.path.exists(go_on):
        time.sleep(0.01)
    return "done"


def double(data: Any) -> Any:
    """Return twice an array on rank 0, its sum on the others."""
    return data + data if os.environ["RANK"] == "0" else float(data.sum())


def talk(n_bytes: int) -> None:
    """Print that much, then one line more."""
    line = "x" * 99 + "\n"
    for _ in range(n_bytes // len(line)):
        print(line, end="")
    print("the last line")


def fail_once(marker: str) -> list[int]:
    """Raise on the first attempt; return every rank's number on the second."""
    everyone = ranks.gather()
    try:
        os.open(f"{marker}-{os.environ['RANK']}", os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return everyone
    raise ConnectionError(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")


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
    from pyspark import SparkFiles

    archive = Path(SparkFiles.get("data"))
    sys.path.insert(0, str(archive))
    return {
        "ranks": ranks.gather(),
        "mine": os.environ.get("MINE"),
        "proxy": os.environ.get("http_proxy"),
        "python": sys.executable,
        "file": (archive / "labels.txt").read_text(),
        "module": importlib.import_module("in_archive").ANSWER,
    }


def allocate(n_bytes: int) -> None:
    bytearray(n_bytes)


def abort() -> None:
    os.abort()


def join() -> None:
    """Join the other ranks, and leave a variable for later cells of the session."""
    sys.modules["__main__"].joined = ranks.meet()  # type: ignore[attr-defined]


def joined() -> tuple[int, list[int], int]:
    """Return that variable, those of all ranks, and this process's pid."""
    rank = sys.modules["__main__"].joined
    return rank, ranks.numbers(rank), os.getpid()


def doubles_of_jax() -> bool:
    """Whether JAX computes with them, as its variable said when it was imported."""
    import jax

    return bool(jax.config.jax_enable_x64)
