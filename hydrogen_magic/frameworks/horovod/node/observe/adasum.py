"""Adasum without MPI, which Horovod's own requires and a gang does not use.

Every rank gathers the gradients of all ranks and combines them itself, tensor by tensor, in the same tree
of pairs as Horovod's own algorithm. The traffic is that of an allgather of the gradients; Horovod's own has
that of an allreduce. The rule: Maleki et al., "Scaling Distributed Training with Adaptive Summation", and
``horovod/common/ops/adasum/adasum.h`` of Horovod 0.28.1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.node.wrapping import wraps

_NOTHING = math.sqrt(sys.float_info.min)
"""Squared norms below it have no direction."""


@dataclass(frozen=True)
class _Pending:
    """The completion of an asynchronous allgather."""

    outputs: tuple[Any, ...]
    postscale: float
    is_group: bool


def attach(ops: Any, replace: Callable[[Any, Callable[..., Any]], None]) -> None:
    """Implement ``op=hvd.Adasum`` here if it is missing; ``ops`` is ``horovod.torch.mpi_ops``.

    ``replace``: installs a wrapped function wherever Horovod has the original.
    """
    pending: dict[int, _Pending] = {}

    def begin(
        tensors: Sequence[Any],
        outputs: Sequence[Any],
        name: str | None,
        scales: Sequence[float],
        is_group: bool,
    ) -> int:
        import torch

        flat = torch.cat([tensor.detach().reshape(1, -1) for tensor in tensors], 1) * scales[0]
        label = None if name is None else f"adasum.{name}"
        handle: int = ops.allgather_async(flat, name=label)
        pending[handle] = _Pending(tuple(outputs), scales[1], is_group)
        return handle

    def wrapped(original: Callable[..., int], is_group: bool) -> Callable[..., int]:
        @wraps(original)
        def allreduce_async(
            tensor: Any, output: Any, name: Any, op: Any, prescale: Any, postscale: Any, ranks: Any
        ) -> int:
            if op != ops.Adasum or ops.mpi_enabled():
                return original(tensor, output, name, op, prescale, postscale, ranks)
            _check(ops, ranks)
            tensors, outputs = (tensor, output) if is_group else ([tensor], [output])
            return begin(tensors, outputs, name, (prescale, postscale), is_group)

        return allreduce_async

    original_wait = ops.synchronize

    @wraps(original_wait)
    def synchronize(handle: Any) -> Any:
        one = pending.pop(handle, None) if pending else None
        found = original_wait(handle)
        return found if one is None else _finish(one, found)

    replace(ops._allreduce_async, wrapped(ops._allreduce_async, is_group=False))
    replace(ops._grouped_allreduce_async, wrapped(ops._grouped_allreduce_async, is_group=True))
    replace(original_wait, synchronize)


def _check(ops: Any, ranks: Any) -> None:
    """Raise Horovod's own errors, with its texts."""
    if ranks != ops.global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if ops.size() & (ops.size() - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


def _finish(one: _Pending, gathered: Any) -> Any:
    """Fill the outputs from all ranks' tensors, one row for each rank; return them."""
    parts = gathered.split([output.numel() for output in one.outputs], 1)
    for output, part in zip(one.outputs, parts, strict=True):
        output.detach().copy_(_combined(list(part)).mul(one.postscale).view_as(output))
    return one.outputs if one.is_group else one.outputs[0]


def _combined(rows: list[Any]) -> Any:
    while len(rows) > 1:
        rows = [_sum(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def _sum(a: Any, b: Any) -> Any:
    """Return ``a + b`` without counting their common direction twice."""
    in_full_a, in_full_b = a.double(), b.double()
    dot = float(in_full_a.dot(in_full_b))
    squares = float(in_full_a.dot(in_full_a)), float(in_full_b.dot(in_full_b))
    of_a, of_b = (1 - dot / square / 2 if square >= _NOTHING else 1.0 for square in squares)
    return (of_a * in_full_a + of_b * in_full_b).to(a.dtype)
