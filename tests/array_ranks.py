"""Ranks that return arrays of NumPy, without torch. A plain local module: it travels whole."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import hydrogen_magic as hm


def two_results(n_bytes: int, late_rank: int, late_s: float) -> Any:
    """One rank goes on for a while when the other one has returned."""
    if hm.rank() == late_rank:
        time.sleep(late_s)
    return result_of(hm.rank(), n_bytes)


def result_of(rank: int, n_bytes: int) -> Any:
    """Return what a rank returns."""
    return np.random.default_rng(rank).integers(0, 256, n_bytes, np.uint8)
