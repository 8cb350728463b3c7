"""A training by Horovod that tests watch. A plain local module: it travels with what it uses."""

from __future__ import annotations

import time
from pathlib import Path


def train(over: str, *, late_s: float = 0.0, own_timeline: str = "") -> int:
    """Train until the file ``over`` is there; return how many steps.

    Rank 1 begins every step ``late_s`` later than the others; with ``own_timeline`` rank 0 has one of
    its own.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    if own_timeline and hvd.rank() == 0:
        hvd.start_timeline(own_timeline)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    steps, is_over = 0, False
    while not is_over:
        if hvd.rank() == 1:
            time.sleep(late_s)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        steps += 1
        is_over = bool(hvd.allreduce(torch.tensor(float(Path(over).exists())), name="over") > 0.9)
    hvd.allreduce(torch.ones(1), name="the last one")
    return steps
