"""Libraries that may not be installed, and their classes, which may not have been imported."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any


def is_installed(module: str) -> bool:
    """Return whether there is such a library; does not import it.

    A folder of the name in the working directory is none, though Python can import it as a namespace:
    W&B keeps its runs in ``wandb``.
    """
    found = find_spec(module)
    return found is not None and found.origin is not None


def loaded(module: str, name: str) -> Any:
    """Return a class if its module is imported: otherwise it has no instances."""
    return getattr(sys.modules.get(module), name, None)


def is_a(value: Any, library: str, name: str) -> bool:
    """Return whether ``value`` is of a library's class; does not import the library."""
    found = loaded(library, name)
    return found is not None and isinstance(value, found)


def derives_from(kind: type, module: str, name: str) -> bool:
    """Return whether ``kind`` is a library's class or derives from it; does not import the library."""
    base = loaded(module, name)
    return isinstance(base, type) and issubclass(kind, base)


def python_scalar(value: Any) -> Any:
    """Return the Python value of a NumPy scalar, as ``np.logspace`` yields them; others as they are."""
    return value.item() if is_a(value, "numpy", "generic") else value
