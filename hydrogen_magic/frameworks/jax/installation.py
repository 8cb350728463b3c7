"""Checks whether JAX is installed. Imports only the standard library: its source is run anywhere."""

from __future__ import annotations

import importlib
import importlib.util

_INSTALL = "pip install jax"


def fault() -> str | None:
    """Return the problem of JAX here and a remedy, or None if both of its packages are installed."""
    importlib.invalidate_caches()  # it may have been installed while this kernel runs
    for package in ("jax", "jaxlib"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed here: run `{_INSTALL}`"
    return None
