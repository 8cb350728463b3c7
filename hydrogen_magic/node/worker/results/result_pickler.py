"""Pickling of results: objects of the notebook by name, objects that the cell defined by value.

Objects that are bound to the process group of the ranks become ordinary ones, or are refused with the code
that brings back their contents.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from hydrogen_magic.core.library_types import derives_from, is_a, loaded
from hydrogen_magic.node.worker.results.rank_parts import (
    FSDP1,
    FSDP_STATES,
    GATHERED,
    RankPart,
    Sharding,
    dtensor_class,
    is_flattened,
    part_of,
)
from hydrogen_magic.serialization.bindings import Binding
from hydrogen_magic.serialization.identity import numbered
from hydrogen_magic.serialization.importable import find, is_main, resolve
from hydrogen_magic.serialization.instances import itself, restore_object
from hydrogen_magic.serialization.library_objects.jax_arrays import reduce_stand_in
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.serialization.pickling_errors import RefusedError, refuse
from hydrogen_magic.serialization.result_stream import CELL_VALUE
from hydrogen_magic.serialization.tolerant_unpickling import MissingObject

_STATE_OF_SHARDING = (
    *("__composable_api_state_key", "_is_fsdp_managed", "_fsdp_"),
    "_is_accelerate_prepared",  # Accelerate would not prepare such a module again
)
"""Attributes that ``fully_shard`` and related functions add to modules (torch 2.6 to 2.13)."""
_MIXED_PRECISION = ("accelerate.utils.operations", "ConvertOutputsToFp32")
_ADDERS_OF_HOOKS = ("torch.distributed.", "deepspeed.")
"""Modules that add hooks to a model, for as long as it is trained on several ranks."""
_STATE_OF_ZERO = frozenset(
    (
        "_dp_group",
        "_hp_mapping",
        "_index_in_param_group",
        "get_full_hp_grad",
        "get_full_hp_param",
        "grad_accum",
        "load_hp_checkpoint_state",
        "param_idx_in_group",
        "set_full_hp_grad",
        "set_full_hp_param",
    )
)
"""Attributes that DeepSpeed's ZeRO stages 1 and 2 add to parameters (0.19)."""
DATA_PARALLEL = ("torch.nn.parallel", "DistributedDataParallel")
"""Module and name of the wrapper that results leave out."""
_REFUSED = (
    (
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
        "every rank holds a part of its parameters",
        FSDP_STATES.replace("get_state_dict(model, opt", "get_model_state_dict(model"),
    ),
    (
        ("torch.distributed.optim", "ZeroRedundancyOptimizer"),
        "every rank holds a part of its state",
        "call `opt.consolidate_state_dict()` on all ranks, and bring back `opt.state_dict()` of rank 0",
    ),
    (
        ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),  # of FSDP1
        "every rank holds a part of it",
        FSDP_STATES,
    ),
)
"""Classes, why their objects are not brought back, and the remedy."""


