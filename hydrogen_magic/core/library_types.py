"""Classes of libraries that may not have been imported."""

from __future__ import annotations

import sys
from typing import Any


def is_a(value: Any, library: str, name: str) -> bool:
    """Return whether ``value`` is of a library's class; does not import the library."""
    found = getattr(sys.modules.get(library), name, None)
    return found is not None and isinstance(value, found)


def python_scalar(value: Any) -> Any:
    """Return the Python value of a NumPy scalar, as ``np.logspace`` yields them; others as they are."""
    return value.item() if is_a(value, "numpy", "generic") else value
