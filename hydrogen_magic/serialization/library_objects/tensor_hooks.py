"""The hooks of tensors, which torch leaves out when it pickles them."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

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


_restored_hooks: dict[int, list[Any]] = {}
"""Handles of the hooks that a tensor was sent with, by its id; those of one that is gone remove nothing."""


def restore_hooks(tensor: Any, hooks: dict[str, list[Any]]) -> None:
    """Register the hooks of a tensor, in place of those with which it was sent before."""
    for handle in _restored_hooks.pop(id(tensor), ()):
        handle.remove()
    _restored_hooks[id(tensor)] = [
        getattr(tensor, register)(function)
        for register, functions in hooks.items()
        for function in functions
    ]
