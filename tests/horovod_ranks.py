"""What tests run on ranks of gangs by Horovod: its torch surface, each piece with what must come of it.

A plain local module: it travels with what it uses. Every function returns plain values.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def join_without_first() -> None:
    """All ranks but the first join."""
    import horovod.torch as hvd

    if os.environ["RANK"] != "0":
        hvd.init()


def places() -> tuple[float, ...]:
    """Return who this rank is to Horovod, and the sum of everybody's rank."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum).item()
    return (
        hvd.rank(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        total,
    )


def collectives() -> dict[str, Any]:
    """Everything that moves tensors, on whatever number of ranks."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    mine = torch.full((2,), float(rank))
    received, counts = hvd.alltoall(
        torch.arange(float(size * (size + 1) // 2)) + 100 * rank,
        splits=torch.arange(1, size + 1, dtype=torch.int32),
    )
    handle = hvd.allreduce_async(mine, op=hvd.Sum)
    return {
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "average": hvd.allreduce(mine).tolist(),
        "max": hvd.allreduce(mine, op=hvd.Max).tolist(),
        "fp16": hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16).tolist(),
        "grouped": [t.tolist() for t in hvd.grouped_allreduce([mine, mine + 1], op=hvd.Sum)],
        "async": hvd.synchronize(handle).tolist(),
        "uneven": hvd.allgather(torch.full((rank + 1, 1), float(rank))).flatten().tolist(),
        "objects": hvd.allgather_object({"rank": rank}),
        "broadcast": hvd.broadcast(mine, root_rank=size - 1).tolist(),
        "object": hvd.broadcast_object(f"of rank {rank}", root_rank=1),
        "alltoall": (received.tolist(), counts.tolist()),
        "reducescatter": hvd.reducescatter(torch.ones(size, 3) * (rank + 1), op=hvd.Sum).tolist(),
        "barrier": hvd.barrier(),
    }


def subsets() -> tuple[int, list[float], list[int]]:
    """Process sets: given at first, and added later."""
    import horovod.torch as hvd
    import torch

    even = hvd.ProcessSet([0, 2])
    odd = hvd.ProcessSet([1, 3])
    hvd.init(process_sets="dynamic")
    for ranks in (even, odd):
        hvd.add_process_set(ranks)
    own = even if even.included() else odd
    total = hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum, process_set=own)
    place = own.rank()
    hvd.remove_process_set(odd)
    hvd.barrier()  # who is done first would shut Horovod down for all
    return place, total.tolist(), even.ranks


def collectives_after_subsets() -> tuple[tuple[int, list[float], list[int]], dict[str, Any]]:
    return subsets(), collectives()


def join_early() -> tuple[int, list[float]]:
    """Ranks with fewer batches join; the others go on with zeros in their place."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    sums = [
        hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"batch {batch}").item()
        for batch in range(2 + hvd.rank())
    ]
    return hvd.join(), sums


def train(optimizer_options: dict[str, Any], n_steps: int = 4) -> dict[str, Any]:
    """Train from different beginnings; return what must be the same on all ranks."""
    import horovod.torch as hvd
    import torch

    import hydrogen_magic as hm

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    chosen = dict(optimizer_options)
    if chosen.pop("fp16", False):
        chosen["compression"] = hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **chosen
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(n_steps):
        optimizer.zero_grad()
        for _ in range(chosen.get("backward_passes_per_step", 1)):
            batch = torch.randn(16, 4)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
        optimizer.step()
        hm.log(step=step, loss=loss)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = hvd.allgather(weights.unsqueeze(0))
    return {
        "spread": (everyone - everyone[0]).abs().max().item(),
        "moved": bool(weights.abs().sum() > 0),
        "device": str(hm.device()),
        "rank": hm.rank(),
    }


