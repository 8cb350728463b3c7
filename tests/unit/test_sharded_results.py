"""Sharded tensors in results and checkpoints, and what holds parts of a model."""

from __future__ import annotations

import functools
import io
import sys
from types import ModuleType

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
