"""Objects of libraries that pickle refuses or damages, although they can be restored in another process.

Streams call the ``restore_*`` functions when they are read; the kernel and the ranks have them.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hydrogen_magic.serialization.instances import reduce_instance, restore_attributes
from hydrogen_magic.serialization.reducers import restore_object

Handler = Callable[[Any], Any]


def handler_of(kind: type) -> Handler | None:
    """Return the function that reduces objects of class ``kind``; None if pickle does."""
    for module, name, handler in _HANDLERS:
        base = getattr(sys.modules.get(module), name, None)
        if isinstance(base, type) and issubclass(kind, base):
            return handler
    return _reduce_parametrized if _is_parametrized(kind) else None


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def restore_closed_file(kind: type, name: object) -> Any:
    """Make a closed file of that name."""
    raw = io.FileIO(os.devnull, "r+")
    raw.name = name
    if kind is io.FileIO:
        file: Any = raw
    elif kind is io.TextIOWrapper:
        file = io.TextIOWrapper(io.BufferedRandom(raw), encoding="utf-8")
    else:
        file = kind(raw)
    file.close()
    return file


# ── torch ────────────────────────────────────────────────────────────────────────────────────────


def _reduce_loader(loader: Any) -> Any:
    """Leave out the iterator that ``persistent_workers`` keeps: its processes are those of this process."""
    if loader.__dict__.get("_iterator") is None:
        return reduce_instance(loader)
    state: Any = {**loader.__dict__, "_iterator": None}, {}, False
    return restore_object, (type(loader),), state, None, None, restore_attributes


def _is_parametrized(kind: type) -> bool:
    """Whether torch made the class for one parametrized module (spectral_norm, weight_norm, …)."""
    getstate = vars(kind).get("__getstate__")
    return getattr(getstate, "__module__", "") == "torch.nn.utils.parametrize"


def _reduce_parametrized(module: Any) -> Any:
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


_HANDLERS: tuple[tuple[str, str, Handler], ...] = (
    ("torch.utils.data", "DataLoader", _reduce_loader),
    ("torch.jit", "ScriptModule", _reduce_script_module),
    ("torch.jit", "ScriptFunction", _reduce_script_function),
)


# ── hooks of tensors ─────────────────────────────────────────────────────────────────────────────

_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def with_hooks(tensor: Any, reduced: Any) -> Any:
    """Return how a tensor is reduced with its hooks, which torch leaves out.

    ``reduced``: how it is reduced without them; NotImplemented: as torch does.
    """
    hooks = {
        register: list((getattr(tensor, place, None) or {}).values())
        for place, register in _HOOKS.items()
    }
    if not any(hooks.values()):
        return reduced
    make, args = reduce_tensor(tensor) if reduced is NotImplemented else reduced
    return make, args, hooks, None, None, restore_hooks


def reduce_tensor(tensor: Any) -> tuple[Any, Any]:
    """Reduce a tensor as torch does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it leaves hooks out
        make, args = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return make, args


def restore_hooks(tensor: Any, hooks: dict[str, list[Any]]) -> None:
    """Register the hooks of a tensor."""
    for register, functions in hooks.items():
        for function in functions:
            getattr(tensor, register)(function)
