"""What tests run on ranks. A plain local module: it travels with what it uses, and imports little.

What needs other ranks works by torch.distributed, and by Horovod in gangs of ``--with horovod``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydrogen_magic as hm


def is_horovods() -> bool:
    """Return whether this rank's gang meets by Horovod."""
    return "HOROVOD_RANK" in os.environ


def meet(timeout_s: float = 60.0) -> int:
    """Join the process group, prove it by a collective, return the rank."""
    if is_horovods():
        return _meet_by_horovod()
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    return dist.get_rank()


def _meet_by_horovod() -> int:
    import horovod.torch as hvd
    import torch

    hvd.init()
    ones = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    assert ones.item() == hvd.size()
    return int(hvd.rank())


def meet_by_file(timeout_s: float) -> int:
    """Join the process group by the file of the tests' plug-in; return the rank."""
    from datetime import timedelta

    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = {"init_method": f"file://{os.environ['MY_STORE']}", "rank": rank, "world_size": size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s), **where)
    return rank


def leave() -> None:
    """Leave the process group in order."""
    if is_horovods():
        import horovod.torch as hvd

        hvd.shutdown()
    else:
        import torch.distributed as dist

        dist.destroy_process_group()


def gather() -> list[int]:
    """Every rank's number, as each rank sees it."""
    return numbers(meet())


def swap_compiled() -> float:
    """Exchange a number between two ranks in compiled code."""
    import torch
    import torch.distributed as dist

    rank = meet()

    def swap(x: Any) -> Any:
        work = dist.isend(x + 1, 1) if rank == 0 else dist.irecv(x, 0)
        work.wait()
        return x * 2

    return float(torch.compile(swap, backend="eager")(torch.ones(1)))


def numbers(rank: int) -> list[int]:
    """The numbers that all ranks pass, in rank order."""
    if is_horovods():
        import horovod.torch as hvd

        found: list[int] = hvd.allgather_object(rank)
        return found
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rank)
    return everyone


def all_reduce() -> None:
    """Wait for all ranks."""
    import torch

    if is_horovods():
        import horovod.torch as hvd

        hvd.allreduce(torch.ones(1), name="step")
    else:
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))


def all_reduce_for_ever() -> None:
    while True:
        all_reduce()


def reduce_and_tell_port(port_file: str) -> None:
    """Write the store's port to a file, and reduce for ever."""
    meet()
    Path(port_file).write_text(os.environ["MASTER_PORT"])
    all_reduce_for_ever()


def meet_as_in_tutorials(port: int, *, by_url: bool) -> float:
    """Join at a port of the code's own, twice; return the sum over the ranks."""
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    place: dict[str, Any] = {"rank": hm.rank(), "world_size": hm.world_size()}
    if by_url:
        place["init_method"] = f"tcp://localhost:{port}"
    else:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    for attempt in range(1 if by_url else 2):
        time.sleep(attempt * hm.rank())  # until rank 0 has closed its first store at the port
        dist.init_process_group("gloo", **place)
        dist.all_reduce(total)
        dist.destroy_process_group()
    return float(total)


def reduce_different_shapes() -> None:
    """Rank 0 leaves the second all_reduce, and ends; rank 1 waits for more data."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2 + hm.rank()))


def meet_as_children(start_method: str, *ports: int, with_ranks_port: bool = False) -> None:
    """Start two processes that meet: at a port of the code's own, or by the variables of this rank.

    ``with_ranks_port``: they are passed its variable, as by Ignite's launcher.
    """
    from torch.multiprocessing import start_processes

    if with_ranks_port:
        ports = (int(os.environ["MASTER_PORT"]),)
    start_processes(_meet_as_child, ports, nprocs=2, start_method=start_method)


def meet_with_child(port: int) -> None:
    """Join with a process that this rank starts, at a port of the code's own."""
    import torch.multiprocessing

    child = torch.multiprocessing.get_context("spawn").Process(
        target=_meet_as_child, args=(1, port)
    )
    child.start()
    _meet_as_child(0, port)
    child.join()


