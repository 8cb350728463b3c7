"""Tensors of which a rank may hold only a part, although nothing in them shows that.

FSDP1 and DeepSpeed's ZeRO keep a rank's part of an optimizer's state in ordinary tensors, also in its
``state_dict()``: only the optimizer shows that they are parts. ZeRO stage 3 leaves a module's parameters, and
the tensors of its ``state_dict()``, empty.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.core.library_types import loaded
from hydrogen_magic.node.worker import api
from hydrogen_magic.serialization.object_paths import describe, path_to

FSDP_STATES = (
    "call `get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))` of "
    "torch.distributed.checkpoint.state_dict on all ranks, and bring back its result"
)
_ZERO_OPTIMIZERS = (
    ("deepspeed.runtime.base_optimizer", "ZeROOptimizer"),
    ("deepspeed.runtime", "ZeROOptimizer"),  # before 0.17
)


@dataclass(frozen=True)
class Sharding:
    """How a library divides the states of optimizers among ranks."""

    why: str
    """Why a tensor cannot leave its rank."""
    to_return: str
    """The code that brings back what was divided."""
    to_save: str
    """The code that saves it."""


FSDP1 = Sharding(
    "FSDP has flattened it, and a rank may hold a part of it",
    FSDP_STATES,
    "call `get_state_dict(model, opt)` of torch.distributed.checkpoint.state_dict on all ranks, and save its "
    "result on all ranks",
)
_SAVE_INSTEAD = "call `engine.save_checkpoint(folder)` on all ranks instead"
ZERO = Sharding(
    "DeepSpeed's ZeRO divides the optimizer's state, and every rank holds a part of it",
    "call `engine.save_checkpoint(folder)` on all ranks, which saves all parts",
    _SAVE_INSTEAD,
)
GATHERED = (
    "copy it on all ranks inside of `with deepspeed.zero.GatheredParameters([*model.parameters()]):`"
    ", for example `state = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}`"
    ", and bring back the copy"
)
ZERO_3 = Sharding(
    "it is empty, as parameters that DeepSpeed's ZeRO stage 3 has partitioned are",
    GATHERED,
    _SAVE_INSTEAD,
)
SHARDED = Sharding(
    "it is sharded, and the parts of other ranks are saved only for tensors in dicts",
    "call `.full_tensor()` on all ranks, and bring back its result",
    'pass a dict of state dicts on all ranks, such as {"model": model.state_dict()}',
)


@dataclass(frozen=True)
class RankPart:
    tensor: Any
    """It is held, so that no other tensor gets its memory meanwhile."""
    sharding: Sharding


def of_process() -> dict[int, RankPart]:
    """Return the parts that this process holds, by the addresses of their memory.

    The address 0 stands for parameters that ZeRO stage 3 has emptied, if there are any.

    If a library is imported, all objects are looked at, which takes a tenth of a second. Optimizers that
    existed when the cell called ``gc.freeze()`` are not found.
    """
    fsdp, zero = loaded("torch.distributed.fsdp", "FullyShardedDataParallel"), _zero_optimizer()
    objects = gc.get_objects() if fsdp or zero else []
    kinds = {each for kind in {*map(type, objects)} for each in kind.__mro__}
    found: list[RankPart] = []
    if fsdp in kinds:  # otherwise it was imported, no more
        found += _flattened(objects)
    if zero in kinds:
        found += _partitioned(objects, zero)
    parts = {_address(part.tensor): part for part in found if _address(part.tensor)}
    parameter = (
        next((each for each in objects if _is_emptied(each)), None) if zero in kinds else None
    )
    return parts if parameter is None else {**parts, 0: RankPart(parameter, ZERO_3)}


def part_of(tensor: Any, parts: Mapping[int, RankPart]) -> RankPart | None:
    """Return the part that ``tensor`` is, or is a view of; None if it is none."""
    if not parts:
        return None
    address = _address(tensor)
    return parts.get(address) if address or _is_empty(tensor) else None


def refuse_parts(state: Any, tensors: Iterable[Any]) -> None:
    """Raise TypeError if one of the ``tensors`` in ``state`` is a part, which all ranks would load."""
    is_alone = api.world_size() == 1
    parts, kinds = ({}, ()) if is_alone else (of_process(), sharded_classes())
    for tensor in tensors if parts or kinds else ():
        part = RankPart(tensor, SHARDED) if isinstance(tensor, kinds) else part_of(tensor, parts)
        if part is not None:
            path = path_to("state", state, tensor)
            what = (
                f"`{path}` ({describe(tensor)})" if path else f"a {describe(tensor)} in the state"
            )
            raise TypeError(f"{what} cannot be saved: {part.sharding.why}; {part.sharding.to_save}")


def is_flattened(parameter: Any) -> bool:
    """Return whether FSDP1 has made this parameter of several, or cut it."""
    return bool(
        getattr(parameter, "_fsdp_flattened", False) or getattr(parameter, "_is_flat_param", False)
    )


def _is_emptied(obj: Any) -> bool:
    """Whether it is a parameter that ZeRO stage 3 has partitioned, and has not gathered now."""
    kind = loaded("torch.nn", "Parameter")
    return issubclass(type(obj), kind) and hasattr(obj, "ds_id") and _is_empty(obj)


def _is_empty(tensor: Any) -> bool:
    return tuple(getattr(tensor, "shape", ())) == (0,)  # tensor-like objects may have none


def dtensor_class() -> Any:
    """Return the class of sharded tensors if its module is imported."""
    return loaded("torch.distributed.tensor", "DTensor")


def sharded_classes() -> tuple[Any, ...]:
    """Return the classes of sharded tensors whose modules are imported: also that of FSDP1."""
    of_fsdp1 = loaded("torch.distributed._shard.sharded_tensor", "ShardedTensor")
    return tuple(filter(None, (dtensor_class(), of_fsdp1)))


def _zero_optimizer() -> Any:
    if api.world_size() == 1:  # its part is all
        return None
    return next(filter(None, (loaded(*each) for each in _ZERO_OPTIMIZERS)), None)


def _flattened(objects: Iterable[Any]) -> Iterator[RankPart]:
    kind = sys.modules["torch"].optim.Optimizer
    for optimizer in (each for each in objects if issubclass(type(each), kind)):
        for parameter, state in vars(optimizer).get("state", {}).items():
            if is_flattened(parameter):
                yield from (RankPart(tensor, FSDP1) for tensor in _tensors(state))


def _partitioned(objects: Iterable[Any], zero: type[Any]) -> Iterator[RankPart]:
    for optimizer in (each for each in objects if issubclass(type(each), zero)):
        inner = getattr(optimizer, "optimizer", None)  # whose parameters are parts, too
        weights = [dict(enumerate(one["params"])) for one in getattr(inner, "param_groups", ())]
        for state in (*getattr(inner, "state", {}).values(), *weights):
            yield from (RankPart(tensor, ZERO) for tensor in _tensors(state))


def _tensors(state: Any) -> list[Any]:
    """Return the tensors of a parameter's state that have elements of the parameter."""
    values = state.values() if isinstance(state, dict) else ()
    torch = sys.modules["torch"]
    return [each for each in values if torch.is_tensor(each) and each.dim() > 0]


def _address(tensor: Any) -> int:
    """Return where the tensor's memory begins; 0 if it has none that is known."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (AttributeError, NotImplementedError, RuntimeError):  # of a subclass, or freed
        return 0
