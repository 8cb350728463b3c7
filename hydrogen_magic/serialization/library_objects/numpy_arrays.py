"""Arrays of NumPy and of subclasses."""

from __future__ import annotations

import sys
from typing import Any

from hydrogen_magic.serialization.instances import find_on_type, is_reduced_as
from hydrogen_magic.serialization.library_objects.handlers import Handlers


def is_array_class(kind: type) -> bool:
    """Whether objects of a class are plain arrays with attributes; NumPy has been imported.

    Not memory maps, whose file is not sent, and not those of a class with its own pickling.
    """
    numpy = sys.modules["numpy"]
    bases = numpy.ndarray, getattr(sys.modules.get("numpy.ma"), "MaskedArray", numpy.ndarray)
    is_default = any(
        is_reduced_as(base, kind)
        and find_on_type(kind, "__setstate__") is find_on_type(base, "__setstate__")
        for base in bases
    )
    return is_default and not issubclass(kind, numpy.memmap)


def _reduce_subclass(array: Any) -> Any:
    """Reduce an array of a subclass to a plain one and its attributes.

    NumPy would copy its elements into the stream, apart from those of other arrays over the same memory, and
    leave out attributes.
    """
    kind, own_attributes = type(array), getattr(array, "__dict__", {})
    if not is_array_class(kind):
        return NotImplemented
    plain = plain_array(array)
    return restore_subclass, (plain, kind), own_attributes or None, None, None, restore_array_state


def plain_array(array: Any) -> Any:
    """Return a plain array over the memory of one that may be of a subclass."""
    ndarray = sys.modules["numpy"].ndarray
    return ndarray.view(array, ndarray)


def restore_subclass(plain: Any, kind: type) -> Any:
    """Make an array of a subclass over the memory of a plain one."""
    return type(plain).view(plain, kind)


def restore_array_state(array: Any, attributes: dict[str, Any]) -> None:
    """Set the attributes of an array, in place of those that its class has set."""
    vars(array).clear()
    vars(array).update(attributes)


def restore_array(
    buffer: Any,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: Any,
    is_writeable: bool,
) -> Any:
    """Make a NumPy array over a part of ``buffer``."""
    import numpy

    array: Any = numpy.ndarray(shape, dtype, buffer, offset, strides)
    array.flags.writeable = is_writeable
    return array


def restore_read_only(values: Any) -> Any:
    """Make a NumPy array that cannot be changed."""
    values.flags.writeable = False
    return values


HANDLERS: Handlers = (("numpy", "ndarray", _reduce_subclass),)
