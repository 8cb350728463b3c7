"""Trainings that tests watch. A plain local module: it travels with what it uses."""

from __future__ import annotations

import os
import time
from pathlib import Path


def train(over: str, *, leave_steps: int = 0) -> int:
    """Train DDP on every rank until the file ``over`` is there, then for some steps; return how many."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
    measure = torch.nn.MSELoss()
    steps = left = 0
    while left <= leave_steps:
        for x, y in torch.utils.data.DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            loss = measure(model(x), y)
            loss.backward()
            optimizer.step()
            steps += 1
        torch.save(layers.state_dict(), os.devnull)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        is_over = torch.tensor(float(Path(over).exists()))
        dist.all_reduce(is_over)
        left += bool(is_over)
    return steps


def train_unevenly(n_steps: int) -> None:
    """Train DDP, rank 1 slower than rank 0; then once more with a communication hook of one's own."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    import hydrogen_magic as hm

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02 * dist.get_rank())
            return gradient

    def steps(model: torch.nn.Module) -> None:
        for _ in range(n_steps):
            Slow.apply(model(torch.ones(2, 8))).sum().backward()

    dist.init_process_group("gloo")
    with hm.span("plain"):
        steps(DistributedDataParallel(torch.nn.Linear(8, 8)))
    hooked = DistributedDataParallel(torch.nn.Linear(8, 8))
    hooked.register_comm_hook(None, allreduce_hook)
    with hm.span("hooked"):
        steps(hooked)


def wait_for(over: str) -> None:
    """Do nothing that is a step until the file ``over`` is there; torch is imported."""
    import torch

    assert torch.ones(1).item() == 1
    while not Path(over).exists():
        time.sleep(0.01)


def block(over: str) -> None:
    """Have rank 1 wait in a collective that rank 0 never joins."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        while not Path(over).exists():
            time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