class ResultPickler(Pickler):
    """Pickles the results of a rank.

    ``shared``: functions, classes and other globals that the notebook also has, by its names. ``originals``:
    ``id`` of an object of the notebook -> its number, and the object.
    """

    current = CELL_VALUE
    """Name of the result being pickled."""

    full_tensors: Mapping[int, Any] = types.MappingProxyType({})
    """``id`` of a DTensor -> the full tensor that replaces it."""
    on_unwrapped: Callable[[str, str], None] = staticmethod(lambda name, what: None)
    """Called with the name of a result, and the name of a wrapper that is left out of it."""
    left_out: Mapping[int, MissingObject] = types.MappingProxyType({})
    """``id`` of an object -> its replacement."""
    parts: Callable[[], Mapping[int, RankPart]] = dict
    """:func:`~hydrogen_magic.node.worker.results.rank_parts.of_process`, or a cache of it: it looks at all
    objects of the process."""

    def __init__(
        self, *args: Any, shared: Mapping[str, Any], originals: Mapping[int, tuple[int, Any]]
    ) -> None:
        super().__init__(*args)
        self._originals = originals
        self._names = {id(obj): name for name, obj in shared.items()}
        self._module_class = loaded("torch.nn", "Module") if _is_distributed() else None
        self._optimizer_class = loaded("torch.optim", "Optimizer")
        self._add_distributed_handlers()

    def release(self) -> None:
        super().release()
        self._originals, self.full_tensors, self.left_out, self.parts = {}, {}, {}, dict

    def _add_distributed_handlers(self) -> None:
        fsdp = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
        tensor = dtensor_class()
        is_divided = fsdp is not None or "deepspeed" in sys.modules
        self._divided_class = loaded("torch", "Tensor") if is_divided else None
        if is_divided:
            self.handlers[loaded("torch.nn", "Parameter")] = _reduce_parameter
        if tensor is not None:
            self.handlers[tensor] = self._reduce_sharded

    def handler_of(self, kind: type) -> Callable[[Any], Any] | None:
        if derives_from(kind, *DATA_PARALLEL):
            return self._reduce_data_parallel
        for place, why, remedy in _REFUSED:
            if derives_from(kind, *place):
                return functools.partial(refuse, why=why, remedy=remedy)
        return super().handler_of(kind)

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self.left_out:
            lost = self.left_out[id(obj)]
            return MissingObject, (lost.type, lost.reason)
        if type(obj) is self._divided_class and (part := part_of(obj, self.parts())) is not None:
            self.last = obj
            _refuse_sharding(obj, part.sharding)
        if isinstance(obj, (type, types.FunctionType)) and (name := self._kernels_name(obj)):
            self.last = obj
            return resolve, ("__main__", name)
        original = self._originals.get(id(obj)) if self.current != CELL_VALUE else None
        reduced = self._reduce(obj)
        if original is None:
            return reduced
        return numbered(original[0], obj, reduced)

    def binding(self, obj: Any, name: str) -> Binding:
        """Leave the notebook's names alone; a class that the rank has defined can go back by its name."""
        is_ranks = isinstance(obj, type) and find("__main__", name) is obj
        return Binding("", is_writers=is_ranks)

    def _reduce(self, obj: Any) -> Any:
        kind = type(obj)
        is_module = self._module_class is not None and issubclass(kind, self._module_class)
        if is_module and self.handlers.get(kind) is None and self.handler_of(kind) is None:
            self.last = obj
            if _has_mixed_precision(vars(obj)):
                self.on_unwrapped(self.current, "mixed precision")
            return _undistributed(obj)
        if self._optimizer_class is not None and issubclass(kind, self._optimizer_class):
            _refuse_wrapped(obj)
        return super().reducer_override(obj)

    def _reduce_data_parallel(self, wrapper: Any) -> Any:
        """Write the model inside: the wrapper belongs to a group of ranks that end with the gang."""
        self.on_unwrapped(self.current, type(wrapper).__name__)
        return itself, (wrapper.module,)

    def _reduce_array(self, array: Any) -> Any:
        reduced = reduce_stand_in(array)
        return super()._reduce_array(array) if reduced is NotImplemented else reduced

    def _reduce_sharded(self, tensor: Any) -> Any:
        full = self.full_tensors.get(id(tensor))
        if full is None:
            why = "it is a sharded tensor (DTensor), which has no meaning in the notebook"
            raise RefusedError(tensor, why, "bring back its `.full_tensor()`")
        return full.__reduce_ex__(2)

    def _reduce_global(self, obj: Any, name: str) -> Any:
        if self._kernel_has(obj, name):
            return resolve, ("__main__", name)
        return super()._reduce_global(obj, name)

    def _kernels_name(self, obj: Any) -> str:
        """Return the name by which the notebook has a function or class; empty if it has none."""
        if self._kernel_has(obj, obj.__qualname__):
            return str(obj.__qualname__)
        return self._names.get(id(obj), "") if isinstance(obj, type) else ""

    def _kernel_has(self, obj: Any, name: str) -> bool:
        if not is_main(obj):
            return False
        first = name.partition(".")[0]
        if self._names.get(id(getattr(sys.modules["__main__"], first, None))) != first:
            return False
        return find("__main__", name) is obj