def train_by_each(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train by an optimizer with each of these options."""
    return [train(options) for options in chosen]


def init_twice() -> list[float]:
    """Meet, part and meet again."""
    import horovod.torch as hvd
    import torch

    sums = []
    for _ in range(3):
        hvd.init()
        sums.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        hvd.shutdown()
    return sums


def init_and_join() -> dict[str, Any]:
    return {"init": init_twice(), "join": join_early()}


def begin_while_it_ends(folder: str, times: int) -> list[bytes]:
    """Begin a timeline while Horovod is shut down, each time; return what was written before."""
    import horovod.torch as hvd
    import torch

    written = []
    for number in range(times):
        path = Path(folder) / f"{os.environ['RANK']}-{number}.json"
        hvd.init()
        hvd.start_timeline(str(path))
        hvd.allreduce(torch.ones(1))
        hvd.stop_timeline()
        another = threading.Thread(target=_begin, args=(f"{path}.late", number * 1e-3))
        another.start()
        hvd.shutdown()  # in which its writer takes up to ten milliseconds
        another.join()
        written.append(path.read_bytes() if path.exists() else b"")
    return written


def _begin(path: str, after_s: float) -> None:
    import horovod.torch as hvd

    time.sleep(after_s)
    with suppress(ValueError):  # it was shut down before
        hvd.start_timeline(path)


def init_only() -> int:
    """Return how many ranks Horovod found."""
    import horovod.torch as hvd

    hvd.init()
    return int(hvd.size())


def join_torchs_group() -> None:
    """Do as in a gang of torch's."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


def wait_for_each_other(wait_s: float) -> None:
    """Rank 1 comes late to everything."""
    import horovod.torch as hvd
    import torch

    late = os.environ["RANK"] == "1"
    time.sleep(wait_s if late else 0)
    hvd.init()
    time.sleep(wait_s if late else 0)
    hvd.synchronize(hvd.allreduce_async(torch.ones(1)))
    hvd.allgather_object(1)


# ── elastic ──────────────────────────────────────────────────────────────────────────────────────


def elastic(epochs: int, ends: str, rank: int) -> dict[str, Any]:
    """Train elastically; after epoch 3 of the first attempt ``rank`` ends as ``ends`` says."""
    import horovod.torch as hvd
    import torch

    import hydrogen_magic as hm

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1),
        named_parameters=model.named_parameters(),
    )
    sampler = hvd.elastic.ElasticSampler(range(100))
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, seen=[]
    )
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    own = hm.checkpoint.load()
    hvd.barrier()  # nobody loads what is saved now
    hm.checkpoint.save({"mine": "too"})

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def training(state: Any) -> int:
        begun_at: int = state.epoch
        while state.epoch < epochs:
            optimizer.zero_grad()
            model(torch.ones(2, 4) * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
            sampler.record_batch(0, 2)
            state.seen = [*state.seen, state.epoch]
            state.epoch += 1
            state.commit()
            if is_first and state.epoch == 4:
                hvd.barrier()
                if hvd.rank() == rank:
                    _end(ends)
        return begun_at

    begun_at = training(state)
    weights = hvd.allgather(model.weight.detach())
    momenta = hvd.allgather(optimizer.state_dict()["state"][0]["momentum_buffer"])
    return {
        "begun_at": begun_at,
        "seen": state.seen,
        "sampled": sampler.processed_num,
        "spread": (weights - weights[0]).abs().max().item(),
        "momentum": momenta.flatten().tolist(),
        "weight": weights[0].tolist(),
        "own": own,
    }


def _end(how: str) -> None:
    if how == "raise":
        raise ValueError("bad batch 17")
    os.kill(os.getpid(), signal.SIGKILL)


def folds(fails_in: int) -> list[tuple[int, float]]:
    """Train two models, one after the other, and the second one further; say where each call began.

    The first attempt fails in call ``fails_in``, after two epochs of it.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    calls: list[tuple[int, float]] = []

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def training(state: Any, model: Any, epochs: int) -> int:
        begun_at: int = state.epoch
        while state.epoch < epochs:
            hvd.barrier()
            with torch.no_grad():
                model.weight += 1
            state.epoch += 1
            state.commit()
            if is_first and len(calls) == fails_in and state.epoch == epochs - 1:
                hvd.barrier()
                if hvd.rank() == 1:
                    raise ValueError("bad batch 17")
        return begun_at

    for weight in (100, 200):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, weight)
        state = hvd.elastic.TorchState(model=model, epoch=0)
        for epochs in (3,) if weight == 100 else (3, 6):
            calls.append((training(state, model, epochs), model.weight.item()))
    return calls


def count_up(state: Any, upto: int) -> tuple[int, int]:
    """Be what a notebook decorates: count with commits; rank 1 fails once on the way."""
    import horovod.torch as hvd

    begun_at: int = state.number
    while state.number < upto:
        state.number += 1
        state.commit()
        hvd.barrier()
        if state.number == 2 and begun_at == 0 and hvd.rank() == 1:
            raise ValueError("bad batch 17")
    return begun_at, state.number


def with_state(training: Any) -> Any:
    """Call a decorated function with a state of plain values."""
    import horovod.torch as hvd

    hvd.init()
    return training(hvd.elastic.TorchState(number=0), 5)
