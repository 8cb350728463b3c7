"""Trainings that save and load; ``plain_checkpoints`` has those without torch.

A plain local module: it travels with what it uses.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import hydrogen_magic as hm


class Best:
    """A class of the notebook, as part of a state: unpickled by its name."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


def resume(steps: int, folder: str | None = None) -> dict[str, Any]:
    """Train; in the first attempt rank 1 is killed after step 3. Return where the rank began."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hm.checkpoint.load(folder)
    start = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1
    for step in range(start, steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        hm.checkpoint.save(
            {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "best": Best(step / 2),
            },
            folder,
        )
        dist.barrier()  # or rank 1 might be gone before rank 0 has saved
        if state is None and step == 3 and hm.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    best = None if state is None else (type(state["best"]) is Best, state["best"].loss)
    return {"start": start, "best": best, "steps": len(optimizer.state_dict()["state"])}


def die_after_save() -> None:
    """Log and save six steps; rank 0 is killed when it has saved the third, rank 1 after the fifth."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    began = hm.checkpoint.load() or 0
    dist.barrier()  # or one rank may find what the other has saved meanwhile
    culprits = {(0, 2): 0, (3, 4): 1}
    for step in range(began, 6):
        hm.log(step=step, loss=1.0)
        hm.checkpoint.save(step + 1)
        if (culprit := culprits.get((began, step))) is not None:
            while hm.checkpoint.load() != step + 1 or hm.rank() != culprit:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def sharded(folder: str | None, size: int, grown: bool) -> Any:
    """Save, or load and fill, a tensor whose rows are on all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(float(size))
    if not grown:
        for step in range(2):
            weight = distribute_tensor(whole + step, mesh, [Shard(0)])
            hm.checkpoint.save({"model": {"weight": weight}, "step": step}, folder)
        return None
    empty = distribute_tensor(torch.zeros(size), mesh, [Shard(0)])
    into = {"model": {"weight": empty}, "step": -1}
    state = hm.checkpoint.load(folder, into=into)
    return state["step"], state["model"]["weight"].full_tensor().tolist()


def save_in_vain(folder: str) -> str:
    """Save a sharded state where rank 1 sees another folder than rank 0."""
    try:
        sharded(f"{folder}/{hm.rank()}", 4, grown=False)
    except RuntimeError as error:
        return str(error)
    return "saved"


def parts_of_optimizers(folder: str) -> list[str]:
    """Try to save this rank's part of optimizers' states; return the errors of rank 0.

    Save and load what the first error names.
    """
    import types

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    library = types.ModuleType("deepspeed.runtime.base_optimizer")
    library.ZeROOptimizer = type("ZeROOptimizer", (), {})  # type: ignore[attr-defined]
    sys.modules[library.__name__] = library
    part = torch.ones(6, requires_grad=True)
    zero = library.ZeROOptimizer()
    zero.optimizer = torch.optim.SGD([part])
    emptied = torch.nn.Parameter(torch.empty(0))
    emptied.ds_id = 0  # type: ignore[attr-defined]
    errors = []
    for state in (
        optimizer.state_dict(),
        {"weights": [part.detach()[:5]]},
        {"weights": [emptied.detach()]},
    ):
        try:
            hm.checkpoint.save({"step": 1, "optimizer": state}, folder)
        except TypeError as error:
            errors.append(str(error))
    plain = {"weights": torch.ones(6), "step": 1}
    hm.checkpoint.save(plain, f"{folder}/plain")

    def states() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    hm.checkpoint.save(states(), folder)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = hm.checkpoint.load(folder, into=states())
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["exp_avg"], before)
    dist.barrier()
    return errors