def spawn_from_thread() -> set[str | None]:
    """Start a process in a thread; return the values of ``MASTER_PORT`` in this process meanwhile."""
    import multiprocessing
    import threading

    data = bytes(4 << 20)  # which the process reads when it has started
    child = multiprocessing.get_context("spawn").Process(target=len, args=(data,))
    thread = threading.Thread(target=child.start)
    found = {os.environ["MASTER_PORT"]}
    thread.start()
    while thread.is_alive():
        found.add(os.environ.get("MASTER_PORT"))
    child.join()
    return found


def join_in_thread() -> None:
    """Rank 1 joins when its cell has ended, in a thread."""
    import threading

    def join_late() -> None:
        time.sleep(3.0 if hm.rank() else 0.0)  # the kernel knows by then that rank 0 waits
        everyone = [None] * hm.world_size()
        meet()
        dist.all_gather_object(everyone, hm.rank())

    import torch.distributed as dist

    if hm.rank():
        threading.Thread(target=join_late).start()
    else:
        join_late()


def join_after_a_smaller_group() -> int:
    """Rank 0 joins a group of its own, leaves it, and joins with all others; return the sum over all."""
    import torch
    import torch.distributed as dist

    if hm.rank() == 0:
        dist.init_process_group("gloo", rank=0, world_size=1)
        dist.destroy_process_group()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def launch_by_torchs_agent(port: int) -> None:
    """Start processes as Accelerate's notebook_launcher does, which sets ``WORLD_SIZE`` meanwhile."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["WORLD_SIZE"] = "2"
    config = LaunchConfig(1, 1, 2, rdzv_endpoint=f"127.0.0.1:{port}", rdzv_backend="static")
    config.rdzv_configs.update(rank=0)
    elastic_launch(config, time.sleep)(5)


def _meet_as_child(rank: int, *ports: int) -> None:
    import torch.distributed as dist

    if ports:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(ports[0]))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    everyone = [None, None]
    dist.all_gather_object(everyone, rank)
    assert everyone == [0, 1]
    dist.destroy_process_group()


def meet_with_one_more() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=hm.rank(), world_size=hm.world_size() + 1)


def join_in_reverse() -> int:
    """Join the process group in the reverse order of the gang's ranks; return the rank in the group."""
    import torch.distributed as dist

    n_ranks = hm.world_size()
    dist.init_process_group("gloo", rank=n_ranks - 1 - hm.rank(), world_size=n_ranks)
    return dist.get_rank()


def join() -> tuple[int, bool]:
    """Join the process group and leave at once; return whether torch waits for all ranks when they join."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_world_size(), "TORCH_DIST_INIT_BARRIER" in os.environ


def join_without_first() -> None:
    """All ranks but the first join, with the time limit of torch."""
    if hm.rank() > 0:
        meet(timeout_s=1800)


def join_apart(file: str) -> int:
    """The last two ranks join a group of their own, one of them late, while others end."""
    import torch.distributed as dist

    rank = hm.rank() - (hm.world_size() - 2)
    if rank >= 0:
        time.sleep(3 * rank)
        dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
        dist.barrier()  # else one may end, and close its connections, while the other one connects
    return rank


def return_in_the_second_attempt() -> int:
    """In the first one, rank 1 hangs, and rank 0 waits for it in a collective."""
    rank = meet()
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1000)
    all_reduce()
    return rank


def end(how: str) -> None:
    """End this process in the given way."""
    if how == "_exit(0)":
        os._exit(0)
    elif how.startswith("exit"):
        sys.exit(int(how[5:-1]))
    elif how == "SIGSEGV":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), getattr(signal, how))


def end_one(culprit: int, how: str, group_timeout_s: float = 60.0) -> None:
    if meet(group_timeout_s) == culprit:
        end(how)
    all_reduce_for_ever()


class EndsAtUnpickling:
    """Ends the process that unpickles it: ``how`` is one of :func:`end`, or an exception's name."""

    def __init__(self, how: str, kernel_pid: int) -> None:
        self.how, self.kernel_pid = how, kernel_pid

    def __reduce__(self) -> Any:
        return (_end_here, (self.how, self.kernel_pid))


