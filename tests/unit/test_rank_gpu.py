"""Ranks have a GPU each, or share those that there are."""

from __future__ import annotations

import pytest
import torch

from hydrogen_magic.core.rank_gpu import gpu_of_rank


@pytest.mark.parametrize(
    ("local_rank", "n_gpus", "chosen", "name"),
    [
        ("1", 4, "", "cuda:1"),
        ("5", 4, "", "cuda:1"),
        ("1", 1, "", "cuda:0"),
        ("1", 4, "cuda:3", "cuda:3"),
        ("", 2, "", "cuda:0"),
    ],
)
def test_the_gpu_of_a_rank(
    local_rank: str, n_gpus: int, chosen: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    for variable, value in (("LOCAL_RANK", local_rank), ("HYDROGEN_MAGIC_DEVICE", chosen)):
        monkeypatch.delenv(variable, raising=False)
        if value:
            monkeypatch.setenv(variable, value)
    assert gpu_of_rank() == name
