"""Objects of libraries that pickle refuses or damages, although they can be restored in another process.

There is a file for each library. Streams call the ``restore_*`` functions when they are read; the kernel
and the ranks have them.
"""

from __future__ import annotations

from hydrogen_magic.core.library_types import derives_from
from hydrogen_magic.serialization.library_objects import (
    jax_arrays,
    keras_objects,
    numpy_arrays,
    other_libraries,
    pandas_frames,
    standard_library,
    torch_objects,
)
from hydrogen_magic.serialization.library_objects.handlers import Handler

_HANDLERS = (
    *standard_library.HANDLERS,
    *jax_arrays.HANDLERS,
    *keras_objects.HANDLERS,
    *pandas_frames.HANDLERS,
    *numpy_arrays.HANDLERS,
    *other_libraries.HANDLERS,
    *torch_objects.HANDLERS,
)


def handler_of(kind: type) -> Handler | None:
    """Return the function that reduces objects of class ``kind``; None if pickle does."""
    for module, name, handler in _HANDLERS:
        if derives_from(kind, module, name):
            return handler
    is_parametrized = torch_objects.is_parametrized(kind)
    return torch_objects.reduce_parametrized if is_parametrized else None
