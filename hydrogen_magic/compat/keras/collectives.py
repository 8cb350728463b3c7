"""The exchanges of ranks that train by Keras: by Horovod in its gangs, else by ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hydrogen_magic.node.worker import api

__all__ = ["average", "broadcast", "init", "shutdown"]


def init() -> None:
    """Join the other ranks; does nothing in a plain process, or if this rank has joined.

    Keras uses this rank's own GPU afterwards, if it has one. Raises RuntimeError if Keras uses another
    backend than torch.
    """
    import keras
    import torch

    if keras.config.backend() != "torch":
        raise RuntimeError(
            f"Keras uses the backend {keras.config.backend()!r} here, but hydrogen_magic.compat.keras "
            "needs torch: set KERAS_BACKEND=torch, such as by `--env KERAS_BACKEND=torch`, before "
            "Keras is imported"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(api.local_rank())
    if _uses_horovod():
        _horovod().init()
    elif _is_joinable():
        torch.distributed.init_process_group()


def shutdown() -> None:
    """Leave the other ranks."""
    import torch.distributed as dist

    if _uses_horovod():
        _horovod().shutdown()
    elif dist.is_initialized():
        dist.destroy_process_group()


def average(tensors: Sequence[Any]) -> None:
    """Replace each tensor by its mean over all ranks. Every rank passes tensors of the same shapes."""
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    if api.world_size() == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        vector_to_parameters(_mean(parameters_to_vector(alike)), alike)


def _mean(vector: Any) -> Any:
    if _uses_horovod():
        return _horovod().allreduce(vector, op=_horovod().Average)
    import torch.distributed as dist

    dist.all_reduce(vector)
    return vector / dist.get_world_size()


def broadcast(tensors: Sequence[Any], root_rank: int) -> None:
    """Replace each tensor by that of rank ``root_rank``."""
    if api.world_size() == 1:
        return
    for tensor in tensors:
        if _uses_horovod():
            _horovod().broadcast_(tensor, root_rank)
        else:
            import torch.distributed as dist

            dist.broadcast(tensor, root_rank)


def _uses_horovod() -> bool:
    return "HOROVOD_RANK" in os.environ


def _horovod() -> Any:
    import horovod.torch

    return horovod.torch


def _is_joinable() -> bool:
    import torch.distributed as dist

    return "MASTER_ADDR" in os.environ and not dist.is_initialized()
