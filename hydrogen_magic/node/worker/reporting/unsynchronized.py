"""Detects ranks that train on their own: optimizer steps without communication between ranks.

Every rank then has its own model, and nothing fails. The process groups count their collectives, including
those of C++ code such as DDP's; calls of other libraries are counted by their observers.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hydrogen_magic.core.library_types import derives_from, loaded
from hydrogen_magic.core.units import counted

_STEPS = 10
"""Steps without any collective before it is reported; fewer at the end of the cell."""
_STEPS_SINCE = 100
"""The same where there were some before: methods such as local SGD average every few dozen steps."""
_FEW_STEPS = 2
"""Steps of an optimizer that do not show whether its gradients are averaged."""
_BYPASSED = "call the DistributedDataParallel model, not the module inside it"
_NOT_SYNCED = f"{_BYPASSED}, and outside of no_sync() for the last backward pass before each step"


class ExchangeCounter:
    """One rank's communication with others. Only ``warning`` is not called by the user's thread."""

    def __init__(self, rank: int) -> None:
        self.rendezvous = "torch"
        """Name of the gang's rendezvous."""
        self.join_advice = ""
        """What code has to do to join the other ranks; empty for ``torch.distributed``."""
        self._is_decided = rank != 0  # one rank reports it for all
        self._calls = 0
        self._past = 0
        """Number of collectives of destroyed process groups."""
        self._first: tuple[int, int | None] | None = None
        """Steps and collectives at the time of the first steps; None if they are not counted."""
        self._optimizer: Callable[[], Any] = lambda: None
        """A weak reference to the optimizer of the first step."""
        self._own_steps = 0
        """Steps of that optimizer."""
        self._of_ddp: str | None = None
        """What :func:`_remedy_of_ddp` has returned for it, None before the models were looked at."""

    def add_call(self) -> None:
        """Count a collective that is called from Python and exchanges data."""
        self._calls += 1

    def note_step(self, optimizer: Any) -> None:
        """Note that ``optimizer``, one of torch, has taken a step, before the step is counted."""
        if self._first is None and not self._is_decided:
            self._optimizer = weakref.ref(optimizer)
            self._first = 1, self._exchanged()
        self._own_steps += optimizer is self._optimizer()

    def keep_counts(self) -> None:
        """Keep the counts of the process groups, which are about to be destroyed."""
        self._past += sum(filter(None, _counts()))

    def warning(self, steps: int, *, is_over: bool) -> str:
        """Return a warning if a rank took ``steps`` steps on its own, otherwise an empty text."""
        if self._is_decided or not steps:
            return ""
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        exchanged = self._exchanged()
        first_steps, first_exchanged = self._first = self._first or (steps, exchanged)
        if (
            world_size < 2
            or exchanged is None
            or first_exchanged is None
            or exchanged > first_exchanged
        ):
            self._is_decided = True
            return ""
        alone = steps - first_steps if exchanged else steps
        is_long = alone >= (_STEPS_SINCE if exchanged else _STEPS)
        if alone >= _STEPS or is_over:
            self._look_at_models()
        if self._is_decided or not (is_long or is_over):
            return ""
        self._is_decided = True
        # In fewer steps, the model of another optimizer may be one that the ranks do not share.
        is_own = bool(self._of_ddp) and self._own_steps > _FEW_STEPS
        if not (is_long or (is_own if exchanged else alone > 0)):
            return ""
        of_keras = "" if self._own_steps else _remedy_of_keras()
        remedy = of_keras or self.join_advice or self._of_ddp or _remedy()
        return (
            f"{counted(alone, 'optimizer step')} without any collective: each of "
            f"the {world_size} ranks trains its own model. To train one model, {remedy}"
        )

    def _look_at_models(self) -> None:
        """Look at the models of this process once: at the end of the cell they may be gone."""
        if self._of_ddp is None:
            self._of_ddp = _remedy_of_ddp(self._optimizer())
            self._is_decided = _averages_by_lost_group()

    def is_data_parallel(self) -> bool:
        """Return whether DDP averages the gradients of the optimizer among all ranks, and has done so.

        False with Accelerate, which gives each rank its share of the data.
        """
        if _uses_accelerate():
            return False
        first, now = self._first, self._exchanged()
        if first is None or first[1] is None or now is None or now <= first[1]:
            return False
        model = _ddp_of(self._optimizer())
        return model is not None and model.process_group.size() == int(os.environ["WORLD_SIZE"])

    def _exchanged(self) -> int | None:
        counts = list(_counts())
        return None if None in counts else self._calls + self._past + sum(filter(None, counts))


def _counts() -> Iterator[int | None]:
    """Yield how many collectives each process group has begun; None for a backend without a count."""
    for group in _groups():
        try:
            yield int(group._get_sequence_number_for_group())
        except Exception:  # a backend may raise anything
            yield None


def _averages_by_lost_group() -> bool:
    """Return whether a model may average gradients by a group that was destroyed, which is not counted."""
    groups = _groups()
    return any(
        model.process_group not in groups
        for model in _objects("torch.nn.parallel", "DistributedDataParallel")
    )


def _groups() -> list[Any]:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return list(getattr(getattr(c10d, "_world", None), "pg_map", ()))


def _objects(module: str, name: str) -> list[Any]:
    """Return the objects of a library's class in this process."""
    return [found for found in gc.get_objects() if derives_from(type(found), module, name)]


def _remedy_of_ddp(optimizer: Any) -> str:
    """Return how to have DDP average the gradients of ``optimizer``; "" without a model that would.

    A model with a hook may leave out collectives: post-local SGD does. ``no_sync`` is also how local SGD
    takes its steps.
    """
    model = _ddp_of(optimizer)
    if model is None or getattr(model, "_comm_hooks", None) or model.process_group.size() < 2:
        return ""
    return _BYPASSED if model.require_forward_param_sync else _NOT_SYNCED


def _ddp_of(optimizer: Any) -> Any:
    """Return the DDP model with parameters of ``optimizer``, None without one."""
    own = {id(each) for group in getattr(optimizer, "param_groups", ()) for each in group["params"]}
    models = _objects("torch.nn.parallel", "DistributedDataParallel")
    return next((model for model in models if any(id(p) in own for p in model.parameters())), None)


def _uses_accelerate() -> bool:
    accelerate = loaded("accelerate.state", "PartialState")
    return accelerate is not None and bool(accelerate._shared_state)


def _remedy_of_keras() -> str:
    """Return how a compiled model of Keras 3 averages gradients; "" without one, or with TensorFlow."""
    if not any(getattr(model, "compiled", False) for model in _objects("keras", "Model")):
        return ""
    if sys.modules["keras"].config.backend() not in ("torch", "jax"):
        return ""
    return (
        "`import hydrogen_magic.compat.keras as hvd`, call hvd.init(), and compile the model with "
        "hvd.DistributedOptimizer(optimizer)"
    )


def _remedy() -> str:
    if _uses_accelerate():
        return "write Accelerator(cpu=True), or TrainingArguments(…, use_cpu=True), inside the cell"
    if any(_objects(module, "Trainer") for module in ("lightning.pytorch", "pytorch_lightning")):
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        n_nodes = int(os.environ.get("WORLD_SIZE", 1)) // local_size
        return f"create the Trainer inside the cell, with devices={local_size}, num_nodes={n_nodes}"
    return "call init_process_group() and wrap the model in DistributedDataParallel or FSDP"
