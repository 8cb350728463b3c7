"""What ranks of a session report about their names after a cell."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

from hydrogen_magic.node.worker.session import name_watch
from hydrogen_magic.node.worker.session.name_watch import NameChanges, NameWatch
from hydrogen_magic.serialization.code_names import names_bound_by


def changes(names: dict[str, Any], cell: str, sent: tuple[str, ...] = ()) -> NameChanges:
    """Run a cell, and return what it did to ``names``, of which the notebook sent some."""
    watch = NameWatch(names)
    watch.start()
    watch.begin(sent)
    code = compile(cell, "<cell>", "exec")
    exec(code, names)
    return watch.end(names_bound_by(code))


def _step(kind: str, **options: Any) -> Callable[[torch.nn.Module], None]:
    def step(model: torch.nn.Module) -> None:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return step


class Answering:
    def __getattr__(self, name: str) -> int:
        return 1


def _linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [[1], 2], lambda value: value[0].append(3)),
    "array": (lambda: numpy.zeros((4, 4)).T[1:, ::2], lambda value: value.fill(1)),
    "large array": (lambda: numpy.zeros(5000), lambda value: value.__setitem__(4999, 1)),
    "optimizer": (_linear, _step("SGD")),
    "fused optimizer": (_linear, _step("Adam", fused=True)),
    "data": (_linear, lambda model: model.weight.data.add_(1)),
    "mode": (_linear, lambda model: model.eval()),
    "layer": (torch.nn.Sequential, lambda model: model.append(torch.nn.ReLU())),
    "hook": (_linear, lambda model: model.weight.register_hook(abs)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_change_in_place_is_seen_once(kind: str) -> None:
    make, change = IN_PLACE[kind]
    value = make()
    names = {"x": value, "change": change}
    watch = NameWatch(names)
    watch.start()
    watch.begin(["x"])
    assert watch.end(()) == NameChanges(received=("x",))
    for did in (("x",), ()):
        watch.start()
        watch.begin([])
        change(value) if did else None
        assert watch.end(()) == NameChanges(changed=did)


def test_a_tensor_with_hooks_is_compared_without_warnings() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(abs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [changes({"w": weight}, cell, ("w",)) for cell in ("w.sum()", "w.data.add_(1)")]
    assert found == [NameChanges(("w",)), NameChanges(("w",), changed=("w",))]


def test_what_threads_of_a_cell_do_after_its_end_is_seen_in_the_next_one() -> None:
    names: dict[str, Any] = {"x": 1, "y": 2, "z": 3}
    watch = NameWatch(names)
    watch.start()
    watch.begin(["x", "y", "z"])
    watch.end(())
    names.update(x=10, y=20, new=5)
    del names["z"]
    watch.start()
    names["y"] = 200  # by the notebook
    watch.begin(["y"])
    assert watch.end(()) == NameChanges(received=("y",), assigned=("x", "new"), deleted=("z",))
    watch.start()
    watch.begin(())
    assert watch.end(()) == NameChanges()


def test_use_alone_is_no_change() -> None:
    model, frame = torch.nn.Linear(2, 2), {"rows": numpy.arange(9000)}
    cell = "model(ones).sum().backward(); total = frame['rows'].sum()"
    names = {"model": model, "frame": frame, "ones": torch.ones(1, 2)}
    assert changes(names, cell, ("model", "frame")) == NameChanges(("model", "frame"), ("total",))


USES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "frame": (pd.DataFrame({"x": [1.0, 2.0]}), lambda frame: (frame["x"], frame[["x"]])),
    "series": (pd.Series([1.0, 2.0]), lambda series: series[:1]),
    "index": (pd.DataFrame({"x": [1.0]}, index=[3]), lambda frame: frame.index[:]),
    "dates": (pd.Series([1], pd.date_range("2024", periods=1)), lambda x: x.resample("D").sum()),
    "periods": (
        pd.Series([1], pd.period_range("2024", periods=1, freq="M")),
        lambda x: x.resample("M").sum(),
    ),
    "attributes": (Namespace(lr=1), vars),
    "of any name": (Answering(), vars),
    "loader": (DataLoader([1]), lambda loader: setattr(loader, "_iterator", object())),
}


@pytest.mark.parametrize("kind", USES)
def test_what_is_made_from_a_value_is_no_change_of_it(kind: str) -> None:
    value, use = USES[kind]
    names = {"x": value, "use": use}
    assert changes(names, "y = use(x)", ("x",)) == NameChanges(("x",), ("y",))


def test_assigned_names_are_those_of_the_code_and_those_that_refer_to_another_object() -> None:
    names = {"a": 1, "b": [1], "c": {1}, "d": 1, "e": 1}
    function = "def f():\n global c\n c = {1}\nf()"
    cell = f"import os\na = 1\nglobals()['b'] = [1]\nfor d in [1]: pass\ndel e\n{function}"
    found = changes(names, cell, tuple(names))
    assigned = ("a", "b", "c", "d", "os", "f")
    assert found == NameChanges(tuple("abcde"), assigned, deleted=("e",))


def test_a_value_too_large_to_compare_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_watch, "_MAX_BYTES", 1000)
    names = {"large": torch.zeros(1000), "small": torch.zeros(10)}
    both = ("large", "small")
    found = changes(names, "small.add_(1)", both)
    assert found == NameChanges(both, changed=("small",), uncertain=("large",))
