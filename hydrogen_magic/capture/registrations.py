"""Registrations of the notebook's classes with JAX and Flax, which ranks repeat."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from typing import Any

from hydrogen_magic.serialization.classes import Registration, Registrations


def registrations_of(cls: type) -> Registrations:
    """Return what has registered a class as a pytree node of JAX, and for Flax's state dictionaries."""
    tree_util: Any = sys.modules.get("jax._src.tree_util")
    flax: Any = sys.modules.get("flax.serialization")
    node = getattr(tree_util, "_registry", {}).get(cls, ())
    state = getattr(flax, "_STATE_DICT_REGISTRY", {}).get(cls, ())
    calls = [_as_node(cls, tree_util, *node)] if node else []
    if state:
        calls.append((flax.register_serialization_state, tuple(state)))
    # JAX and Flax keep the names of the fields in closures.
    know_fields = any(getattr(function, "__closure__", None) for function in (*node, *state))
    return Registrations(tuple(calls), know_fields)


def _as_node(cls: type, tree_util: Any, flatten: Any, unflatten: Any) -> Registration:
    """Return how to register a node, by the names of its parts if JAX's own function knows them.

    They are in the paths of leaves, and so in the files of Orbax.
    """
    is_of_jax = getattr(flatten, "__module__", "") == tree_util.__name__
    known = inspect.getclosurevars(flatten).nonlocals if is_of_jax else {}
    if known.keys() == {"data_fields", "meta_fields"}:
        data, meta = known["data_fields"], known["meta_fields"]
        return tree_util.register_dataclass, (data, meta, _others(cls, *data, *meta))
    unbound = _unbound(cls, unflatten)
    if known.keys() == {"flatten_with_keys"}:
        return tree_util.register_pytree_with_keys, (known["flatten_with_keys"], unbound)
    if isinstance(flatten, operator.methodcaller) and hasattr(cls, "tree_flatten_with_keys"):
        with_keys = operator.methodcaller("tree_flatten_with_keys")
        return tree_util.register_pytree_with_keys, (with_keys, unbound, flatten)
    return tree_util.register_pytree_node, (_unbound(cls, flatten), unbound)


def _others(cls: type, *names: str) -> tuple[str, ...]:
    """Return the fields of a dataclass, if it is one, that ``__init__`` takes and ``names`` do not name."""
    fields = getattr(cls, "__dataclass_fields__", {})
    return tuple(name for name in fields if fields[name].init and name not in names)


def _unbound(cls: type, function: Any) -> Any:
    """Return a method of the class as one that needs no look-up: ranks read it before the class has any."""
    if isinstance(function, types.MethodType) and function.__self__ is cls:
        return functools.partial(function.__func__, cls)
    return function
