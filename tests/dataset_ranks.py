"""Ranks that read a dataset. A plain local module: it travels whole."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import hydrogen_magic as hm


def length(rows: Any) -> int:
    return len(hm.shard(rows))


def train(rows: Any) -> tuple[int, list[int], list[int]]:
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    part = hm.shard(rows, batch_size=8, shuffle=True)
    orders = []
    for epoch in range(2):
        part.set_epoch(epoch)
        seen = []
        for batch in part:
            model(transformed(batch)["vector"]).sum().backward()
            seen += batch["x"].tolist()
        orders.append(seen)
    dist.destroy_process_group()
    return len(part), *orders


def transformed(batch: dict[str, Any]) -> dict[str, Any]:
    return {"vector": 2 * batch["vector"]}


def fail_once(rows: Any, folder: Path) -> list[int]:
    """Return the rows of this attempt; the first one fails after three batches."""

    def meet(name: str, text: str = "") -> None:
        (folder / f"{name}-{hm.rank()}.part").write_text(text)
        (folder / f"{name}-{hm.rank()}.part").rename(folder / f"{name}-{hm.rank()}")
        while not (folder / f"{name}-{1 - hm.rank()}").exists():
            time.sleep(0.01)

    part = hm.shard(rows, batch_size=8, shuffle=True)
    state = hm.checkpoint.load()
    meet("loaded")
    part.load_state_dict(state or part.state_dict())
    seen = []
    for batch in part:
        seen += batch["x"].tolist()
        if state is None and len(seen) == 24:
            hm.checkpoint.save(part.state_dict())
            meet("seen", " ".join(map(str, seen)))
            raise RuntimeError("on purpose")
    return seen
