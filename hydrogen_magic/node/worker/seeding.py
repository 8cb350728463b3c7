"""Seeds for the generators of random numbers."""

from __future__ import annotations

import random

from hydrogen_magic.node.worker.import_hooks import hooks

_LARGEST_SEED = 1 << 32
"""NumPy's seeds are smaller."""


def seed(number: int) -> None:
    """Seed the generators of Python, NumPy and torch; of the libraries also if they are imported later."""
    random.seed(number)
    hooks.add("numpy.random", lambda module: module.seed(number % _LARGEST_SEED))
    hooks.add("torch", lambda module: module.manual_seed(number))
