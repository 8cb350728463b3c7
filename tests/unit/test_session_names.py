"""Cells of a session in one process: what is captured for ranks that have names, and what they then hold."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from hydrogen_magic.capture import SessionCapture, session_cell
from hydrogen_magic.capture.ownership import SessionNames
from hydrogen_magic.capture.versions import note_brought_back, sharing_with, versions_of
from hydrogen_magic.core.events import HeldName, NamesChanged
from hydrogen_magic.driver import result_assignment
from hydrogen_magic.driver.session import RankHoldings
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.node.worker import namespace
from hydrogen_magic.node.worker.session.group_recovery import ProcessGroups
from hydrogen_magic.node.worker.session.session_names import RankNames
from hydrogen_magic.serialization.identity import Originals
from tests.capture_rig import Notebook, as_sent
from tests.rank_results import delivered

RANK_0 = frozenset({0})
OUT = ("model", "w", "nets")


class Session:
    """A notebook, and a rank of a session in the same process."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.names = SessionNames()
        self.originals = Originals()
        self.rank = types.ModuleType("__main__")
        self.rank_names = RankNames(vars(self.rank))
        self.sent: list[str] = []
        """Names that the last cell sent."""
        self.listed: dict[str, str] = {}
        """What ``--dry-run`` would have listed for the last cell."""
        self.holdings = RankHoldings()
        self.params: Mapping[str, Any] = {}
        """Values that tell the run apart in lists."""
        self.warnings: list[str] = []

    def capture_for(self, ranks: frozenset[int], push: tuple[str, ...] = ()) -> SessionCapture:
        return SessionCapture(self.names, self.originals, ranks, push)

    def cell(
        self,
        text: str,
        *,
        push: tuple[str, ...] = (),
        out: tuple[str, ...] = (),
        ranks: frozenset[int] = RANK_0,
    ) -> Any:
        """Run a cell of the session; ``ranks``: of them, rank 0 alone really runs it."""
        captured = self.notebook.capture(text, session=self.capture_for(ranks, push), out=out)
        use = captured.session
        assert use is not None
        use.check()
        self.params = captured.params
        self.sent = [i.name for i in captured.inventory if i.why.startswith("sent")]
        self.listed = {item.name: item.why for item in captured.inventory}
        self.rank_names.start(0)
        self.warnings = []
        try:
            loaded = namespace.load(as_sent(captured), self.rank, self.rank_names)
            self.warnings += loaded.warnings
            value = loaded.run()
            self.rank_names.are_results_sent = True
        finally:
            report = self.rank_names.report(0.0, 0, ProcessGroups(""), 0, self.warnings.append)
            self.holdings = self.holdings.after(report)
            self.names.after_cell(use, {0: report})
        if out:
            self._take(loaded, captured, out)
        return value

    def _take(self, loaded: Any, captured: Any, out: tuple[str, ...]) -> None:
        found, namespace, originals = delivered(loaded, None), self.notebook.names, self.originals
        sharing = versions_of(sharing_with(self.names, out, originals), namespace, originals)
        result_assignment.assign(found, out, namespace, captured.originals)
        note_brought_back(self.names, out, sharing, namespace, originals, RANK_0)


@pytest.fixture
def session(notebook: Notebook) -> Session:
    return Session(notebook)


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x):
        return {}
