"""Keras on torch: exchanges by Horovod in its gangs, else by ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hydrogen_magic.node.worker import api


class TorchExchange:
    """What ranks that train by Keras exchange. Without other ranks there is nothing to exchange."""

    keeps_momentum_fixed = False
    """The optimizer's momentum is compiled into a step, and cannot be changed between steps."""

    def init(self) -> None:
        """Join the other ranks; no effect if this rank has joined."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(api.device())  # which ranks may share
        if _uses_horovod():
            _horovod().init()
        elif api.world_size() > 1 and not torch.distributed.is_initialized():
            _check_rendezvous()
            torch.distributed.init_process_group()

    def shutdown(self) -> None:
        """Leave the other ranks."""
        import torch.distributed as dist

        if _uses_horovod():
            _horovod().shutdown()
        elif dist.is_initialized():
            dist.destroy_process_group()

    def average_gradients(self, gradients: Sequence[Any]) -> None:
        """Replace each gradient by its mean over all ranks, which pass gradients of the same shapes."""
        import torch

        if api.world_size() == 1:
            return
        # Gradients have the strides of their variables, which for an orthogonal kernel are those of its
        # transpose: torch's `parameters_to_vector` refuses such tensors.
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            means = _mean(torch.cat([gradient.reshape(-1) for gradient in alike]))
            sizes = [gradient.numel() for gradient in alike]
            for gradient, mean in zip(alike, means.split(sizes), strict=True):
                gradient.copy_(mean.view(gradient.shape))

    def average(self, values: Sequence[float]) -> Sequence[float]:
        """Return the mean over all ranks of each number."""
        import keras
        import torch

        if api.world_size() == 1:
            return values
        device = keras.ops.zeros(()).device  # NCCL takes values on GPUs only
        means: list[float] = _mean(
            torch.tensor(values, dtype=torch.float64, device=device)
        ).tolist()
        return means

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        """Give variables of Keras the values of rank ``root_rank``."""
        if api.world_size() == 1:
            return
        for variable in variables:
            data = variable.value.data
            sent = data.contiguous()  # Horovod and NCCL take no other; `data` itself if it is
            if _uses_horovod():
                _horovod().broadcast_(sent, root_rank)
            else:
                import torch.distributed as dist

                dist.broadcast(sent, root_rank)
            if sent is not data:
                data.copy_(sent)

    def before_change(self, model: Any) -> None:
        """Prepare a change of the optimizer's variables while ``model`` is fitted.

        Here a step uses the variables themselves.
        """


def _mean(vector: Any) -> Any:
    if _uses_horovod():
        return _horovod().allreduce(vector, op=_horovod().Average)
    import torch.distributed as dist

    dist.all_reduce(vector)
    return vector / dist.get_world_size()


def _uses_horovod() -> bool:
    return "HOROVOD_RANK" in os.environ


def _horovod() -> Any:
    import horovod.torch

    return horovod.torch


def _check_rendezvous() -> None:
    if "MASTER_ADDR" not in os.environ:
        raise RuntimeError(
            "Keras uses torch, but the ranks cannot join by torch.distributed: use `--with torch` or "
            "`--with horovod`"
        )
