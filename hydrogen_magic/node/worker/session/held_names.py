"""What the ranks of a session report about their variables and memory."""

from __future__ import annotations

import sys
import types
from typing import Any

from hydrogen_magic.core.events import HeldName
from hydrogen_magic.serialization.code_names import CODE


def is_code(value: Any) -> bool:
    """Whether it is a function or class; ``isinstance`` would run the code of a proxy."""
    return issubclass(type(value), CODE)


def describe(value: Any) -> HeldName:
    """Return what a session shows of a variable."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        what = "module"
    elif is_code(value):
        what = "class" if issubclass(kind, type) else "function"
    else:
        what = "value"
    return HeldName(what, kind.__qualname__, _size_bytes(value))


def _size_bytes(value: Any) -> int | None:
    """Return the size of an array or tensor; of other objects it would take the user's own code."""
    if str(type(value).__module__).partition(".")[0] not in ("numpy", "torch"):
        return None
    try:
        nbytes = getattr(value, "nbytes", None)
    except RuntimeError:  # a sparse tensor has several
        return None
    return nbytes if type(nbytes) is int else None


def gpu_memory_bytes() -> int | None:
    """Return the GPU memory that torch holds for this process, None without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_reserved())