model = Net()
"""


def test_a_name_is_sent_once_and_again_after_each_kind_of_change(session: Session) -> None:
    run = session.notebook.cell
    run("import numpy as np, torch\na = np.zeros(9000); b = [1]; c = 5; d = {'t': torch.ones(2)}")
    cell = "float(a.sum()), b, c, d['t'].tolist()"
    assert session.cell(cell) == (0.0, [1], 5, [1.0, 1.0])
    assert session.sent == ["a", "d", "b", "c"]
    session.cell(cell)
    assert session.sent == [] and session.params == {"c": 5}
    run("a[8999] = 2; b.append(2); c = 6; d['t'] *= 3")
    assert session.cell(cell) == (2.0, [1, 2], 6, [3.0, 3.0])
    assert sorted(session.sent) == ["a", "b", "c", "d"]


def test_what_is_made_from_a_name_is_no_change_of_it(session: Session) -> None:
    run = session.notebook.cell
    run(
        "import argparse, pandas as pd\nargs = argparse.Namespace(lr=1); df = pd.DataFrame({'x': [1.0]})\n"
        "days = pd.Series([1], pd.date_range('2024', periods=1))"
    )
    use = "a = vars(args); y = df['x']; z = days.resample('D').sum()"
    session.cell(use)
    run(use)
    session.cell("args, df, days")
    assert session.sent == []
    run("args.lr = 2; df['z'] = 2.0")
    assert session.cell("args.lr, list(df)") == (2, ["x", "z"])


def test_globals_whose_classes_pickle_them_by_name_follow_the_notebook(session: Session) -> None:
    run = session.notebook.cell
    run("""
        import typing
        class Missing:
            def __reduce__(self): return "MISSING"
        MISSING, Id = Missing(), typing.NewType("Id", int)
        def get(value: Id = MISSING): return value is MISSING
    """)
    assert session.cell("get(), Id.__supertype__") == (True, int)
    run("Id = typing.NewType('Id', str); known = [MISSING]")
    assert session.cell("get(known[0]), Id.__supertype__") == (True, str)
    session.cell("found = MISSING, Id", out=("found",))
    run("assert found[0] is MISSING and found[1] is Id")


@pytest.mark.skipif(sys.version_info < (3, 15), reason="Python has no lazy imports")
def test_lazy_imports_of_the_notebook_are_imports_of_ranks(session: Session) -> None:
    session.notebook.cell("""
        lazy import colorsys
        lazy from collections import Counter
        def count(text): return colorsys.__name__, Counter(text)["a"]
    """)
    assert session.cell("count('aab'), colorsys.__name__") == (("colorsys", 2), "colorsys")
    assert session.sent == ["count"]


@pytest.mark.skipif(sys.version_info < (3, 15), reason="Python has no sentinels")
def test_a_sentinel_of_the_notebook_is_one_on_ranks(session: Session) -> None:
    session.notebook.cell(
        "MISSING = sentinel('MISSING')\ndef get(value=MISSING): return value is MISSING"
    )
    assert session.cell("get(), get(MISSING), get(1)") == (True, True, False)
    session.cell("found = [MISSING]", out=("found",))
    session.notebook.cell("assert found[0] is MISSING and get(found[0])")


def test_what_came_back_within_another_object_is_the_notebooks_again(session: Session) -> None:
    session.notebook.cell("""
        import torch
        net = torch.nn.Linear(1, 1, bias=False)
        class State: pass
        state, other = State(), torch.nn.Linear(1, 1, bias=False)
        state.model, pair = net, [net, 1]
    """)
    session.cell("state.model.weight.data.fill_(3); other = net; pair[1] = 2; net is state.model")
    session.cell("state", out=("state",))
    session.notebook.cell("assert net is state.model and net.weight.item() == 3\nstate.lr = 0.5")
    cell = "state.lr, net is state.model is pair[0], net.weight.item(), pair[1]"
    assert session.cell(cell) == (0.5, True, 3, 2)
    for change in ("pair[1] = 3", "other = 4"):  # these have not come back
        session.notebook.cell(change)
        with pytest.raises(CaptureError, match=r"the ranks .*, and the notebook"):
            session.cell(change.replace("[1]", "").partition(" ")[0])
    session.cell("net.weight.data.fill_(5)")
    session.notebook.cell("state.lr = 0.7")
    with pytest.raises(CaptureError, match="`state`: the ranks changed it"):
        session.cell("state")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates annotations at once")
def test_annotations_that_cannot_be_evaluated_are_text(session: Session) -> None:
    session.notebook.cell("""
        class Known: size: int
        class Net: layer: Missing
        def get(value: Missing = 1) -> int: return value
    """)
    cell = "get(), Known.__annotations__, Net.__annotations__, get.__annotations__"
    texts = {"layer": "Missing"}, {"value": "Missing", "return": "int"}
    assert session.cell(cell) == (1, {"size": int}, *texts)
    assert session.cell(cell) == (1, {"size": int}, *texts) and session.sent == []
    session.cell("def made(value: Missing = 2): return value", out=("made",))
    session.notebook.cell("assert made() == 2 and made.__annotations__ == {'value': 'Missing'}")


def test_a_name_with_two_underscores_is_a_variable(session: Session) -> None:
    session.notebook.cell("__state = []")
    session.cell("__state.append(1); __cache = {}")
    assert session.cell("__state, __cache") == ([1], {})
    assert session.sent == []


def test_what_a_cell_uses_of_the_ranks_is_listed(session: Session) -> None:
    session.notebook.cell("c = 5")
    session.cell("y = [c]\ndef total(): return sum(y)")
    assert session.listed == {"c": "sent: new; line 2: y = [c]"}
    session.cell("c, total()")
    assert session.listed == {
        "c": "kept: unchanged",
        "total": "kept: only the ranks have it; line 2: c, total()",
    }


def test_an_error_about_a_name_knows_those_of_the_ranks(session: Session) -> None:
    session.cell("weights = [1]")
    with pytest.raises(CaptureError, match="did you mean `weights`"):
        session.cell("weigths")
    with pytest.raises(CaptureError, match="--push weights: only the ranks"):
        session.cell("1", push=("weights",))


def test_a_thread_that_assigns_after_its_cell_makes_a_conflict(session: Session) -> None:
    session.notebook.cell("c = 5")
    session.cell("c")
    vars(session.rank)["c"] = 6  # as a thread does
    session.cell("1")
    assert session.cell("c") == 6
    session.notebook.cell("c = 7")
    with pytest.raises(CaptureError, match=r"`c`: the ranks assigned it .*, and the notebook"):
        session.cell("c")


def test_a_model_trained_by_the_ranks_stays_until_the_user_decides(session: Session) -> None:
    run = session.notebook.cell
    run(NET.format("self.layer(x)"))
    run("opt = torch.optim.SGD(model.parameters(), lr=0.1)")
    train = "model(torch.ones(1, 2)).sum().backward(); opt.step()"
    session.cell(train)
    ours, theirs = session.notebook.names, vars(session.rank)
    before = theirs["model"].layer.weight.detach().clone()
    assert not before.equal(ours["model"].layer.weight)
    assert session.cell("model.layer.weight.tolist()") == before.tolist()
    run("model.layer.weight.data.zero_()")
    with pytest.raises(CaptureError, match="`model`: the ranks changed it in Cell In"):
        session.cell(train)
    assert theirs["model"].layer.weight.equal(before)
    session.cell("model", push=("model", "opt"))
    assert not theirs["model"].layer.weight.any()
    session.cell(train)
    assert theirs["model"].layer.weight.all(), "the optimizer is still attached"


def test_a_later_optimizer_is_attached_to_the_model_that_ranks_have(session: Session) -> None:
    session.notebook.cell(NET.format("self.layer(x)"))
    session.cell("seen = [model, model.layer.weight]")
    session.notebook.cell("opt = torch.optim.SGD(model.parameters(), lr=0.1)")
    held = "opt.param_groups[0]['params'][0] is model.layer.weight is seen[1], model is seen[0]"
    assert session.cell(held) == (True, True)
    assert session.sent == ["opt"]
    session.notebook.cell("opt.param_groups[0]['lr'] = 5; model.eval()")
    assert session.cell(held) == (True, True)
    assert session.cell("opt.param_groups[0]['lr'], model.training") == (5, False)


@pytest.mark.parametrize("chosen", ["push", "out"])
def test_both_ways_out_of_overwriting_a_trained_model_lead_there(
    session: Session, chosen: str
) -> None:
    run = session.notebook.cell
    run(NET.format("self.layer(x)") + "models = [model]\nmodel.layer.weight.data.fill_(1)")
    session.cell("model.layer.weight.data.fill_(9); models")
    run("opt = torch.optim.SGD(model.parameters(), lr=0.1)")
    cell = "opt.param_groups[0]['params'][0] is model.layer.weight, float(model.layer.weight[0, 0])"
    with pytest.raises(CaptureError) as caught:
        session.cell(cell)
    _, remedies = str(caught.value).splitlines()
    if chosen == "push":
        assert remedies.startswith("--push opt,model,models sends")
        assert session.cell(cell, push=("opt", "model", "models")) == (True, 1)
    else:
        assert "first, by a cell with --out model,models that does not use `opt`" in remedies
        session.cell("None", out=("model", "models"))
        assert session.cell(cell) == (True, 9)


def test_a_rank_keeps_its_changed_objects_when_others_are_sent_what_they_lack(
    session: Session,
) -> None:
    run = session.notebook.cell
    run("import numpy as np; w = np.zeros(3)\n" + NET.format("self.layer(x)"))
    run("opt = torch.optim.SGD(model.parameters(), lr=0.1)")
    session.cell("w += 1; model(torch.ones(1, 2)).sum().backward(); opt.step(); model.eval()")
    theirs = vars(session.rank)
    trained = theirs["model"].layer.weight.detach().clone()
    held = "w.tolist(), model.training, opt.param_groups[0]['params'][0] is model.layer.weight"
    assert session.cell(held, ranks=frozenset({0, 1})) == ([1.0] * 3, False, True)
    assert session.listed["w"].startswith("sent to some ranks: ranks without it: 1; ")
    assert theirs["model"].layer.weight.equal(trained)
    session.cell("w", push=("w",))
    assert not theirs["w"].any(), "it is the notebook's object still"


def test_a_rank_keeps_its_changed_module_that_torch_has_parametrized(session: Session) -> None:
    session.notebook.cell("""
        import torch
        net = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    """)
    held = "net.training, type(net).__name__"
    assert session.cell(f"net.eval(); {held}") == (False, "ParametrizedLinear")
    assert session.cell(held, ranks=frozenset({0, 1})) == (False, "ParametrizedLinear")
    assert session.listed["net"].startswith("sent to some ranks")


def test_a_rank_with_an_earlier_value_takes_what_is_sent_to_some_ranks(session: Session) -> None:
    session.notebook.cell("x = [1]")
    session.cell("x")
    session.notebook.cell("x = [2]")
    on_rank_1 = replace(session.capture_for(frozenset({1})), where="Cell In[4]")
    use = session.notebook.capture("x.append(3)", session=on_rank_1).session
    assert use is not None
    x = {"x": HeldName("value", "list")}
    session.names.after_cell(use, {1: NamesChanged(0, 1, x, {}, (), ("x",), (), 0, None, 0)})
    assert session.cell("x", ranks=frozenset({0, 1})) == [2]
    assert session.listed["x"].startswith("sent to some ranks: ranks with an earlier value: 0; ")
    session.cell("x.append(4)")
    session.notebook.cell("x = [5]")
    with pytest.raises(CaptureError, match="`x`: the ranks changed it"):
        session.cell("x")


def test_out_updates_the_notebooks_model_and_ends_the_conflict(session: Session) -> None:
    session.notebook.cell(NET.format("self.layer(x)"))
    session.cell("with torch.no_grad(): model.layer.weight += 1")
    session.notebook.cell("weight = model.layer.weight; model.eval()")
    with pytest.raises(CaptureError, match="--out model keeps those of the ranks"):
        session.cell("model")
    session.cell("model", out=("model",))
    ours = session.notebook.names
    assert ours["weight"] is ours["model"].layer.weight
    assert ours["weight"].equal(vars(session.rank)["model"].layer.weight)
    session.cell("model")
    assert session.sent == []


def test_parts_of_an_array_that_ranks_have_with_gaps(session: Session) -> None:
    """The notebook has got a copy without gaps, and so has what it sends of parts of it."""
    session.notebook.cell("import numpy as np, torch; x = None")
    session.cell("x = np.arange(20.0).reshape(4, 5)[:, ::2]", out=("x",))
    session.notebook.cell("pair = x, x[1], torch.from_numpy(x)")
    session.cell("pair")
    whole, row, tensor = vars(session.rank)["pair"]
    assert whole.tolist() == tensor.tolist() and row.tolist() == [5.0, 7.0, 9.0]


def test_what_ranks_have_made_and_sent_follows_the_notebook_as_its_own(session: Session) -> None:
    """Another variable of the ranks may refer to it, such as a wrapper that trains the model."""
    run = session.notebook.cell
    run(f"import numpy as np{NET.format('self.layer(x)')}del model")
    made = "model = Net(); opt = torch.optim.SGD(model.parameters(), lr=0.5); w = np.zeros(2)\n"
    session.cell(f"{made}nets = {{'best': [Net()]}}; own = model, w, nets['best'][0]", out=OUT)
    run(
        "for net in (model, nets['best'][0]): net.layer.weight.data.fill_(9)\nw[:] = 7; model.step = 3"
    )
    same = "own[0] is model, own[1] is w, own[2] is nets['best'][0], model.step"
    assert session.cell(same) == (True, True, True, 3)
    values = "[own[1].tolist(), *(net.layer.weight.tolist() for net in own[::2])]"
    assert session.cell(f"nets\n{values}") == [[7.0, 7.0], [[9.0, 9.0]], [[9.0, 9.0]]]
    trained = "model(torch.ones(1, 2)).sum().backward(); opt.step(); own[0].layer.weight.tolist()"
    assert session.cell(trained) == [[8.5, 8.5]]
    model = session.notebook.names["model"]
    session.cell("model.layer.bias.data.zero_()", out=("model", "opt"))
    assert session.notebook.names["model"] is model and model.layer.weight.tolist() == [[8.5, 8.5]]
    run("opt.param_groups[0]['lr'] = 2.0; model.layer.weight.data.fill_(1)")
    assert session.cell(trained) == [[-1.0, -1.0]]


def test_an_object_of_a_class_of_the_ranks_is_still_one_after_the_notebook_has_changed_it(
    session: Session,
) -> None:
    made = "class Config:\n    lr = 0\nclass Holder:\n    class Part: pass\n"
    session.cell(f"{made}config, parts = Config(), [Holder.Part()]", out=("config", "parts"))
    session.notebook.cell("config.lr = 0.5; parts.append(config)")
    same = "type(config) is type(parts[1]) is Config, type(parts[0]) is Holder.Part, config.lr"
    assert session.cell(same) == (True, True, 0.5)


def test_a_copy_that_replaced_another_one_in_the_notebook_is_the_one_that_counts(
    session: Session,
) -> None:
    """A result is not written into an array of the notebook that is read-only, which lives on here."""
    session.notebook.cell("import numpy as np\na = np.zeros(2); earlier = a")
    session.cell("own = a")
    session.notebook.cell("a.flags.writeable = False")
    session.cell("own[:] = 1", out=("a",))
    session.notebook.cell("earlier.flags.writeable = True; earlier[:] = 4; a[:] = 5")
    assert session.cell("own is a, own.tolist()") == (True, [5.0, 5.0])
    assert session.cell("earlier.tolist(), own.tolist()") == ([4.0, 4.0], [5.0, 5.0])


def test_what_out_changes_of_other_names_is_no_change_by_the_user(session: Session) -> None:
    run = session.notebook.cell
    run(NET.format("self.layer(x)"))
    run("opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)")
    train = "model(torch.ones(1, 2)).sum().backward(); opt.step(); opt.zero_grad()"
    session.cell(train, out=("model",))
    session.cell(train, out=("model",))
    assert session.sent == [] and session.listed["opt"].startswith("kept: the ranks changed it")
    run("opt.param_groups[0]['lr'] = 0.0")
    session.cell("model", out=("model",))
    with pytest.raises(CaptureError, match="`opt`: the ranks changed it"):
        session.cell(train)


@pytest.mark.parametrize("other", ["x[2:]", "torch.from_numpy(x)[1:]"])
def test_what_out_changes_of_memory_that_names_share_is_no_change_by_the_user(
    session: Session, other: str
) -> None:
    run = session.notebook.cell
    run(f"import numpy as np, torch\nx = np.zeros(4)\nother = {other}")
    session.cell("other[:] = 1; x", out=("x",))
    assert float(session.notebook.names["other"][-1]) == 1
    assert session.cell("float(other[-1])") == 1 and session.sent == []
    run("x[:] = 5")
    with pytest.raises(CaptureError, match="`other`: the ranks changed it"):
        session.cell("other")


@pytest.mark.parametrize(
    ("make", "sent", "is_part"),
    [
        ("w = torch.zeros(2); holder = [w]", "holder[0]", True),
        ("holder = torch.nn.Linear(2, 2); w = holder.weight", "holder.weight.data", True),
        ("w = np.zeros(4); holder = w[:2]", "holder", False),
        ("holder = torch.zeros(2); w = [holder, 1]", "holder", False),
    ],
)
def test_what_the_notebook_changes_of_other_names_is_no_change_by_the_ranks(
    session: Session, make: str, sent: str, is_part: bool
) -> None:
    session.notebook.cell(f"import numpy as np, torch\n{make}")
    session.cell("holder, w")
    session.notebook.cell(f"{sent}[:] = 5")
    session.cell("holder")
    assert session.cell("w[0].max().item()") == 5 and session.sent == ([] if is_part else ["w"])
    session.notebook.cell(f"{sent}[:] = 6")
    session.cell(f"{sent}[:] += 1")
    if is_part:
        assert session.cell("w[0].max().item()") == 7
    else:
        with pytest.raises(CaptureError, match="`w`: the ranks changed it"):
            session.cell("w")


def test_a_name_that_the_notebook_gives_another_part_of_what_it_sends_is_sent(
    session: Session,
) -> None:
    session.notebook.cell("import numpy as np\na, b = np.zeros(1), np.ones(1)\npair, w = [a, b], b")
    session.cell("pair, w")
    session.notebook.cell("w = a; a += 4; b += 4")
    session.cell("pair")
    assert session.cell("w.tolist(), w is pair[0]") == ([4], True)


@pytest.mark.parametrize("cell", ["d", "a, d"])
def test_a_name_that_the_notebook_gives_an_equal_value_does_not_follow_the_earlier_one(
    cell: str, session: Session
) -> None:
    session.notebook.cell("import numpy as np\na = np.zeros(1); d = [a]")
    session.cell("a, d")
    session.notebook.cell("a = a.copy(); d[0] += 1")
    session.cell(cell)
    assert session.cell("a[0], d[0][0]") == (0, 1)


def test_a_view_that_ranks_have_got_apart_from_its_array_is_sent_again_after_out(
    session: Session,
) -> None:
    session.notebook.cell("import numpy as np\nx = np.zeros(4)\nview = x[2:]")
    session.cell("view")
    session.cell("x += 1", out=("x",))
    assert session.cell("view.tolist()") == [1, 1]


def test_a_model_that_ranks_keep_under_another_name_alone_is_not_overwritten(
    session: Session,
) -> None:
    session.notebook.cell(NET.format("self.layer(x)"))
    session.cell("model.layer.bias.data.fill_(5.0); net = [model]; del model")
    session.cell("model.layer.bias.data.fill_(6.0); net.append(model)")
    assert session.cell("[float(each.layer.bias) for each in net]") == [5.0, 6.0]
    session.cell("del model; first = net[0]", out=("first",))
    ours = session.notebook.names
    assert float(ours["first"].layer.bias) == 5.0 and ours["first"] is not ours["model"]
    assert float(ours["model"].layer.bias) < 1


def test_a_cell_that_fails_before_an_assignment_has_not_assigned(session: Session) -> None:
    session.notebook.cell("x = 1; y = [1]")
    with pytest.raises(ZeroDivisionError):
        session.cell("y.append(2); x = x / 0; y = x")
    session.notebook.cell("x = 2")
    assert session.cell("x") == 2
    session.notebook.cell("y = [3]")
    with pytest.raises(CaptureError, match="`y`: the ranks changed it"):
        session.cell("y")


def test_a_redefined_class_replaces_that_of_the_ranks_model(session: Session) -> None:
    session.notebook.cell(NET.format("self.layer(x)"))
    session.cell("kept = model; kept.seen = 1")
    session.notebook.cell("def act(x): return 0 * x + bias\nbias = 7\nunused = [model]")
    forward = "act(self.layer(x)) if x.all() else later()"
    session.notebook.cell(NET.format(forward).replace("model = Net()", "model.eval()"))
    assert session.cell("kept(torch.ones(1, 2)).item()") == 7.0, "the cell does not name the class"
    assert set(session.sent) == {"Net", "act", "bias"}
    assert session.cell("kept.training, kept.seen") == (True, 1)
    assert session.sent == []


def test_what_the_ranks_objects_read_by_their_class_follows_the_notebook(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_cell, "_MAX_BYTES", 1000)
    run = session.notebook.cell
    run("import numpy as np\nlr, big, own = 1, np.zeros(9000), 0")
    run("class CFG: n = 1\ndef scale(): return lr * CFG.n")
    run("class Trainer:\n    def step(self): return scale(), big[0], own")
    session.cell("own, trainer = 5, Trainer()")
    run("lr = 2; own = 7")
    assert session.cell("trainer.step()") == (2, 0, 5), "no conflict about a name it perhaps uses"
    assert session.listed["lr"] == "sent: assigned in the notebook; used by scale()"
    run("big[0] = 3")
    assert session.cell("trainer.step()") == (2, 0, 5), "large values are not read for that"
    run("big = np.ones(9000)")
    assert session.cell("trainer.step()") == (2, 1, 5)
    run("CFG.n = 5")
    assert session.cell("trainer.step()") == (10, 1, 5)
    assert session.listed["CFG"] == "sent: changed in the notebook; used by scale()"
    run("lr = [open('/dev/null')]")
    assert session.cell("trainer.step()")[0] == 10, "it cannot be sent"
    run("lr[0].close()")


def test_values_that_names_share_with_those_that_are_sent_later(session: Session) -> None:
    define = "def f(x=MISSING, *, cache=CACHE): return x is MISSING, cache is CACHE, {}"
    session.notebook.cell("MISSING, CACHE = object(), {}\nclass A: pass\na, b = A(), A()\nb.a = a")
    session.notebook.cell(define.format(1))
    session.cell("f(); a, b, MISSING, CACHE")
    session.notebook.cell(define.format(2) + "\nb.n = 2")
    assert session.cell("f(), b.a is a, b.n") == ((True, True, 2), True, 2)
    assert set(session.sent) == {"f", "b"}
    session.notebook.cell("b.n = a.n = CACHE[1] = 3")
    assert session.cell("f(), b.a is a, b.a.n, CACHE") == ((True, True, 2), True, 3, {1: 3})
    session.cell("a.n = 4")
    session.notebook.cell("c = A()\nc.a = a")
    assert session.cell("c.a.n, a.n") == (3, 4), "a value that the ranks changed is not the same"


def test_a_class_that_a_cell_redefines_reaches_instances_after_it(session: Session) -> None:
    session.cell("class A:\n    def f(self): return 1\na = A()\ndef g(): return 1\nhooks = [g]")
    session.cell("class A:\n    def f(self): return 2\ndef g(): return 2")
    assert session.cell("a.f(), isinstance(a, A), hooks[0]()") == (2, True, 2)


CONFIG = """
class Config:
    rate = {0}
    def of(self): return {0}, self.n
