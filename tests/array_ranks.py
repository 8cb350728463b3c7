"""Ranks that return arrays of NumPy, without torch. A plain local module: it travels whole."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import hydrogen_magic as hm


def two_results(n_bytes: int, wait_s: float) -> Any:
    """Rank 1 goes on for a while when rank 0 has returned."""
    if hm.rank() == 1:
        time.sleep(wait_s)
    return np.full(n_bytes, hm.rank() + 1, np.uint8)
