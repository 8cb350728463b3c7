"""What ranks return in tests of results; imported by the ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np

import hydrogen_magic as hm


class Crashes:
    """Ends the process that pickles it."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError


def partly_unpicklable() -> Any:
    """On rank 1 nothing can be pickled."""
    if hm.rank() == 1:
        return threading.Lock()
    return [1, {"array": np.ones(3), "lock": threading.Lock()}]


def wrapped_optimizer() -> Any:
    """As Horovod wraps one: in a class of its name, made at run time in a module of an installed package."""
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.__class__ = type("SGD", (torch.optim.SGD,), {"__module__": "torch.optim.adam"})
    return optimizer


def failure_after_others(n_bytes: int) -> Any:
    """The last rank fails when the others have returned."""
    if hm.rank() == hm.world_size() - 1:
        time.sleep(1.0)
        raise ValueError("after the others")
    return np.full(n_bytes, hm.rank() + 1, np.uint8)


def returns_and_hangs() -> int:
    """The process does not exit after its result."""
    threading.Thread(target=threading.Event().wait, name="my-thread").start()
    return hm.rank()


def waits_for_a_file(data: Any, path: str) -> int:
    """Keep a captured array until the file is there."""
    while not os.path.exists(path):
        time.sleep(0.02)
    return len(data)


def sharded() -> Any:
    """Return tensors, models and an optimizer that are sharded over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (hm.world_size(),))
    split = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(new_model(), mesh, split)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    step(parallel, optimizer)
    fully = new_model()
    for _ in range(hm.rank()):  # hooks are numbered for each process
        fully.register_forward_hook(print).remove()
    fully_shard(fully[0])
    fully_shard(fully)
    step(fully, torch.optim.AdamW(fully.parameters(), lr=0.1))
    tensor = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])
    return {
        "parallel": parallel,
        "optimizer": optimizer,
        "fully": fully,
        "weights": fully.state_dict(),
        "tensor": [tensor],
    }


def new_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def step(model: Any, optimizer: Any) -> None:
    import torch

    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def sharded_tensor() -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (hm.world_size(),))
    return [distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0)])]


def sharded_on_rank_0_alone() -> Any:
    """The other ranks do not return their parts."""
    tensor = sharded_tensor()
    return tensor if hm.rank() == 0 else None


def sharded_and_left(*ranks: int) -> Any:
    """The process group of these ranks is gone when the results are collected."""
    import torch.distributed as dist

    tensor = sharded_tensor()
    if hm.rank() in ranks:
        dist.destroy_process_group()
    return tensor
