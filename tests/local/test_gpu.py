"""What needs a CUDA device: run by ``pytest -m gpu``, on a machine with one GPU or more."""

from __future__ import annotations

import pytest

import hydrogen_magic as hm
from hydrogen_magic.errors import PlacementError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("warm_agents")]


def doubled(tensor: object) -> tuple[str, object]:
    """Double a tensor on this rank's device; return where that was, and the result."""
    there = 2 * tensor.to(hm.device())  # type: ignore[attr-defined]
    return str(there.device), there


def reduced_on_device() -> tuple[str, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1000, device=hm.device())
    dist.all_reduce(ones)
    return str(ones.device), float(ones.sum())


def test_a_rank_has_its_gpu_though_the_kernel_used_cuda_before() -> None:
    import torch

    notebooks_own = torch.arange(5, device="cuda")
    where, result = hm.launch(doubled, notebooks_own, np=1, gpu=True).result
    assert where == "cuda:0"
    assert result.device.type == "cpu", "results come home on the CPU"
    assert result.tolist() == [0, 2, 4, 6, 8]
    assert notebooks_own.tolist() == [0, 1, 2, 3, 4]


def test_two_ranks_may_share_a_gpu_when_told_to() -> None:
    shared = {"CUDA_VISIBLE_DEVICES": "0"}
    found = hm.launch(reduced_on_device, np=2, env=shared).results
    assert found == [("cuda:0", 2000.0), ("cuda:0", 2000.0)]


def test_no_gpu_is_seen_when_none_is_wanted() -> None:
    where, _ = hm.launch(doubled, __import__("torch").ones(1), np=1, gpu=False).result
    assert where == "cpu"


def test_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(PlacementError, match="needs 99 GPUs"):
        hm.launch(reduced_on_device, np=99, gpu=True)
