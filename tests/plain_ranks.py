"""What tests run on ranks without torch.

A plain local module, which travels whole: an import of torch in one function would have agents import torch
for all of them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hydrogen_magic.node.worker.reporting import reporter


def rank() -> int:
    return int(os.environ["RANK"])


def has_imported(name: str) -> bool:
    return name in sys.modules


def environment() -> dict[str, str]:
    """Return this rank's environment."""
    return dict(os.environ)


def interpreter() -> tuple[str, bool, int]:
    """Return the prefix of the Python here, whether it has IPython, and the pid of the agent."""
    return sys.prefix, importlib.util.find_spec("IPython") is not None, os.getppid()


def host_and_package() -> tuple[str, str]:
    """Return the number of this host, and the file of the package that the rank imports."""
    import hydrogen_magic

    return os.environ["GROUP_RANK"], hydrogen_magic.__file__


def visible_gpus(over: str) -> str:
    """Wait for the file ``over``; return this rank's GPUs."""
    wait_for(over)
    return os.environ["CUDA_VISIBLE_DEVICES"]


def wait_for(over: str) -> None:
    while not Path(over).exists():
        time.sleep(0.01)


def is_recording(over: str) -> bool:
    """Wait for the file ``over``; return whether this rank recorded spans at the beginning."""
    found = reporter.current()
    assert found is not None
    began = found.is_recording
    wait_for(over)
    return began


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wait_unless_first(over: str) -> str:
    """Return at once on rank 0 of several; others wait for the file ``over``."""
    if os.environ["WORLD_SIZE"] == "1" or os.environ["RANK"] != "0":
        print("waiting", flush=True)
        wait_for(over)
    return "over"


def meet(folder: str, mine: str, others: str) -> int:
    """Wait for the rank of another gang; return the pid of this one's agent."""
    (Path(folder) / mine).touch()
    wait_for(str(Path(folder) / others))
    return os.getppid()


def parent() -> int:
    return os.getppid()


def pid_space() -> str:
    """Return what tells apart machines that have processes of their own."""
    return os.readlink("/proc/self/ns/pid")


def machine_and_digest(data: bytes) -> tuple[str, str]:
    return pid_space(), digest(data)


def control_group() -> tuple[str, str, str]:
    """Return the number of this host, of the ranks on it, and the control groups of this rank."""
    groups = Path("/proc/self/cgroup").read_text()
    return os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"], groups


def distributed(file: str, *modules: str) -> tuple[str, list[int]]:
    """Return the text of a file that Spark has distributed, and ``ANSWER`` of these modules."""
    pyspark: Any = importlib.import_module("pyspark")  # an import statement is seen by every agent
    text = Path(pyspark.SparkFiles.get(file)).read_text()
    return text, [importlib.import_module(name).ANSWER for name in modules]


def log_and_wait(go_on: str) -> str:
    """Print and log once, then wait for a file."""
    import hydrogen_magic as hm

    print("begun", flush=True)
    hm.log(step=1, loss=0.5)
    wait_for(go_on)
    return "done"


def observed() -> tuple[bool, bool]:
    """Return whether a plug-in's observer was attached, and whether the rank has its variable."""
    assert "colorsys" in sys.modules
    # By its name: a local module that the cell is seen to use travels with it.
    return importlib.import_module("watched_library").OBSERVED, "MY_STORE" in os.environ


def double(data: Any) -> Any:
    """Return twice an array on rank 0, its sum on the others."""
    return data + data if os.environ["RANK"] == "0" else float(data.sum())


def hang() -> None:
    """Sleep as ``ranks.hang`` does."""
    print("about to hang", os.environ["RANK"], flush=True)
    time.sleep(1000)


def family() -> None:
    """A rank with processes as DataLoader starts them, and a helper in a session of its own."""
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        context.Process(target=time.sleep, args=(1000,), daemon=True).start()
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("batch", flush=True)
    time.sleep(1000)


def leave_helper() -> None:
    """Return while a helper runs on, in a session of its own."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("batch", flush=True)


def display_and_ask() -> str:
    """Display and print on the rank, then return the answer of the user."""
    from hydrogen_magic.node.worker.interactive.display_functions import display

    print("above")
    display({"text/plain": "displayed"}, raw=True)
    print("below")
    return input("name? ")


def talk(n_bytes: int) -> None:
    """Print that much, then one line more."""
    line = "x" * 99 + "\n"
    for _ in range(n_bytes // len(line)):
        print(line, end="")
    print("the last line")


def allocate(n_bytes: int) -> None:
    bytearray(n_bytes)


def abort() -> None:
    os.abort()


def leave_orphan() -> int:
    """Return the pid of a process whose parent has ended."""
    command = ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


def start_by_thread(over: str) -> int:
    """Let another thread start a child, and return its pid once it may be looked for."""
    children: list[int] = []

    def start() -> None:
        child = subprocess.Popen(["sleep", "1000"])
        children.append(child.pid)
        print("started", child.pid, flush=True)
        wait_for(over)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    return children[0]


def wait_with_own_handler(over: str) -> list[int]:
    """Handle SIGUSR1 as jobs of Slurm do; return how often it came."""
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: came.append(signum))
    print("waiting", flush=True)
    wait_for(over)
    return came
