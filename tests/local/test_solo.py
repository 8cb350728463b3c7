"""Gangs in which every rank trains a model of its own."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator

import pytest
import torch

import hydrogen_magic as hm
from hydrogen_magic.node.worker.reporting.unsynchronized import _BYPASSED, _NOT_SYNCED
from tests import library_ranks
from tests.gangs import ended, notices_of

pytestmark = pytest.mark.usefixtures("warm_agents")

ALONE = "each of the 2 ranks trains its own model"


def train(joins: bool, wraps: bool) -> None:
    """Take twelve steps, or two that DDP synchronizes."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if joins:
        dist.init_process_group("gloo")
        # By the store, which is no exchange: a rank must not be done before its peer has joined.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"joined {dist.get_rank()}", "")
        store.wait(["joined 0", "joined 1"])
    model = torch.nn.Linear(2, 1)
    if wraps:
        model = DistributedDataParallel(model)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2 if wraps else 12):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if joins:
        dist.destroy_process_group()


@pytest.mark.parametrize(("joins", "wraps"), [(False, False), (True, False), (True, True)])
def test_ranks_that_exchange_nothing_are_reported(joins: bool, wraps: bool) -> None:
    gang = ended(hm.launch(train, joins, wraps, np=2))
    gang.raise_for_state()
    assert (ALONE in notices_of(gang)) is not wraps, notices_of(gang)


def train_inside(call: str, has_hook: bool) -> None:
    """Take 25 steps, by a model in DDP that is called in another way than DDP needs."""
    import contextlib
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    if has_hook:
        ddp.register_comm_hook(None, lambda state, bucket: bucket.gradients())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync() if call == "no_sync" else contextlib.nullcontext():
        for _ in range(25):
            optimizer.zero_grad()
            (ddp.module if call == "module" else ddp)(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            time.sleep(0.02)  # the rank reports ten times a second


@pytest.mark.parametrize(
    ("call", "has_hook", "remedy"),
    [("module", False, _BYPASSED), ("no_sync", False, _NOT_SYNCED), ("no_sync", True, "")],
)
def test_models_in_ddp_that_are_not_called_are_reported(
    call: str, has_hook: bool, remedy: str
) -> None:
    gang = ended(hm.launch(train_inside, call, has_hook, np=2))
    gang.raise_for_state()
    said = [text for text in notices_of(gang).splitlines() if ALONE in text]
    assert [text.endswith(remedy) for text in said] == [True] * bool(remedy), said


class ByRank(torch.utils.data.TensorDataset):
    """On each rank, other samples."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return super().__getitem__(index + 8 * hm.rank())

    def __len__(self) -> int:
        return 8


def train_beside_a_local_model() -> None:
    """Take steps of a DDP model, and between them more of one that each rank has for itself."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    models = [DistributedDataParallel(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number in [0, *[1] * 14, 0]:
        models[number](torch.ones(4, 1)).sum().backward()
        optimizers[number].step()
        time.sleep(0.02)  # the rank reports ten times a second


def test_a_local_model_beside_one_in_ddp_is_not_reported() -> None:
    gang = ended(hm.launch(train_beside_a_local_model, np=2))
    gang.raise_for_state()
    assert ALONE not in notices_of(gang)


def train_on(ways: tuple[str, ...], *sets: torch.utils.data.TensorDataset) -> None:
    """Read an epoch of each data set, in batches of 4, with a step of a DDP model for each of them."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    dist.init_process_group("gloo")
    assert len(list(DataLoader(Stream(), batch_size=2))) == 2
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for data, how in zip(sets, ways, strict=True):
        if how == "shortened on the rank":
            data.tensors = (data.tensors[0][hm.rank() :: 2],)
        elif how == "made on the rank":
            data = TensorDataset(*data.tensors)
        sampler = DistributedSampler(data) if how == "sampled" else None
        loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None)
        for number, (batch,) in enumerate(loader):
            if how != "evaluated" and not (how == "every other one" and number % 2):
                model(batch).sum().backward()
                optimizer.step()


def test_ranks_that_train_on_the_same_samples_are_reported() -> None:
    """Only then: the last one of these is, which has another number of batches."""
    others = "sampled", "evaluated", "every other one", "shortened on the rank", "made on the rank"
    sets = [torch.utils.data.TensorDataset(torch.ones(16, 1)) for _ in others]
    sets += ByRank(torch.ones(16, 1)), torch.utils.data.TensorDataset(torch.ones(20, 1))
    gang = ended(hm.launch(train_on, (*others, "shuffled", "shuffled"), *sets, np=2))
    gang.raise_for_state()
    reported = "rank 0: reads all 5 batches of a data set that every rank has: to give each rank its share,"
    assert reported in notices_of(gang) and "cannot be observed" not in notices_of(gang)


def train_after_the_end_of_the_group() -> None:
    """Step after ``destroy_process_group``: DDP holds the group, and averages still."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(110):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 0:
            dist.destroy_process_group()
    time.sleep(
        0.5
    )  # torch may hang if the peer ends, and closes its connections, during the last step


def test_models_of_a_destroyed_group_are_not_reported() -> None:
    gang = ended(hm.launch(train_after_the_end_of_the_group, np=2))
    gang.raise_for_state()
    assert ALONE not in notices_of(gang)


def train_by_accelerate() -> None:
    import accelerate
    import torch

    model = torch.nn.Linear(2, 1)
    ready = accelerate.Accelerator()
    model, optimizer = ready.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(12):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate") or torch.cuda.is_available(),
    reason="Accelerate joins the ranks by itself where there are GPUs",
)
def test_accelerate_without_gpus_is_reported_with_its_argument() -> None:
    gang = ended(hm.launch(train_by_accelerate, np=2))
    gang.raise_for_state()
    assert f"{ALONE}. To train one model, write Accelerator(cpu=True)" in notices_of(gang)


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="lightning is not installed")
def test_lightning_without_devices_is_reported(tmp_path: object) -> None:
    gang = ended(hm.launch(library_ranks.fit_lightning, str(tmp_path), devices="auto", np=2))
    gang.raise_for_state()
    remedy = "create the Trainer inside the cell, with devices=2, num_nodes=1"
    assert f"{ALONE}. To train one model, {remedy}" in notices_of(gang)
