"""Observer of Horovod's collectives, like that of torch's: shows in which one a rank waits.

Only waiting calls are wrapped. Those ending in ``_async`` return at once, and ``synchronize`` waits for
them; an optimizer calls it for every tensor of a step, which is recorded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydrogen_magic.node.worker.observe.collectives import tracked_collective
from hydrogen_magic.node.worker.observe.optimizer import with_parts

NAMES = (
    "init",
    "shutdown",
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "broadcast_",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
    "barrier",
    "join",
    "synchronize",
    "add_process_set",
    "remove_process_set",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
)
"""What waits for other ranks, as ``horovod.torch`` has it."""
_JOINING = ("init", "shutdown")
"""Of these, the ones that exchange nothing of the training."""
_STEPPING = "broadcast_optimizer_state"
"""Initializes an optimizer's state by a step with gradients of zero, which is not a training step."""

_Replace = Callable[[Any, Callable[..., Any]], None]


def attach(module: Any, replace: _Replace) -> None:
    """Wrap waiting functions of ``module``, which is ``horovod.torch``, and of its optimizers.

    ``replace``: installs a wrapped function wherever Horovod has the original.
    """
    for name in NAMES:
        original = getattr(module, name, None)
        if original is not None:  # other versions lack some of them
            call = with_parts(original) if name == _STEPPING else original
            joining = {"joins_all": _joins_all} if name == "init" else {}
            tracked = tracked_collective(
                f"hvd.{name}", call, is_joining=name in _JOINING, **joining
            )
            replace(original, tracked)
    # Optimizers are made from this class's dictionary, when the user asks for one; and they step
    # by the optimizer that they were made of.
    optimizer = module.optimizer._DistributedOptimizer
    optimizer.synchronize = tracked_collective("hvd.synchronize", optimizer.synchronize)
    optimizer.step = with_parts(optimizer.step)


def _joins_all(*args: Any, **kwargs: Any) -> bool:
    """Return whether ``init`` with these arguments waits for all ranks: it has one that names some."""
    return not args and not kwargs
