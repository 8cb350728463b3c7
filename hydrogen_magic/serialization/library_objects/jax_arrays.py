"""Arrays and compiled functions of JAX; on a rank, read-only arrays of NumPy stand for its arrays."""

from __future__ import annotations

import importlib.util
import pickle
import weakref
from typing import Any

from hydrogen_magic.core.library_types import derives_from
from hydrogen_magic.serialization.library_objects.handlers import Handlers
from hydrogen_magic.serialization.library_objects.numpy_arrays import restore_read_only
from hydrogen_magic.serialization.pickling_errors import RefusedError


def is_jax_array(kind: type) -> bool:
    """Whether ``kind`` is the class of arrays of JAX, or of its keys of random numbers."""
    return derives_from(kind, "jax", "Array")


def values_of_jax_array(array: Any) -> Any:
    """Return a NumPy array with the values. Raises RefusedError for objects without values here."""
    import jax
    import numpy

    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        why = "it is a typed key of random numbers, which only JAX's backend can hold"
        raise RefusedError(
            array,
            why,
            "use jax.random.key_data(key) and jax.random.wrap_key_data(), or create the object with the key"
            " inside the cell",
        )
    if not (array.is_fully_addressable or array.is_fully_replicated):
        why = "it is sharded over the ranks, and every rank holds only a part of it"
        remedy = (
            "call jax.experimental.multihost_utils.process_allgather(x, tiled=True) on all ranks"
        )
        raise RefusedError(array, why, f"{remedy}, and bring back its result")
    return numpy.asarray(array)


_stand_ins: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Arrays of this process that stand for one of JAX, by ``id``."""


def restore_stand_in(values: Any) -> Any:
    """Make the read-only NumPy array that stands for a jax.Array on a rank."""
    array = _stand_ins[id(values)] = restore_read_only(values)
    return array


def reduce_stand_in(array: Any) -> Any:
    """Reduce a NumPy array to the jax.Array for which it stands; NotImplemented: it stands for none."""
    is_one = not array.flags.writeable and _stand_ins.get(id(array)) is array
    return (restore_jax_array, (array[...],)) if is_one else NotImplemented


def _reduce_jitted(function: Any) -> Any:
    """Reduce a function of ``jax.jit`` with its attributes: without them it has no name, nor ``lower``."""
    make, args, state, *_ = function.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return make, args, (state, vars(function)), None, None, restore_jitted


def restore_jitted(function: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """Give a function of ``jax.jit`` what it calls, and its attributes."""
    function.__setstate__(state[0])
    vars(function).update(state[1])


def _reduce_jax_array(array: Any) -> Any:
    return restore_jax_array, (values_of_jax_array(array),)


def restore_jax_array(values: Any) -> Any:
    """Make a jax.Array where JAX runs on the CPU; elsewhere return the NumPy array itself.

    With an accelerator, JAX would reserve most of its memory in a process that may not need it.
    """
    try:
        import jax
    except ImportError:
        return values
    is_same = jax.dtypes.canonicalize_dtype(values.dtype) == values.dtype  # jax_enable_x64
    return jax.numpy.asarray(values) if is_same and _uses_cpu(jax.config.jax_platforms) else values


def _uses_cpu(platforms: str | None) -> bool:
    """Whether JAX uses the CPU by default; asking JAX itself would start its backend."""
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


HANDLERS: Handlers = (
    ("jax", "Array", _reduce_jax_array),
    ("jaxlib._jax", "PjitFunction", _reduce_jitted),
)
