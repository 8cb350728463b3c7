"""``gpu_of_rank``: torch's name of the GPU on which this rank computes."""

from __future__ import annotations

import os


def gpu_of_rank() -> str:
    """Return torch's name of the GPU that this rank computes on, ``cuda:1``.

    If there are fewer GPUs than ranks, ranks share them in turn.
    """
    import torch

    if chosen := os.environ.get("HYDROGEN_MAGIC_DEVICE"):  # if other GPUs cannot be hidden
        return chosen
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.cuda.device_count())}"
