"""Detects ranks that train on their own: optimizer steps without communication between ranks.

Every rank then has its own model, and nothing fails. The process groups count their collectives, including
those of C++ code such as DDP's; calls of other libraries are counted by their observers.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

from hydrogen_magic.core.library_types import derives_from, loaded
from hydrogen_magic.core.units import counted

_STEPS = 10
"""Steps without any collective before it is reported; fewer at the end of the cell."""
_STEPS_SINCE = 100
"""The same where there were some before: methods such as local SGD average every few dozen steps."""


class ExchangeCounter:
    """One rank's communication with others. The user's thread calls ``add_call`` and ``keep_counts``."""

    def __init__(self, rank: int) -> None:
        self.rendezvous = "torch"
        """Name of the gang's rendezvous."""
        self.join_advice = ""
        """What code has to do to join the other ranks; empty for ``torch.distributed``."""
        self._is_decided = rank != 0  # one rank reports it for all
        self._calls = 0
        self._past = 0
        """Number of collectives of destroyed process groups."""
        self._first: tuple[int, int] | None = None
        """Steps and collectives at the time of the first steps."""

    def add_call(self) -> None:
        """Count a collective that is called from Python and exchanges data."""
        self._calls += 1

    def keep_counts(self) -> None:
        """Keep the counts of the process groups, which are about to be destroyed."""
        self._past += sum(filter(None, _counts()))

    def warning(self, steps: int, *, is_over: bool) -> str:
        """Return a warning if a rank took ``steps`` steps on its own, otherwise an empty text."""
        if self._is_decided or not steps:
            return ""
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        counts = list(_counts())
        if None in counts:
            self._is_decided = True
            return ""
        exchanged = self._calls + self._past + sum(filter(None, counts))
        first_steps, first_exchanged = self._first = self._first or (steps, exchanged)
        if world_size < 2 or exchanged > first_exchanged:
            self._is_decided = True
            return ""
        alone = steps - first_steps if exchanged else steps
        if alone < (_STEPS_SINCE if exchanged else _STEPS) and not (is_over and not exchanged):
            return ""
        self._is_decided = True
        if _averages_by_lost_group():
            return ""
        remedy = self.join_advice or _remedy()
        return (
            f"{counted(alone, 'optimizer step')} without any collective: each of "
            f"the {world_size} ranks trains its own model. To train one model, {remedy}"
        )


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


def _remedy() -> str:
    accelerate = loaded("accelerate.state", "PartialState")
    if accelerate is not None and accelerate._shared_state:
        return "write Accelerator(cpu=True), or TrainingArguments(…, use_cpu=True), inside the cell"
    if any(_objects(module, "Trainer") for module in ("lightning.pytorch", "pytorch_lightning")):
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        n_nodes = int(os.environ.get("WORLD_SIZE", 1)) // local_size
        return f"create the Trainer inside the cell, with devices={local_size}, num_nodes={n_nodes}"
    return "call init_process_group() and wrap the model in DistributedDataParallel or FSDP"
