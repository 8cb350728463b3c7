"""Names that both a notebook and the ranks of its session have."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from IPython.core.error import UsageError

from hydrogen_magic.capture import capture_call
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import known_gangs, launcher
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.errors import CaptureError, PlacementError, RankFailedError
from tests.gangs import notices_of
from tests.local.test_session import Cells, cells

__all__ = ["cells"]

pytestmark = pytest.mark.usefixtures("warm_agents")

MODEL = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, bias=False)
    def forward(self, x):
        return self.layer(x)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=1.0)
"""
TRAIN = "model(torch.ones(1, 2)).sum().backward(); opt.step(); opt.zero_grad()\n"
WEIGHTS = "model.layer.weight.tolist()"


def test_classes_that_their_statements_make(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = "class Meta(type):\n    def __new__(meta, name, bases, body):\n"
    base += "        cls = type.__new__(meta, name, bases, body)\n        cls.seen = sorted(body)\n"
    (tmp_path / "kinds.py").write_text(base + "        return cls\n")
    monkeypatch.syspath_prepend(tmp_path)
    cells.run(
        "import kinds\nsize = 2\nclass Row(metaclass=kinds.Meta):\n    width = size\nrow = Row()"
    )
    test = "row.width, row.total() if 'total' in Row.seen else 0, Row is type(row)"
    assert cells.on_ranks(test, "--np 2") == (2, 0, True)
    cells.on_ranks("row.mark = mark = id(Row)")
    cells.run("size = 3")
    assert cells.on_ranks("id(Row) == mark, row.mark == mark, row.width") == (True, True, 2)
    cells.run(
        "class Row(metaclass=kinds.Meta):\n    width = size\n    def total(self): return self.width"
    )
    assert cells.on_ranks(test) == (3, 3, True)
    assert cells.run("type(row) is Row") is False
    del sys.modules["kinds"]


def test_trained_weights_are_overwritten_only_by_push(
    cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run(MODEL)
    before = cells.run(WEIGHTS)
    trained = cells.on_ranks(TRAIN + WEIGHTS, "--np 2")
    assert trained != before
    assert cells.on_ranks(WEIGHTS) == trained
    cells.run("model.layer.weight.data.zero_()")
    conflict = r"`model`: the ranks changed it in Cell In\[4\], and the notebook changed it"
    with pytest.raises(CaptureError, match=conflict):
        cells.on_ranks(WEIGHTS)
    capsys.readouterr()
    cells.on_ranks("untouched = model, torch", "--dry-run")
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "conflict: the ranks changed it in Cell In[4]" in listed["model"]
    assert "kept: unchanged" in listed["Net"]
    with pytest.raises(CaptureError, match="`untouched`"):
        cells.on_ranks("untouched")
    assert cells.on_ranks(WEIGHTS, "--out model") == cells.run(WEIGHTS) == trained
    cells.run("opt.param_groups[0]['lr'] = 0.0")
    with pytest.raises(CaptureError, match="`opt`: the ranks changed it"):
        cells.on_ranks(TRAIN)
    assert cells.on_ranks(TRAIN + WEIGHTS, "--push opt,model") == trained
    with pytest.raises(UsageError, match="--push belongs to a session"):
        cells.run("%%distributed --push opt\n1")


def test_changes_on_one_rank_and_of_a_failing_cell_count(cells: Cells) -> None:
    cells.run("log = [0]")
    change = "if hm.rank() == 1:\n    log.append(1)\nlog"
    assert cells.on_ranks(change, "--np 2") == [0]
    assert cells.on_ranks("log") == [0]
    cells.run("log.append(2)")
    with pytest.raises(CaptureError, match="`log`: the ranks changed it"):
        cells.on_ranks("log")
    assert cells.on_ranks("log", "--push log") == [0, 2]
    cells.run("x = 'notebook'")
    with pytest.raises(RankFailedError):
        cells.on_ranks("x = 'ranks'\n1 / 0")
    assert cells.on_ranks("x") == "ranks"


def test_what_ipython_binds_on_the_ranks_is_no_variable_of_the_session(cells: Cells) -> None:
    cells.on_ranks("%time x = 1", "--np 2")
    (session,) = sessions.sessions()
    held = session.ranks[0].names.keys()
    assert "x" in held and held.isdisjoint({"In", "Out", "_", "_oh", "exit", "open", "quit"})
    cells.run("1 + 41")
    assert cells.on_ranks("_") == 42


def last_notices() -> str:
    return notices_of(list(known_gangs.gangs().values())[-1])


def test_new_definitions_reach_what_the_ranks_have(cells: Cells, tmp_path: Path) -> None:
    module = tmp_path / "edited_layers.py"
    module.write_text("class Layer:\n    def of(self): return 1\n")
    cells.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport edited_layers")
    try:
        cells.run("class Net:\n    def of(self): return 1\n")
        cells.on_ranks("net, layer = Net(), edited_layers.Layer()", "--np 2")
        cells.run("class Net:\n    def of(self): return 2\n")
        module.write_text(
            "class Layer:\n    def of(self): return 2\n    def added(self): return 3\n"
        )
        assert cells.on_ranks("Net, edited_layers\nnet.of(), layer.of(), layer.added()") == (
            2,
            2,
            3,
        )
        cells.on_ranks("class Net:\n    def of(self): return 4\n")
        assert cells.on_ranks("net.of()") == 4
        # A cell that uses the module only by an object of the ranks
        module.write_text("class Layer:\n    def of(self): return 50\n")
        assert cells.on_ranks("layer.of()", "--ranks 0") == 50
        assert cells.on_ranks("layer.of()", "--ranks 1") == 50
        assert "loaded edited modules again: edited_layers" in last_notices()
        module.write_text("class Layer:\n    def of(self: return 6\n")
        for _ in range(2):
            with pytest.raises(RankFailedError, match="SyntaxError"):
                cells.on_ranks("layer.of()")
        module.unlink()
        assert cells.on_ranks("layer.of()") == 50
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("edited_layers", None)
        importlib.invalidate_caches()


def test_calls_follow_the_same_rules(cells: Cells) -> None:
    cells.run(
        "import hydrogen_magic as hm\ncount = [0]\ndef step(n):\n    count.append(n)\n    return count"
    )
    call = "hm.run(step, {}, np=2, session='lab', quiet=True{})"
    assert cells.run(call.format(1, "")) == [0, 1]
    assert cells.run(call.format(2, "")) == [0, 1, 2]
    cells.run("count = [5]")
    with pytest.raises(CaptureError, match=r"`count`: the ranks changed it in step\(\)"):
        cells.run(call.format(3, ""))
    assert cells.run(call.format(3, ", push=['count']")) == [5, 3]
    spec = JobSpec(np=2, session="lab")
    captured = capture_call(os.getpid, (), {}, session=sessions.capture_for(spec))
    cells.run("%gang end lab")
    with pytest.raises(PlacementError, match="session 'lab' has ended since the cell was captured"):
        launcher.launch_captured(captured, spec, title="a call")


def test_imports_of_the_notebook_leave_the_names_of_the_ranks(
    cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for their effects, whose names cells have for something else, and all names of a module."""
    (tmp_path / "starred.py").write_text("rate = 0.1\ndef double(x): return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    cells.run("from time import time\nfrom starred import *")
    cells.run("rate = 0.5\nIn = 3")
    assert cells.on_ranks("def stamp(): return time()\ndouble(rate)", "--np 1") == 1.0
    assert cells.on_ranks("double(rate)") == 1.0
    assert cells.on_ranks("own = rate = 0.25\nstamp() > 0") is True
    assert cells.on_ranks("stamp() > 0 and double(rate)") == 0.5
