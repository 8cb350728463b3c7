"""Sharded tensors in results and checkpoints, and what holds parts of a model."""

from __future__ import annotations

import functools
import io
import pickle
import re
import sys
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core.messages import SessionCell
from hydrogen_magic.node.worker.checkpoints import sharded_checkpoint
from hydrogen_magic.node.worker.checkpoints.sharded_checkpoint import is_sharded
from hydrogen_magic.node.worker.results import rank_parts
from hydrogen_magic.node.worker.results.result_pickler import ResultPickler
from hydrogen_magic.node.worker.results.unsharding import Gathering
from hydrogen_magic.serialization.pickling_errors import RefusedError

HOME = "torch.distributed.tensor"
"""Where the class is."""
PICKLER = functools.partial(ResultPickler, shared={}, originals={})


class Sharded:
    """Stands for ``DTensor``."""

    __torch_function__ = None


@pytest.fixture(autouse=True)
def torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HOME, ModuleType(HOME))


def gathering() -> Gathering:
    """Return what gathers the tensors of a cell on some ranks, which needs no process group."""
    return Gathering(PICKLER, print, SessionCell(1, 0, is_whole=False, is_joined=False))


def test_there_are_none_without_their_class() -> None:
    assert not gathering().concerns("model", {"weight": Sharded()})
    assert not is_sharded({"weight": Sharded()})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("state", "place"),
    [
        (SimpleNamespace(w=Sharded()), "state.w"),
        (UserDict({"w": [Sharded()]}), "state.data['w'][0]"),
    ],
)
def test_a_checkpoint_of_rank_0_refuses_sharded_tensors_inside_of_objects(
    rank: int, state: object, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[HOME], "DTensor", Sharded, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    refused = pytest.raises(TypeError, match=rf"`{re.escape(place)}` .* pass a dict of state dicts")
    with refused if rank == 0 else nullcontext():
        hm.checkpoint.save(state, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["object", "tuple"])
def test_a_sharded_checkpoint_refuses_what_torch_pickles_on_rank_0(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = SimpleNamespace(w=Sharded(), state_dict=dict, load_state_dict=dict)
    state = {"sharded": {"w": Sharded()}, "by its state_dict()": optimizer}
    hidden = {"object": SimpleNamespace(w=Sharded()), "tuple": (Sharded(), 1)}
    monkeypatch.undo()  # torch's modules import each other
    pytest.importorskip("torch.distributed.checkpoint")
    monkeypatch.setattr(sys.modules[HOME], "DTensor", Sharded)
    monkeypatch.setenv("WORLD_SIZE", "2")
    rank_parts.refuse_parts(state, sharded_checkpoint._pickled_tensors(state))
    state |= {key: hidden[key]}
    with pytest.raises(TypeError, match=rf"`state\['{key}'\].* cannot be saved: it is sharded"):
        rank_parts.refuse_parts(state, sharded_checkpoint._pickled_tensors(state))


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
