"""Seeds for the generators of random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from hydrogen_magic.node.worker.seeding import seeded


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_generators_get_their_states_back() -> None:
    with seeded(1):
        expected = _draw()
    with seeded(1):
        _draw()
        with seeded(1):
            assert _draw() == expected
        assert _draw() != expected
    with seeded(1), seeded(None):
        assert _draw() == expected


def test_generators_of_gpus_get_their_states_back(monkeypatch: pytest.MonkeyPatch) -> None:
    states, restored = [torch.zeros(16)], list[Any]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    with seeded(1):
        assert restored == []
    assert restored == [states]
