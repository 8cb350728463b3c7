"""Results become variables again: in place where the ranks changed the notebook's own object."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hydrogen_magic import result_stream
from hydrogen_magic.assignment import assign
from hydrogen_magic.gang.results import RankResults
from hydrogen_magic.pickling import Pickler
from hydrogen_magic.result_stream import Part


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(2)
        self.layers = [self.first]
        self.history: list[float] = []


def returned(same: bool = True, **objects: Any) -> RankResults:
    sections = result_stream.pack(objects, Pickler).sections
    return RankResults(0, [(Part(n, is_same_object=same), s) for n, s in sections.items()])


def trained(net: Net) -> Net:
    """Return what a rank makes of a copy of ``net``."""
    copied = copy.deepcopy(net)
    with torch.no_grad():
        copied.first.weight += 1
        copied.norm.running_mean += 2
    copied.history.append(0.5)
    return copied.eval()


def test_a_model_is_updated_in_place() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    namespace: dict[str, Any] = {"net": net, "optimizer": optimizer, "weight": net.first.weight}
    expected = trained(net)
    assert assign(returned(net=expected), ["net"], namespace) == []
    assert namespace["net"] is net and net.first.weight is namespace["weight"]
    torch.testing.assert_close(dict(net.state_dict()), dict(expected.state_dict()))
    assert net.history == [0.5] and not net.training
    assert net.layers == [net.first], "it refers to the notebook's layer, not to a second one"
    net.first(torch.ones(1, 3)).sum().backward()
    before = net.first.weight.clone()
    optimizer.step()
    assert not torch.equal(net.first.weight, before), "the optimizer still trains this model"


def test_an_optimizer_is_updated_with_its_model() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    theirs, their_optimizer = copy.deepcopy((net, optimizer))
    theirs.first(torch.ones(1, 3)).sum().backward()
    their_optimizer.step()
    namespace: dict[str, Any] = {"net": net, "optimizer": optimizer}
    results = returned(net=theirs, optimizer=their_optimizer)
    assert assign(results, ["net", "optimizer"], namespace) == []
    assert namespace["optimizer"] is optimizer
    assert optimizer.state[net.first.weight]["step"] == 1
    torch.testing.assert_close(net.first.weight, theirs.first.weight)


@pytest.mark.parametrize("case", ["assigned anew", "another shape", "another class"])
def test_an_object_that_differs_is_assigned_and_stale_references_are_named(case: str) -> None:
    net = Net()
    new = {"assigned anew": net, "another shape": Net(4), "another class": nn.Linear(1, 1)}[case]
    namespace: dict[str, Any] = {"net": net, "opt": torch.optim.SGD(net.parameters()), "n": 3}
    weight = net.first.weight.clone()
    (warning,) = assign(returned(case != "assigned anew", net=new), ["net"], namespace)
    assert namespace["net"] is not net and type(namespace["net"]) is type(new)
    assert torch.equal(net.first.weight, weight), "the old model keeps its weights"
    assert warning.startswith("`net` is a new object, and `opt` still refers to the old one")
    assert "--out net,opt" in warning


def test_tensors_and_arrays_are_updated_in_place() -> None:
    tensor, array, texts = torch.zeros(3), np.zeros(3), ["a"]
    namespace: dict[str, Any] = {"tensor": tensor, "array": array, "texts": texts}
    results = returned(tensor=torch.ones(3), array=np.ones(3), texts=["a", "b"])
    assert assign(results, ["tensor", "array", "texts"], namespace) == []
    assert namespace["tensor"] is tensor and tensor.tolist() == [1, 1, 1]
    assert namespace["array"] is array and array.tolist() == [1, 1, 1]
    assert namespace["texts"] == ["a", "b"]
    longer = returned(array=np.ones(4))
    assign(longer, ["array"], namespace)
    assert len(namespace["array"]) == 4 and len(array) == 3


def test_a_variable_that_did_not_arrive_keeps_its_value() -> None:
    namespace: dict[str, Any] = {"a": 1, "b": 2}
    assert assign(returned(a=3), ["a", "b"], namespace) == []
    assert namespace == {"a": 3, "b": 2}
