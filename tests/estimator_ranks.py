"""What estimators of tests call on ranks and in Spark's Python workers. A plain local module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model: nn.Module, data: Any, epochs: int, lr: float = 0.05) -> None:
    """Train a classifier; the ranks see different rows, and end with the same weights."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hydrogen_magic as hm

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=lr)
    for epoch in range(epochs):
        for features, label in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(features), label.long())
            loss.backward()
            optimizer.step()
        hm.log(epoch, loss=loss, accuracy=accuracy(model, data.validation or data))
    mine = [float(sum(part.sum() for part in model.parameters())), loss.item()]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    weights, losses = zip(*found, strict=True)
    assert len(set(weights)) == 1 and len(set(losses)) == dist.get_world_size()
    dist.destroy_process_group()


def accuracy(model: nn.Module, data: Any) -> float:
    with torch.no_grad():
        hits = [(model(features).argmax(1) == label).float() for features, label in data]
    return float(torch.cat(hits).mean())


def classify(model: nn.Module, features: Any) -> Any:
    return model(features).argmax(1)


def fail(model: nn.Module, data: Any) -> None:
    import hydrogen_magic as hm

    if hm.rank() == 1:
        raise ValueError("on purpose")
    import torch.distributed as dist

    dist.init_process_group("gloo")


class Two(nn.Module):
    """A model of two columns: of numbers, and of categories."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.linear = nn.Linear(4, 1)

    def forward(self, category: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([self.embedding(category), numbers], dim=1))


def replace_model(model: nn.Module, data: Any) -> nn.Module:
    """Return another model, which adds one to the label's mean of this rank."""
    features, label = next(iter(data))
    assert set(features) == {"category", "numbers"} and features["category"].dtype == torch.int64
    other = Two()
    nn.init.zeros_(other.linear.weight)
    nn.init.constant_(other.linear.bias, 1.0 + len(label) / len(label))
    return other


def both(model: nn.Module, features: Any) -> dict[str, Any]:
    return {"prediction": model(*features.values()), "parts": features["numbers"]}
