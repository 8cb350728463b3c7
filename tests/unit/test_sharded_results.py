"""Sharded tensors in results and checkpoints, and what holds parts of a model."""

from __future__ import annotations

import functools
import io
import pickle
import sys
from types import MethodType, ModuleType

import pytest

from hydrogen_magic.core.messages import SessionCell
from hydrogen_magic.node.worker.result_pickler import ResultPickler
from hydrogen_magic.node.worker.sharded_checkpoint import is_sharded
from hydrogen_magic.node.worker.unsharding import Gathering
from hydrogen_magic.serialization.pickling_errors import RefusedError

HOME = "torch.distributed.tensor"
"""Where the class is."""
PICKLER = functools.partial(ResultPickler, shared={}, originals={})


class Sharded:
    """Stands for ``DTensor``."""


@pytest.fixture(autouse=True)
def torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HOME, ModuleType(HOME))


def gathering() -> Gathering:
    """Return what gathers the tensors of a cell on some ranks, which needs no process group."""
    return Gathering(PICKLER, print, SessionCell(1, 0, is_whole=False, is_joined=False))


def test_there_are_none_without_their_class() -> None:
    assert not gathering().concerns("model", {"weight": Sharded()})
    assert not is_sharded({"weight": Sharded()})


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("torch.distributed.fsdp", "FullyShardedDataParallel", "a part of its parameters"),
        ("torch.distributed.optim", "ZeroRedundancyOptimizer", "a part of its state"),
    ],
)
def test_subclasses_of_what_belongs_to_the_ranks_are_refused(
    module: str, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = type(name, (), {})
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(sys.modules[module], name, base, raising=False)
    derived = type("Derived", (base,), {})
    with pytest.raises(RefusedError, match=why):
        PICKLER(io.BytesIO()).dump(derived())


@pytest.mark.parametrize("is_method", [True, False])
def test_a_model_comes_back_without_accelerates_mixed_precision(
    is_method: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``Accelerator.prepare_model`` of 1.15 makes it."""
    monkeypatch.undo()  # its modules are to be imported with torch as it is
    torch = pytest.importorskip("torch")
    operations = pytest.importorskip("accelerate.utils.operations")
    model = torch.nn.Linear(2, 1)
    if not is_method:
        model.forward = torch.relu
    model._original_forward, model._is_accelerate_prepared = model.forward, True
    mixed = operations.convert_outputs_to_fp32(getattr(model.forward, "__func__", model.forward))
    model.forward = MethodType(mixed, model) if is_method else mixed
    pickler, said = PICKLER(file := io.BytesIO()), list[tuple[str, str]]()
    pickler.on_unwrapped = lambda *what: said.append(what)
    pickler.dump(model)
    found = vars(pickle.loads(file.getvalue()))
    assert said == [(pickler.current, "mixed precision")]
    assert found.keys() == torch.nn.Linear(2, 1).__dict__.keys() | (
        {} if is_method else {"forward"}
    )
    assert found.get("forward") is (None if is_method else torch.relu)
