"""What estimators of tests call on ranks and in Spark's Python workers. A plain local module."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn


def classifier() -> nn.Module:
    torch.manual_seed(0)
    scale = nn.BatchNorm1d(4, affine=False)
    return nn.Sequential(scale, nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model: nn.Module, data: Any, epochs: int, lr: float = 0.2) -> None:
    """Train a classifier; the ranks see different rows, and end with the same weights.

    Without torch's optimizers and DDP, whose import takes seconds.
    """
    import torch.distributed as dist

    import hydrogen_magic as hm

    dist.init_process_group("gloo")
    for epoch in range(epochs):
        for features, label in (batch for batch in data if len(batch[1]) > 1):  # BatchNorm
            loss = nn.functional.cross_entropy(model(features), label.long())
            loss.backward()
            step(list(model.parameters()), lr / dist.get_world_size())
        hm.log(epoch, loss=loss, accuracy=accuracy(model, data.validation or data))
    mine = [float(sum(part.detach().sum() for part in model.parameters())), loss.item()]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    weights, losses = zip(*found, strict=True)
    assert len(set(weights)) == 1 and len(set(losses)) == dist.get_world_size()
    dist.destroy_process_group()


def step(parameters: list[Any], lr: float) -> None:
    """Change the parameters by the sum of the ranks' gradients."""
    import torch.distributed as dist

    for part in parameters:
        dist.all_reduce(part.grad)
        part.data -= lr * part.grad
        part.grad = None


def accuracy(model: nn.Module, data: Any) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(features).argmax(1) == label).float() for features, label in data]
    model.train()
    return float(torch.cat(hits).mean())


def classify(model: nn.Module, features: Any) -> Any:
    return model(features).argmax(1)


def log_rows(model: nn.Module, data: Any) -> None:
    """Log how many rows are both in training and in validation, and how many in either."""
    import hydrogen_magic as hm

    sides = [
        {int(x) for features, _ in side for x in features[:, 0]} for side in (data, data.validation)
    ]
    hm.log(0, both=len(sides[0] & sides[1]), either=len(sides[0] | sides[1]))


def one() -> nn.Module:
    return nn.Linear(1, 1)


def is_above_one(model: nn.Module, features: Any) -> Any:
    return features[:, 0] > 1


def fail(model: nn.Module, data: Any) -> None:
    import hydrogen_magic as hm

    if hm.rank() == 1:
        raise ValueError("on purpose")
    import torch.distributed as dist

    dist.init_process_group("gloo")


class Two(nn.Module):
    """A model of two columns: of a category, and of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.linear = nn.Linear(4, 1)

    def forward(self, category: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([self.embedding(category), numbers], dim=1))


def replace(model: nn.Module, data: Any) -> nn.Module:
    """Return another model, which predicts the sum of the labels."""
    (batch,) = data
    features, label = batch
    assert list(features) == ["category", "numbers"] and features["category"].dtype == torch.int64
    other = Two()
    nn.init.zeros_(other.linear.weight)
    nn.init.constant_(other.linear.bias, label.sum())
    return other


def both(model: nn.Module, features: Any) -> dict[str, Any]:
    return {"sum": model(*features.values()), "numbers_too": features["numbers"]}


def train_sharded(model: nn.Module, data: Any) -> None:
    """Add the labels' sum over all ranks to every parameter, of which each rank has a part."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    fsdp: Any = importlib.import_module("torch.distributed.fsdp")  # else every agent imports it
    dist.init_process_group("gloo")
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    total = sum(label.sum() for _, label in data)
    dist.all_reduce(total)
    with torch.no_grad():
        for part in model.parameters():
            part.to_local().add_(total)
