"""Checks whether TensorFlow is installed. Imports only the standard library: its source is run anywhere."""

from __future__ import annotations

import importlib
import importlib.util

_INSTALL = "pip install tensorflow"


def fault() -> str | None:
    """Return the problem of TensorFlow here and a remedy, or None if it is installed."""
    importlib.invalidate_caches()  # it may have been installed while this kernel runs
    if importlib.util.find_spec("tensorflow") is None:
        return f"tensorflow is not installed here: run `{_INSTALL}`"
    return None
