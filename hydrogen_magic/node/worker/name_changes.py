"""The names that a cell of a session binds in the namespace of its rank, and the rank's memory."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydrogen_magic.core.events import HeldName

_NOT_THE_USERS = frozenset({"get_ipython", "display", "_exit_code"})
"""Names that a rank provides itself."""
_CODE = (types.FunctionType, type)


class NameChanges:
    """Compares a namespace with its state before the cell.

    Objects are compared by identity: one that a cell changes in place has not been assigned. They are
    identified by address, so that an object that the cell replaces does not stay in memory.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._before = self._received = self._now()

    def mark_received(self) -> None:
        """The names of the closure are bound; later changes are the cell's own."""
        self._received = self._now()

    def received(self) -> dict[str, HeldName]:
        """Return the names that the closure has bound, and the cell has not bound again."""
        kept = self._received.items() & self._now().items()
        return self._described(dict(kept - self._before.items()))

    def assigned(self) -> dict[str, HeldName]:
        """Return the names that the cell has bound."""
        return self._described(dict(self._now().items() - self._received.items()))

    def deleted(self) -> tuple[str, ...]:
        """Return the names that the cell has deleted."""
        return tuple(self._received.keys() - self._now().keys())

    def _now(self) -> dict[str, int]:
        return {
            name: id(value)
            for name, value in self._namespace.items()
            if not name.startswith("__") and name not in _NOT_THE_USERS
        }

    def _described(self, names: Mapping[str, int]) -> dict[str, HeldName]:
        return {name: _described(self._namespace[name]) for name in names}


def _described(value: Any) -> HeldName:
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        what = "module"
    elif issubclass(kind, _CODE):
        what = "class" if issubclass(kind, type) else "function"
    else:
        what = "value"
    return HeldName(what, kind.__qualname__, _size_bytes(value))


def _size_bytes(value: Any) -> int | None:
    """Return the size of an array or tensor; of other objects it would take the user's own code."""
    if type(value).__module__.partition(".")[0] not in ("numpy", "torch"):
        return None
    nbytes = getattr(value, "nbytes", None)
    return nbytes if type(nbytes) is int else None


def memory_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def gpu_memory_bytes() -> int | None:
    """Return the GPU memory that torch holds for this process, None without a GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_reserved())
