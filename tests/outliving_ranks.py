"""A training that outlives what is killed around it. A plain local module: it travels with what it uses."""

from __future__ import annotations

import time

import hydrogen_magic as hm


def train(steps: int) -> int:
    """Log and save every step; return where this attempt began."""
    began = hm.checkpoint.load() or 0
    for step in range(began, steps):
        hm.log(step=step, loss=1 / (step + 1))
        hm.checkpoint.save(step + 1)
        time.sleep(0.02)
    return int(began)
