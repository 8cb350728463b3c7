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


def is_a(value: Any, library: str, name: str) -> bool:
    """Return whether ``value`` is of a library's class; does not import the library."""
    found = getattr(sys.modules.get(library), name, None)
    return found is not None and isinstance(value, found)


def python_scalar(value: Any) -> Any:
    """Return the Python value of a NumPy scalar, as ``np.logspace`` yields them; others as they are."""
    return value.item() if is_a(value, "numpy", "generic") else value