def loss(): return {0}
"""


def test_a_definition_alone_changes_no_object_that_refers_to_it(session: Session) -> None:
    run, fields = session.notebook.cell, "a, b, hooks = Config(), Config(), [loss]; a.n = b.n = 0"
    run(f"{CONFIG.format(1)}{fields}")
    session.cell("a.n = 5; b, hooks")
    run(CONFIG.format(2))
    use = "a.of(), b.of(), hooks[0]()"
    assert session.cell(use) == ((2, 5), (2, 0), 2)
    assert sorted(session.sent) == ["Config", "loss"]
    session.cell(CONFIG.format(3))
    assert session.cell(use) == ((3, 5), (3, 0), 3) and session.sent == []
    run("b.n = 7")
    assert session.cell("b.n") == 7, "the ranks left it alone"


def test_a_change_before_a_definition_in_one_cell_is_seen(session: Session) -> None:
    session.notebook.cell(f"{CONFIG.format(1)}a = Config(); a.n = 0")
    session.cell("a")
    session.cell(f"a.n = 5{CONFIG.format(2)}")
    session.notebook.cell("a.n = 3")
    with pytest.raises(CaptureError, match="the ranks changed it"):
        session.cell("a")


def test_an_earlier_definition_that_has_a_name_is_part_of_the_objects(session: Session) -> None:
    run = session.notebook.cell
    run(f"{CONFIG.format(1)}hooks = [loss]; first = loss")
    session.cell("hooks")
    run(CONFIG.format(2))
    assert session.cell("hooks[0](), first(), loss()") == (1, 1, 2)


PARTS = """
def loss(): return {0}
class Base(torch.nn.Module):
    def of(self): return {0}
