"""What the tests of HorovodRunner run on ranks: a plain local module that travels."""

from __future__ import annotations

import os
from typing import Any

from hydrogen_magic.compat import log_to_driver

VERBS = ("printed", "told")
VARIABLES = ("NCCL_DEBUG", "TZ")


def talk(**options: Any) -> tuple[list[int], int, dict[str, Any]]:
    """Print and tell; return every rank, this process and what was given."""
    import horovod.torch as hvd

    hvd.init()
    say(hvd.rank())
    return hvd.allgather_object(hvd.rank()), os.getpid(), options


def say(rank: int) -> None:
    print(f"printed by {rank}")
    log_to_driver(f"told by {rank}")


def settings(secret: str) -> dict[str, str | None]:
    """Use Horovod, print and tell; return settings of libraries."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1), name="seen")
    print(f"secret is {secret}")
    say(hvd.rank())
    hvd.shutdown()
    return {name: os.environ.get(name) for name in VARIABLES}


def take_three_steps() -> None:
    """Step an optimizer of Horovod's, which steps by the one that it was made of."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).backward()
        optimizer.step()


def tell_much() -> None:
    log_to_driver("x" * 5000 + " by nobody")
    log_to_driver("two\nlines by me")
