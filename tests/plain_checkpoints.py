"""Ranks that save and load without torch, which agents would import for them.

A plain local module: it travels with what it uses.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import hydrogen_magic as hm


def count(upto: int, fails: bool = False, folder: Path | None = None) -> list[int | None]:
    """Save the numbers below ``upto``; log where it began, return what was there before each, or fail."""
    found: list[int | None] = []
    for number in range(upto):
        found.append(hm.checkpoint.load(folder))
        hm.checkpoint.save(number, folder)
    hm.log(began=-1 if found[0] is None else found[0])
    assert not fails
    return found


def save_two(kept: str, spoils: bool = False) -> int:
    """Save two states and fail in the first attempt; return where the next one begins.

    ``kept``: a file that is there once the first state has arrived. ``spoils``: see :func:`spoil`.
    """
    began = hm.checkpoint.load() or 0
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        hm.checkpoint.save(1)
        while not os.path.exists(kept):
            time.sleep(0.01)
        hm.checkpoint.save(2)
        if spoils:
            spoil(f"{kept}-spoiled")
        raise RuntimeError("on purpose")
    return began


def spoil(done: str) -> None:
    """Leave a file in the place of the folder of checkpoints on rank 1's host, and fail.

    ``done``: a file that is there then. A failure ends the other rank, which waits for it.
    """
    if hm.rank() == 1:
        folder = Path(os.environ["HYDROGEN_MAGIC_CHECKPOINTS"])
        shutil.rmtree(folder, ignore_errors=True)
        folder.touch()
        Path(done).touch()
    while not Path(done).exists():
        time.sleep(0.01)
    raise RuntimeError("on purpose")


def save_and_return_a_generator() -> Iterator[int]:
    """Save a state, and return what cannot be pickled."""
    hm.checkpoint.save("all that is left")
    return iter(n for n in ())