class Row:
    __slots__ = "a{0}", "b"
    def of(self): return {0}
class Meta(type): n = {0}
class Made(metaclass=Meta):
    def of(self): return {0}
"""


def test_what_is_sent_later_refers_to_the_present_definitions(session: Session) -> None:
    run = session.notebook.cell
    run("import torch" + PARTS.format(1))
    run("""
        class Trainer(Base):
            def step(self, loss=loss): return self.of(), loss()
        class Own(Made): pass
        trainer, hooks, row = Trainer(), [loss], Row()
    """)
    cell = "own.of(), Trainer().step(), trainer.step(), hooks[0](), issubclass(Trainer, Base)"
    first = session.cell(f"Own; own, same, row = Trainer(), trainer, row; {cell}")
    assert first == (1, (1, 1), (1, 1), 1, True)
    run(PARTS.format(2))
    assert session.cell(cell) == (2, (2, 2), (2, 2), 2, True)
    assert sorted(session.sent) == ["Base", "Made", "Meta", "Row", "loss"]
    run("Trainer.lr = trainer.lr = Own.lr = 3; hooks.append(row); row.b = 4")
    assert session.cell(cell) == (2, (2, 2), (2, 2), 2, True)
    assert session.cell("Trainer.lr, same.lr, same is trainer") == (3, 3, True)
    assert session.cell("hooks[1].of(), hooks[1].b") == (1, 4), "it does not fit into the new class"
    assert session.cell("Own().of(), Own.lr") == (1, 3), "nor does a subclass, by its metaclass"
    run("Trainer.lr = 4\n" + PARTS.format(5) + "trainer.lr = 6")
    assert session.cell(f"{cell}, same.lr, same is trainer")[2:] == ((5, 5), 5, True, 6, True)


def test_what_is_sent_later_follows_a_definition_that_no_value_of_the_ranks_refers_to(
    session: Session,
) -> None:
    run = session.notebook.cell
    run(f"{CONFIG.format(1)}class Own(Config): n = 0\nconfig, hooks = Own(), [loss]")
    assert session.cell("Config.rate, loss()") == (1, 1)
    run(CONFIG.format(2))
    assert session.cell("*config.of(), hooks[0](), isinstance(config, Config)") == (2, 0, 2, True)


def test_a_definition_that_extends_an_earlier_one_leaves_it_to_what_refers_to_it(
    session: Session,
) -> None:
    run = session.notebook.cell
    run("""
        class Net:
            def of(self): return 1
        def loss(): return 1
        class Deep(Net): pass
        net, hooks = Net(), [loss]
    """)
    cell = "own.of(), Deep().of(), net.of(), hooks[0]()"
    assert session.cell(f"own = Deep(); {cell}") == (1, 1, 1, 1)
    run("""
        class Net(Net):
            def of(self): return 10 + super().of()
        def loss(earlier=loss): return 10 + earlier()
        hooks.append(1)
    """)
    for change in ("pass", "Deep.lr = net.lr = 3"):
        run(change)
        assert session.cell(f"{cell}, Net().of(), loss()") == (1, 1, 1, 1, 11, 11)


@pytest.mark.parametrize(
    ("then", "result"),
    [
        ("del Config, loss", (1, 5, 1, 1)),
        (CONFIG.format(2), (2, 5, 2, 2)),
    ],
)
def test_what_the_notebook_displays_and_deletes_changes_no_object(
    session: Session, then: str, result: tuple[int, ...]
) -> None:
    """IPython keeps what a cell displays: ``_``, ``_5``."""
    run = session.notebook.cell
    run(f"{CONFIG.format(1)}a, b, hooks = Config(), Config(), [loss]; a.n = b.n = 0\nConfig")
    session.cell("a.n = 5; b, hooks")
    run(then)
    cell = "*a.of(), hooks[0](), b.of()[0]"
    assert session.cell(cell) == result
    run("b.n = 1; hooks.append(1)")
    assert session.cell(f"{cell}, b.n, type(a) is type(b)") == (*result, 1, True)


@pytest.mark.parametrize("use", ["copy.copy(Net())", "Net.__annotations__"])
def test_the_use_of_a_class_is_no_definition_of_it(session: Session, use: str) -> None:
    session.notebook.cell("import copy\nclass Net:\n    def f(self): return 1")
    session.cell("class Net:\n    def f(self): return 2")
    session.notebook.cell(use)
    assert session.cell("Net().f()") == 2
    assert session.listed == {"Net": "kept: the ranks assigned it in Cell In[9]"}


@pytest.mark.parametrize(
    "cell",
    ["if not lr:\n    lr = 0.001", "with contextlib.suppress(ValueError):\n    lr = int('a')"],
)
def test_an_assignment_that_a_cell_does_not_reach_leaves_the_notebooks_newer_value(
    session: Session, cell: str
) -> None:
    session.notebook.cell("import contextlib\nlr = 0.1; plateau = False")
    session.cell("lr")
    session.notebook.cell("lr = 0.01")
    session.cell(cell.replace("not lr", "plateau"))
    assert session.cell("lr") == 0.01


def test_an_assignment_that_fails_leaves_the_notebooks_newer_value(session: Session) -> None:
    session.notebook.cell("need = 3; other = 1")
    session.cell("need, other")
    session.notebook.cell("need = 4; import threading; other = threading.Lock()")
    with pytest.raises(ZeroDivisionError):
        session.cell("need = other = 1 / 0")
    assert session.sent == ["need"], "a value that cannot be sent is no reason to refuse the cell"
    assert session.cell("need") == 4


def test_an_assigned_name_that_both_sides_changed_is_no_reason_to_refuse_the_cell(
    session: Session,
) -> None:
    session.notebook.cell("import contextlib; x = 0")
    session.cell("x = 1")
    session.notebook.cell("x = 2")
    assert session.cell("with contextlib.suppress(ValueError):\n    x = 3\nx") == 3


def test_a_cell_that_cannot_be_loaded_leaves_the_ranks_values(session: Session) -> None:
    run = session.notebook.cell
    run("import numpy as np, os\nv = 1; w = np.zeros(2)\ndef f(): return 1")
    run("class Bad:\n    def __reduce__(self): return make, ()\ndef make(): os.no_such_name")
    assert session.cell("hooks = [f]; v, w.tolist()") == (1, [0.0, 0.0])
    run("v = 2; w += 1; new = 3; bad = Bad()\ndef f(): return 2")
    with pytest.raises(AttributeError):
        session.cell("v, w, new, f, bad")
    assert "new" not in vars(session.rank)
    assert session.cell("f(), hooks[0]()") == (2, 2)
    assert session.sent == [], "functions were received"
    run("v = 1; w -= 1")
    assert session.cell("v, w.tolist()") == (1, [0.0, 0.0])
    assert session.sent == []


def test_an_imported_name_that_ranks_assigned_belongs_to_them(session: Session) -> None:
    session.notebook.cell("from math import e, sqrt\nimport math as m")
    session.cell("e = 10 + e - e\ndef sqrt(x): return 'of the ranks'\nimport math as m")
    assert session.cell("e, sqrt(4), m.sqrt(4)") == (10, "of the ranks", 2)
    assert session.listed["e"].startswith("kept: the ranks assigned it in Cell In")
    assert session.listed["m"].startswith("import math as m"), "their import is no other value"
    session.notebook.cell("from math import sqrt")
    assert session.cell("e, sqrt(4)") == (10, 2)


def test_a_name_that_is_perhaps_read_follows_the_same_rules(session: Session) -> None:
    session.notebook.cell("thr = 1; log = [0]")
    assert session.cell("eval('thr'), eval('log.append(1)'), log") == (1, None, [0, 1])
    session.notebook.cell("thr = 2")
    assert session.cell("eval('thr'), eval('log')") == (2, [0, 1])
    assert session.sent == ["thr"]
    session.cell("eval('thr')")
    assert session.listed == {}
    session.notebook.cell("log.append(2)")
    with pytest.raises(CaptureError, match="`log`: the ranks changed it"):
        session.cell("eval('log')")


@pytest.mark.parametrize("again", ["epoch = 0", "%time epoch = 0", "%%time\nepoch = 0"])
def test_a_number_assigned_again_is_seen_by_the_source_of_the_cell(
    session: Session, again: str
) -> None:
    session.notebook.cell("epoch = 0")
    session.cell("epoch += 1")
    assert session.cell("epoch") == 1
    session.notebook.cell("%%timeit -n1 -r1\nepoch = 0")
    assert session.cell("epoch") == 1, "it is a local variable there"
    session.notebook.cell(again)
    with pytest.raises(CaptureError, match="`epoch`"):
        session.cell("epoch")


def test_an_optimizer_that_ranks_made_for_an_earlier_model_is_named(session: Session) -> None:
    session.notebook.cell(NET.format("self.layer(x)"))
    session.cell("opt = torch.optim.SGD(model.parameters(), lr=1)")
    session.notebook.cell("model = Net()")
    session.cell("model")
    assert session.warnings == [
        "the ranks got a new `model`, and `opt` still refers to the one before: create it again"
    ]


def test_the_ranks_model_is_updated_before_code_of_a_class_uses_it(session: Session) -> None:
    run = session.notebook.cell
    run(NET.format("self.layer(x)") + "model.register_buffer('rows', torch.eye(2).to_sparse_csr())")
    run("""
        class Reader:
            def __init__(self, model): self.model = model
            def __getstate__(self): return {"model": self.model}
            def __setstate__(self, state):
                self.model = state["model"]
                self.total = float(self.model.layer.weight.sum())
    """)
    session.cell("weight = model.layer.weight")
    run("model.layer.weight.data.fill_(5); model.rows.values().mul_(3); reader = Reader(model)")
    cell = "reader.total, float(model.rows.to_dense().sum()), reader.model.layer.weight is weight"
    assert session.cell(cell) == (10, 6, True)


def test_a_hook_of_a_tensor_that_is_sent_again_runs_once(session: Session) -> None:
    session.notebook.cell("import torch\nw = torch.ones(1, requires_grad=True)")
    session.notebook.cell("w.register_hook(lambda grad: grad * 2)")
    for value in (1, 2):
        session.notebook.cell(f"w.data.fill_({value})")
        assert session.cell("w.grad = None; (w * 3).sum().backward()\nfloat(w.grad)") == 6


def test_what_a_value_refers_to_weakly_stays_as_long_as_the_value(session: Session) -> None:
    session.notebook.cell("""
        import gc, weakref
        class Table:
            def __init__(self, n): self.n = n
        class Rows:
            def __init__(self, table): self.table = weakref.ref(table)
    """)
    tables = []
    for n in range(2):
        session.notebook.cell(f"table = Table({n}); rows = Rows(table)")
        tables.append(session.cell("weakref.ref(rows.table())"))
    gc.collect()
    assert [table() is None for table in tables] == [True, False]
    session.notebook.cell("rows = None")
    session.cell("rows")
    gc.collect()
    assert tables[1]() is None
    session.notebook.cell(
        "table = Table(2); reference = weakref.ref(table); a = [reference]; b = [reference]"
    )
    session.cell("a, b")
    session.notebook.cell("a = None")  # `b` has the same reference
    assert session.cell("gc.collect(); a, b[0]().n") == (None, 2)


def test_holdings_follow_the_cells(session: Session) -> None:
    session.notebook.cell("import numpy\nsent = numpy.zeros(3); gone = 1")
    session.cell("import math\nmade = [sent, gone]\nclass Made: pass\ndef f(): pass")
    assert session.holdings.names == {
        "sent": HeldName("value", "ndarray", 24),
        "gone": HeldName("value", "int"),
        "math": HeldName("module", "module"),
        "made": HeldName("value", "list"),
        "Made": HeldName("class", "type"),
        "f": HeldName("function", "function"),
    }
    session.cell("del gone, f; sent = 1.5")
    assert session.holdings.names.keys() == {"sent", "math", "made", "Made"}
    assert session.holdings.names["sent"] == HeldName("value", "float")
