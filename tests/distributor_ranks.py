"""What tests of ``TorchDistributor`` run on ranks. A plain local module: it travels whole."""

from __future__ import annotations

import os
from typing import Any

from tests import ranks


def train(learning_rate: float, *batch_sizes: int, **options: Any) -> tuple[Any, ...]:
    """What a rank was given, and what it is."""
    ranks.meet()
    place = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return learning_rate, batch_sizes, options, place


def fail_on_rank_1() -> None:
    if ranks.meet() == 1:
        raise ValueError("bad batch 17")
    ranks.all_reduce_for_ever()


def gathered_environment(name: str) -> list[Any]:
    """An environment variable of every rank beside its LOCAL_RANK."""
    import torch.distributed as dist

    ranks.meet()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (os.environ["LOCAL_RANK"], os.environ.get(name)))
    return everyone


ADD_ONE = lambda x: x + 1  # noqa: E731, as users write it
