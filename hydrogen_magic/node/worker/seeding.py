"""Seeds for the generators of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hydrogen_magic.node.worker.import_hooks import hooks

_LARGEST_SEED = 1 << 32
"""NumPy's seeds are smaller."""


@contextmanager
def seeded(number: int | None) -> Iterator[None]:
    """Seed, and give the generators their states back at the end. None: do nothing."""
    if number is None:
        yield
        return
    undo = [partial(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy.random")) is not None:
        undo.append(partial(numpy.set_state, numpy.get_state()))
    if (torch := sys.modules.get("torch")) is not None:
        undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    seed(number)
    try:
        yield
    finally:
        for each in undo:
            each()


def seed(number: int) -> None:
    """Seed the generators of Python, NumPy and torch; of the libraries also if they are imported later."""
    random.seed(number)
    hooks.add("numpy.random", lambda module: module.seed(number % _LARGEST_SEED))
    hooks.add("torch", lambda module: module.manual_seed(number))
