"""What needs a CUDA device: run by ``pytest -m gpu``, on a machine with one GPU or more."""

from __future__ import annotations

import pytest

import hydrogen_magic as hm
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.errors import PlacementError, RankFailedError
from tests.local.test_session import Cells, cells

__all__ = ["cells"]

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


SHARE = "--np 2 --env CUDA_VISIBLE_DEVICES=0"
MODEL = """dist.init_process_group("BACKEND")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000).to(hm.device()))
optimizer = torch.optim.Adam(model.parameters())
"""
STEP = "model(torch.ones(8, 1000, device=hm.device())).sum().backward(); optimizer.step()\n"


def check_that_a_failing_cell_leaves_the_model_where_it_is(
    cells: Cells, backend: str, options: str
) -> None:
    where = "weight = model.module.weight\nos.getpid(), str(weight.device), weight.data_ptr()"
    before = cells.on_ranks(MODEL.replace("BACKEND", backend) + STEP + where, options)
    assert before[1].startswith("cuda")
    for wait in (STEP, "dist.all_reduce(torch.ones(1, device=hm.device()))"):
        with pytest.raises(RankFailedError) as caught:
            cells.on_ranks(f"if hm.rank() == 1:\n    raise ValueError('bad batch')\n{wait}")
        assert (caught.value.rank, "bad batch" in caught.value.report) == (1, True)
        assert cells.on_ranks(STEP + where) == before
    weights = cells.all_ranks("model.module.weight.double().sum().item()")
    assert weights[0] == weights[1], "gradients are averaged again"


def test_a_session_keeps_its_model_on_the_device(cells: Cells) -> None:
    check_that_a_failing_cell_leaves_the_model_where_it_is(cells, "gloo", SHARE)
    (session,) = sessions.sessions()
    assert session.gpu_memory_bytes > 2 * 3 * 4_000_000, "weights and Adam's state on two ranks"
    cells.on_ranks("net = model.module", "--out net")
    assert cells.shell.user_ns["net"].weight.device.type == "cpu", "results come home on the CPU"


def test_peers_are_released_from_collectives_of_nccl(cells: Cells) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a device for each rank")
    check_that_a_failing_cell_leaves_the_model_where_it_is(cells, "nccl", "--np 2 --gpu")