def _is_distributed() -> bool:
    """Whether modules may keep the additions of a library that distributes them."""
    return dtensor_class() is not None or not {"accelerate", "deepspeed"}.isdisjoint(sys.modules)


def _undistributed(module: Any) -> Any:
    """Reduce a module to one of its original class, without the hooks that distribute it."""
    kind = type(module)
    if is_a(module, "torch.distributed.fsdp", "FSDPModule"):
        module.reshard()
        kind = kind.__mro__[2]  # fully_shard() made FSDPNet(FSDPModule, Net)
    reduced = module.__reduce_ex__(2)
    if reduced[0] is not copyreg.__newobj__ or not isinstance(reduced[2], dict):  # type: ignore[attr-defined]  # typeshed lacks it
        return reduced  # its class customizes pickling
    state = {
        name: _own_hooks(name, value)
        for name, value in reduced[2].items()
        if not name.startswith(_STATE_OF_SHARDING)
    }
    if _has_mixed_precision(state):
        original = state["forward"] = state.pop("_original_forward")
        if getattr(original, "__func__", None) is kind.forward:
            del state["forward"]  # it is the method of the class
    return restore_object, (kind, *reduced[1][1:]), state


def _has_mixed_precision(state: Mapping[str, Any]) -> bool:
    """Return whether Accelerate has replaced a module's ``forward`` by what refuses to be pickled."""
    wrapped = getattr(state.get("forward"), "__wrapped__", None)
    return is_a(wrapped, *_MIXED_PRECISION) and "_original_forward" in state


def _own_hooks(name: str, value: Any) -> Any:
    """Return an attribute of a module; of its hooks, those that :data:`_ADDERS_OF_HOOKS` did not add."""
    if not name.endswith("_hooks") or not isinstance(value, dict):
        return value
    added = [key for key, hook in value.items() if _is_of_distributed(hook)]
    if not added:
        return value  # itself, since handles of hooks refer to it
    kept = copy.copy(value)
    for key in added:
        del kept[key]
    return kept


def _is_of_distributed(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return f"{getattr(hook, '__module__', '')}.".startswith(_ADDERS_OF_HOOKS)


def _refuse_wrapped(optimizer: Any) -> None:
    """Refuse an optimizer of a class that a library has made around that of the user's optimizer.

    What such a class needs is set when it wraps an optimizer, and is bound to the ranks.
    """
    kind = type(optimizer)
    home = sys.modules.get(kind.__module__)
    is_of_library = "-packages" in str(getattr(home, "__file__", ""))
    if is_of_library and getattr(home, kind.__name__, None) is not kind:
        why = f"{kind.__module__} has wrapped it for the ranks"
        raise RefusedError(optimizer, why, "bring back its `.state_dict()`")


def _refuse_sharding(obj: Any, sharding: Sharding) -> Any:
    raise RefusedError(obj, sharding.why, sharding.to_return)


def _reduce_parameter(parameter: Any) -> Any:
    """Reduce a parameter without DeepSpeed's additions; refuse one of which this rank holds only a part."""
    if is_flattened(parameter):
        _refuse_sharding(parameter, FSDP1)
    if hasattr(parameter, "ds_id"):
        why = "DeepSpeed's ZeRO stage 3 has partitioned this parameter"
        raise RefusedError(parameter, why, GATHERED)
    if _STATE_OF_ZERO.isdisjoint(vars(parameter)):
        return NotImplemented
    own = {name: value for name, value in vars(parameter).items() if name not in _STATE_OF_ZERO}
    rebuild, (*args, _) = parameter.__reduce_ex__(2)  # torch: the last one holds its attributes
    return rebuild, (*args, own)
