"""Sharded tensors in results and checkpoints, wherever torch has their class."""

from __future__ import annotations

import functools
import io
import sys
from types import ModuleType
from typing import Any

import pytest

from hydrogen_magic.core.messages import SessionCell
from hydrogen_magic.node.worker.result_pickler import ResultPickler
from hydrogen_magic.node.worker.sharded_checkpoint import is_sharded
from hydrogen_magic.node.worker.unsharding import Gathering
from hydrogen_magic.serialization.pickling_errors import RefusedError

NEW, OLD = "torch.distributed.tensor", "torch.distributed._tensor"
"""Where the class is since torch 2.5, and in torch 2.4, which has the new module without it."""
PICKLER = functools.partial(ResultPickler, shared={}, originals={})


class Sharded:
    """Stands for ``DTensor``."""


@pytest.fixture(autouse=True)
def torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NEW, OLD):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def gathering() -> Gathering:
    """Return what gathers the tensors of a cell on some ranks, which needs no process group."""
    return Gathering(PICKLER, print, SessionCell(1, 0, is_whole=False, is_joined=False))


@pytest.mark.parametrize("home", [NEW, OLD])
def test_they_are_found_in_results_and_checkpoints(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[home], "DTensor", Sharded, raising=False)
    state: dict[str, Any] = {"weight": Sharded()}
    found = gathering()
    assert found.concerns("model", state) and not found.concerns("loss", 1.0)
    assert found.gather().keys() == {"model"}
    with pytest.raises(RefusedError, match="sharded tensor"):
        PICKLER(io.BytesIO()).dump(state)
    assert is_sharded(state)


def test_there_are_none_without_their_class() -> None:
    assert not gathering().concerns("model", {"weight": Sharded()})
    assert not is_sharded({"weight": Sharded()})