def _end_here(how: str, kernel_pid: int) -> None:
    if os.getpid() == kernel_pid:
        raise AssertionError("the kernel must not open this")
    if os.environ.get("RANK") == "1":
        if how == "raise":
            raise LookupError("this cannot be loaded")
        end(how)


def use(value: object) -> str:
    return type(value).__name__


def end_after_result(go: str) -> int:
    """Return 7; an exit handler of rank 1 ends it when there is a file ``go``."""
    import atexit

    def end_later() -> None:
        while not Path(go).exists():
            time.sleep(0.01)
        end("SIGKILL")

    if os.environ["RANK"] == "1":
        atexit.register(end_later)
    return 7


def out_of_memory(limit_bytes: int) -> None:
    import resource

    if os.environ["RANK"] == "1":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + limit_bytes, used + limit_bytes))
        bytearray(10 * limit_bytes)
    time.sleep(60)


def hang(how: str) -> int:
    """Hang in a way of its own; ``meet`` first where peers should wait in a collective."""
    rank = int(os.environ["RANK"])
    print("about to hang", rank, flush=True)
    if how == "sleep":
        time.sleep(1000)
    elif how == "collective":
        meet(timeout_s=1800)
        if rank != 0:
            time.sleep(1000)
        all_reduce_for_ever()
    elif how == "c":
        sum(itertools.repeat(0))  # holds the GIL for ever
    elif how == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(1000)
    elif how == "stubborn":
        while True:
            try:
                time.sleep(1000)
            except KeyboardInterrupt:
                print("no", flush=True)
    return rank


def hang_each(ways: list[str]) -> int:
    """Hang as :func:`hang` does, each rank in its own of these ways."""
    return hang(ways[int(os.environ["RANK"])])


def anomaly() -> str:
    """Return what torch's anomaly mode says about a backward pass that fails."""
    import warnings

    import torch

    from hydrogen_magic.node.worker.observe import anomalies

    anomalies.attach(torch.fx.traceback)
    with (
        warnings.catch_warnings(record=True) as found,
        suppress(RuntimeError),
        torch.autograd.detect_anomaly(),
    ):
        torch.tensor([-1.0], requires_grad=True).sqrt().sum().backward()
    return str(found[-1].message)


def clean_up_on_stop(marker: str) -> None:
    try:
        print("ready", flush=True)
        time.sleep(1000)
    finally:
        time.sleep(0.5)
        Path(f"{marker}-{os.environ['RANK']}").write_text("saved")


def one_collective_more(others_go_on_s: float) -> None:
    """Ranks disagree about how many collectives there are: rank 0 enters one more."""
    if meet(timeout_s=10) != 0:
        time.sleep(others_go_on_s)
    else:
        all_reduce()


class SlowToSayError(Exception):
    """Its message takes a while."""

    def __str__(self) -> str:
        time.sleep(2)
        return "said at last"


def fail_together(begun: str, end: str) -> None:
    """Both ranks raise, and the gang is ended while the message of rank 0 is computed.

    Rank 0 raises first; it creates the file ``begun``.
    """
    if os.environ["RANK"] == "0":
        Path(begun).touch()
        raise SlowToSayError
    while not Path(begun).exists():
        time.sleep(0.01)
    raise ValueError(f"bad batch {'x' * 1_000_000} {end}")


def family(dl_workers: int, stuck: bool) -> None:
    """A rank as users have them: DataLoader workers, and a helper in a session of its own."""
    import torch

    if is_horovods():
        meet()  # its threads are there when the workers are forked

    class Data(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> int:
            if stuck and index > 50:
                time.sleep(1000)
            return index

    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=dl_workers)
    for batch in loader:
        print("batch", int(batch[0]), flush=True)
        time.sleep(0.01)


def many_children(count: int) -> None:
    for _ in range(count):
        subprocess.Popen(["sleep", "1000"])
    print("forked", count, flush=True)
    time.sleep(1000)


def scheduling() -> int:
    """Return the policy by which the main thread is scheduled."""
    return os.sched_getscheduler(0)
