"""Objects of torch: optimizers, data loaders, parametrized modules, operators, TorchScript."""

from __future__ import annotations

import importlib
import io
import sys
import weakref
from typing import Any

from hydrogen_magic.serialization.instances import (
    Reduced,
    is_reduced_as,
    restore_attributes,
    restore_object,
)
from hydrogen_magic.serialization.library_objects.handlers import Handlers
from hydrogen_magic.serialization.pickling_errors import RefusedError


def _reduce_loader(loader: Any) -> Any:
    """Leave out the iterator that ``persistent_workers`` keeps: its processes are those of this process."""
    kind, base = type(loader), sys.modules["torch.utils.data"].DataLoader
    if loader.__dict__.get("_iterator") is None and not is_reduced_as(base, kind):
        return NotImplemented
    state: Any = {**loader.__dict__, "_iterator": None}, {}, False
    return restore_object, (kind,), state, None, None, restore_attributes


_DISTRIBUTING = ("accelerate.", "deepspeed.", "torch.distributed.")
"""Libraries whose optimizers hold what belongs to the processes of one gang."""


def _reduce_optimizer(optimizer: Any) -> Any:
    """Reduce an optimizer with all its attributes; torch leaves out hooks, and what subclasses set."""
    kind, base = type(optimizer), sys.modules["torch.optim"].Optimizer
    is_distributing = any(str(one.__module__).startswith(_DISTRIBUTING) for one in kind.__mro__)
    if is_distributing or _is_made_by_library(kind) or not is_reduced_as(base, kind):
        return NotImplemented
    state = dict(vars(optimizer))
    if hasattr(state.get("step"), "_wrapped_by_lr_sched"):  # in a closure of the scheduler
        state["step"] = Reduced((restore_watched_step, (optimizer,)))
    return restore_object, (kind,), state


def _is_made_by_library(kind: type) -> bool:
    """Whether a library has made the class at run time, around that of the user's optimizer."""
    home = kind.__module__
    return home != "__main__" and getattr(sys.modules.get(home), kind.__name__, None) is not kind


def restore_watched_step(optimizer: Any) -> Any:
    """Wrap the method as torch's schedulers do, which warn where it is not."""
    reference = weakref.ref(optimizer)

    def step(*args: Any, **options: Any) -> Any:
        alive: Any = reference()
        alive._opt_called = True
        return type(alive).step(alive, *args, **options)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def is_parametrized(kind: type) -> bool:
    """Whether torch made the class for one parametrized module (spectral_norm, weight_norm, …)."""
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", "") == "torch.nn.utils.parametrize"


def reduce_parametrized(module: Any) -> Any:
    state = dict(module.__dict__)
    return restore_object, (type(module).__bases__[0],), state, None, None, restore_parametrized


def restore_parametrized(module: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes of a module, and give it the class that torch makes for it."""
    from torch.nn.utils import parametrize

    lists = attributes["_modules"].pop("parametrizations")
    module.__dict__.update(attributes)
    parametrize._inject_new_class(module)
    for name in lists:
        parametrize._inject_property(module, name)
    module.parametrizations = lists


def _reduce_limits(limits: Any) -> Any:
    """Reduce the limits of a type of number."""
    return type(limits), (getattr(sys.modules["torch"], limits.dtype),)


def _refuse_custom_operator(operator: Any) -> Any:
    raise RefusedError(
        operator,
        "it is a custom operator of torch, which each process registers",
        "define it inside the cell, with its register_fake and register_autograd, or in a local module",
    )


def _reduce_overload(overload: Any) -> Any:
    """Reduce ``torch.ops.aten.add.Tensor`` to its names."""
    return restore_operator, (*overload._schema.name.split("::"), overload._overloadname)


def _reduce_operator(operator: Any) -> Any:
    return restore_operator, tuple(operator._qualified_op_name.split("::"))


def restore_operator(*names: str) -> Any:
    """Return a namespace of ``torch.ops``, or what it has by these names."""
    found = importlib.import_module("torch").ops
    for name in names:
        found = getattr(found, name)
    return found


def _reduce_script_module(module: Any) -> Any:
    own = dict((*module.named_parameters(), *module.named_buffers()))
    return restore_script, (_saved(module),), own, None, None, restore_script_tensors


def _reduce_script_function(function: Any) -> Any:
    return restore_script, (_saved(function),)


def _saved(script: Any) -> bytes:
    file = io.BytesIO()
    sys.modules["torch"].jit.save(script, file)
    return file.getvalue()


def restore_script(saved: bytes) -> Any:
    """Load TorchScript."""
    import torch

    return torch.jit.load(io.BytesIO(saved))


def restore_script_tensors(module: Any, tensors: dict[str, Any]) -> None:
    """Give a module the tensors that other objects, such as an optimizer, share with it."""
    for path, tensor in tensors.items():
        *parents, name = path.split(".")
        owner = module
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, tensor)


HANDLERS: Handlers = (
    ("torch", "finfo", _reduce_limits),
    ("torch", "iinfo", _reduce_limits),
    ("torch._library.custom_ops", "CustomOpDef", _refuse_custom_operator),
    ("torch._ops", "OpOverload", _reduce_overload),
    ("torch._ops", "OpOverloadPacket", _reduce_operator),
    ("torch._ops", "_OpNamespace", lambda namespace: (restore_operator, (namespace.name,))),
    ("torch.jit", "ScriptModule", _reduce_script_module),
    ("torch.jit", "ScriptFunction", _reduce_script_function),
    ("torch.optim", "Optimizer", _reduce_optimizer),
    ("torch.utils.data", "DataLoader", _reduce_loader),
)
