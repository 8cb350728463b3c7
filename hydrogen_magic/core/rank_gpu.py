"""torch's name of the GPU on which this rank computes, and the remedy for code that needs one in vain."""

from __future__ import annotations

import os
import re
import sys

_NEEDS_GPU = re.compile(
    r"'torch\._C' has no attribute '_cuda_setDevice'|Torch not compiled with CUDA enabled"
    r"|have NCCL built in|does not match the current compilation's accelerator"
    r"|Found no NVIDIA driver|No (CUDA|HIP) GPUs are available|only supported with GPUs, no GPUs found"
)
"""Messages of torch."""


def gpu_of_rank() -> str:
    """Return torch's name of the GPU that this rank computes on, ``cuda:1``.

    If there are fewer GPUs than ranks, ranks share them in turn.
    """
    import torch

    if chosen := os.environ.get("HYDROGEN_MAGIC_DEVICE"):  # if other GPUs cannot be hidden
        return chosen
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.cuda.device_count())}"


def gpu_note(message: str) -> str | None:
    """Return the remedy for an error with this message that is due to the lack of a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not _NEEDS_GPU.search(message) or torch.cuda.is_available():
        return None
    return (
        "torch finds no GPU on this rank: use the device hm.device(), and call init_process_group() "
        "without a backend"
    )
