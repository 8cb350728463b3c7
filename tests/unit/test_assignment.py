"""Results become variables again: what the ranks changed in place is changed in place in the notebook."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from hydrogen_magic.driver.result_assignment import assign
from hydrogen_magic.driver.state.gang_results import RankResults
from hydrogen_magic.node.worker import namespace
from hydrogen_magic.serialization import identity
from tests.capture_rig import Notebook, as_sent
from tests.rank_results import delivered

NET = """
import torch, copy, numpy as np
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2); self.norm = nn.BatchNorm1d(2)
        self.layers = [self.first]; self.history = []; self.scratch = 1
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=0.5)
sched = torch.optim.lr_scheduler.StepLR(opt, 1)
weight = net.first.weight
def step():
    opt.zero_grad(); net.first(torch.ones(1, 3)).sum().backward(); opt.step()
"""
TRAINS = """
before = weight.detach().clone(); step()
assert not torch.equal(weight, before), "the notebook's optimizer does not train its model"
"""


def ran(notebook: Notebook, cell: str, *out: str) -> tuple[RankResults, Any]:
    """Run a cell on a rank; return its results, and the originals of what it was sent."""
    captured = notebook.capture(cell, out=out)
    loaded = namespace.load(as_sent(captured), types.ModuleType("__main__"))
    with loaded.as_main():
        return delivered(loaded, loaded.run()), captured.originals


def assigned(notebook: Notebook, cell: str, *out: str) -> tuple[RankResults, list[str]]:
    """Run a cell on a rank and assign its results; return them, and the warnings."""
    results, originals = ran(notebook, cell, *out)
    return results, assign(results, out, notebook.names, originals)


def run(notebook: Notebook, cell: str, *out: str) -> tuple[list[str], Any]:
    """Run a cell on a rank; return the warnings, and the value."""
    results, warnings = assigned(notebook, cell, *out)
    assert not results.errors, results.errors
    return warnings, results.value()


OTHER_CLASSES = """
import collections, dataclasses, enum
Pair = collections.namedtuple("Point", "x y")
Record = dataclasses.make_dataclass("Row", ["a"])
Colour = enum.Enum("Hue", "RED GREEN")
def tagged(cls):
    class Tagged(cls): tag = 1
    return Tagged
@tagged
class Item: pass
class Listing(type):
    classes = {}
    def __new__(meta, name, bases, body):
        cls = meta.classes[name] = super().__new__(meta, name, bases, body)
        return cls
class Listed(metaclass=Listing): pass
listed = Listed()
"""


def test_objects_of_classes_with_other_names_are_of_the_notebooks_classes(
    notebook: Notebook,
) -> None:
    notebook.cell(OTHER_CLASSES)
    cell = "all = Pair(1, 2), Record(3), Colour.RED, Item(), listed\nall"
    _, value = run(notebook, cell, "all", "listed")
    for found in (notebook.names["all"], value):
        pair, record, colour, item, listed = found
        assert type(pair) is notebook.names["Pair"] and record == notebook.names["Record"](3)
        assert colour is notebook.names["Colour"].RED and type(item) is notebook.names["Item"]
        assert type(listed) is notebook.names["Listed"]
    run(notebook, "Point = Hue = Pair; del Pair; all = Point(1, 2), Hue(3, 4)", "all")
    assert {type(pair) for pair in notebook.names["all"]} == {notebook.names["Pair"]}


IMMUTABLE = """
class Point(tuple):
    def __new__(cls, x, y=0): return super().__new__(cls, (x, y))
class Parts(tuple):
    def __new__(cls, *parts): return super().__new__(cls, parts)
class Meters(float):
    def __new__(cls, value, unit):
        self = super().__new__(cls, value * unit)
        self.unit = unit
        return self
class Name(str):
    def __new__(cls, first, last): return super().__new__(cls, f"{first} {last}")
class Wave(complex):
    def __new__(cls, polar): return super().__new__(cls, *polar)
class Unique(int):
    def __new__(cls, text): return super().__new__(cls, len(text))
    def __getnewargs__(self): return ("a" * self,)
"""


@pytest.mark.parametrize(
    "value",
    ["Point(1, 2)", "Parts(1, [2])", "Meters(3, 100)", "Name('A', 'B')", "Wave((1, 2))", "Unique('ab')"],
)  # fmt: skip
def test_immutable_objects_keep_their_contents(notebook: Notebook, value: str) -> None:
    notebook.cell(IMMUTABLE)
    notebook.cell(f"x = {value}; x.tag = 1; before = x")
    cell = f"x == {value} and type(x) is type({value}) and vars(x)"
    warnings, found = run(notebook, f"y = [x]\n{cell}", "y")
    assert warnings == [] and found == vars(notebook.names["before"])
    notebook.cell("(x,) = y\nassert (x, type(x), vars(x)) == (before, type(before), vars(before))")


def test_an_array_with_gaps_comes_back_read_only(notebook: Notebook) -> None:
    notebook.cell("import numpy as np")
    run(notebook, "x, y = np.eye(4)[::2], np.eye(4)[::2]\nx.flags.writeable = False", "x", "y")
    x, y = notebook.names["x"], notebook.names["y"]
    assert (x.flags.writeable, y.flags.writeable, x.tolist()) == (False, True, y.tolist())


def test_a_model_is_updated_in_place(notebook: Notebook) -> None:
    notebook.cell(NET)
    net, weight = notebook.names["net"], notebook.names["weight"]
    warnings, _ = run(
        notebook,
        "with torch.no_grad(): net.first.weight.fill_(7); net.norm.running_mean += 2\n"
        "net.history.append(0.5); net.eval(); del net.scratch\n"
        "net.first.register_forward_hook(print)",
        "net",
    )
    assert warnings == [] and notebook.names["net"] is net and net.first.weight is weight
    assert weight.unique().tolist() == [7] and net.norm.running_mean.tolist() == [2, 2]
    assert net.history == [0.5] and not net.training and not hasattr(net, "scratch")
    assert net.layers == [net.first] and len(net.first._forward_hooks) == 1
    notebook.cell(TRAINS)


@pytest.mark.parametrize("out", ["net,opt", "opt,net", "net,opt,sched"])
def test_what_belongs_together_stays_together(notebook: Notebook, out: str) -> None:
    notebook.cell(NET)
    warnings, _ = run(notebook, "step(); sched.step()", *out.split(","))
    assert warnings == []
    notebook.cell("assert opt.state[weight]['step'] == 1 and sched.optimizer is opt")
    notebook.cell("assert opt.param_groups[0]['lr'] == 0.05")
    notebook.cell(TRAINS)


@pytest.mark.parametrize(
    ("cell", "out", "holds"),
    [
        ("opt = torch.optim.SGD(net.parameters(), lr=1.0)", "net,opt,sched", ""),
        ("opt.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})", "net,opt",
         "len(opt.param_groups) == 2"),
        ("sched = torch.optim.lr_scheduler.StepLR(opt, 5)", "net,opt,sched",
         "sched.optimizer is opt and sched.step_size == 5"),
        ("state = {'model': net, 'layer': net.first}", "net,state",
         "state['model'] is net and state['layer'] is net.first"),
        ("net.norm = nn.Linear(2, 2); opt.add_param_group({'params': net.norm.parameters()})",
         "net,opt", "opt.param_groups[1]['params'][0] is net.norm.weight"),
        ("net.norm = net.first", "net", "net.norm is net.first"),
        ("net.second = nn.Linear(3, 2); net.second.weight = net.first.weight", "net",
         "net.second.weight is weight"),
    ],
)  # fmt: skip
def test_new_objects_refer_to_the_notebooks(
    notebook: Notebook, cell: str, out: str, holds: str
) -> None:
    notebook.cell(NET)
    net = notebook.names["net"]
    warnings, _ = run(notebook, cell, *out.split(","))
    assert warnings == [] and notebook.names["net"] is net
    notebook.cell(f"assert {holds or True}\n{TRAINS}")


def test_weights_that_are_untied_are_untied(notebook: Notebook) -> None:
    notebook.cell(NET + "net.second = nn.Linear(3, 2); net.second.weight = weight")
    cell = """
        net.second.weight = nn.Parameter(weight.detach().clone())
        with torch.no_grad(): weight.fill_(1); net.second.weight.fill_(2)
    """
    run(notebook, cell, "net")
    notebook.cell("assert weight.unique() == 1 and net.second.weight.unique() == 2")


def test_compiled_models_and_closures_see_the_new_weights(notebook: Notebook) -> None:
    notebook.cell(NET + "fast = torch.compile(net.first, backend='eager')\n"
                  "net.call = lambda x: net.first(x)")  # fmt: skip
    fill = "with torch.no_grad(): fast.weight.fill_(7); fast.bias.fill_(0)"
    assert run(notebook, fill, "fast", "net")[0] == []
    notebook.cell("assert fast._orig_mod is net.first and weight.unique() == 7")


@pytest.mark.parametrize(
    "used", ["lambda model=net: (model, other)", "made(net, other)", "type('Own', (), {'model': net})"]
)  # fmt: skip
def test_a_model_that_a_function_or_class_holds_is_updated_in_place(
    notebook: Notebook, used: str
) -> None:
    notebook.cell(NET + "other = np.zeros(2)\ndef made(*parts): return lambda: parts\n")
    notebook.cell(f"used = {used}; same = net")
    _, value = run(notebook, "other += 1; weight.data.fill_(5); (other, used)[0]", "net")
    notebook.cell("assert net is same and weight.unique() == 5 and other.sum() == 0" + TRAINS)
    assert value.tolist() == [1, 1]


def test_memory_that_is_parted_is_parted(notebook: Notebook) -> None:
    notebook.cell(NET)
    notebook.cell("""
        a, b = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
        vector, seen = torch.ones(4), torch.ones(4)
        for one in (a, b): nn.utils.vector_to_parameters(vector, one.parameters())
        left, right = seen[:2], seen[2:]
    """)
    run(notebook, "for i, one in enumerate((a, b)):\n"
        "    nn.utils.vector_to_parameters(torch.full((2,), 2. + i), one.parameters())\n"
        "left.fill_(5); right.fill_(6)", "a", "b", "left", "right")  # fmt: skip
    notebook.cell("assert a.weight.tolist() == [[2, 2]] and b.weight.tolist() == [[3, 3]]")
    notebook.cell("assert seen.tolist() == [5, 5, 6, 6]")


@pytest.mark.parametrize("model", ["nn.LazyLinear(3)", "net"])
def test_odd_tensors_do_not_stop_the_assignment(notebook: Notebook, model: str) -> None:
    notebook.cell(
        NET + "net.register_buffer('wide', torch.ones(1).expand(4))\n"
        "net.register_buffer('rows', torch.eye(2).to_sparse_csr())\n"
        "net.register_buffer('coo', torch.eye(2).to_sparse()); coo = net.coo\n"
        "jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)\n"
        "net.register_buffer('jagged', jagged)\n"
        "base = torch.ones(4, requires_grad=True); part, _ = base.chunk(2)\n"
        "masked = old = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))\n"
        f"with torch.inference_mode(): odd = torch.ones(2)\nlazy = {model}"
    )
    cell = """
        odd, lazy, last = odd + 1, lazy, 5
        with torch.no_grad(): weight.fill_(7); part += 1; masked.get_data().fill_(2)
        net.rows.values().mul_(3); net.coo.mul_(3); net.jagged = net.jagged * 3
    """
    names = ("odd", "lazy", "last", "net", "part", "masked")
    assert run(notebook, cell, *names)[0] == []
    notebook.cell("assert last == 5 and odd.tolist() == [2, 2] and base.tolist() == [2, 2, 1, 1]")
    notebook.cell("assert part.sum() == 4 and masked.get_data().sum() == 4 and masked is not old")
    notebook.cell("assert net.first.weight is weight and weight.unique() == 7")
    notebook.cell(
        "assert net.rows.to_dense().sum() == coo.to_dense().sum() == 6; assert net.coo is coo"
    )
    notebook.cell(f"assert net.jagged.values().sum() == 9\n{TRAINS}")


@pytest.mark.parametrize("change", ["net.bfloat16()", "net.double(); net.requires_grad_(False)"])
def test_parameters_of_another_type_stay_those_of_the_optimizer(
    notebook: Notebook, change: str
) -> None:
    notebook.cell(NET)
    assert run(notebook, change, "net")[0] == []
    notebook.cell("assert net.first.weight is weight and weight.dtype != torch.float32")


@pytest.mark.parametrize(
    "cell",
    ["net.norm = nn.BatchNorm1d(2, affine=True)",
     "torch.utils.swap_tensors(net.norm.weight, nn.Parameter(torch.ones(2, device='meta')))"],
)  # fmt: skip
def test_parameters_that_are_replaced_leave_an_optimizer_that_is_named(
    notebook: Notebook, cell: str
) -> None:
    notebook.cell(NET)
    net = notebook.names["net"]
    (warning,), _ = run(notebook, f"import torch\n{cell}", "net")
    assert notebook.names["net"] is net
    assert "`net` has new parameters or modules, and `opt`, `sched` still refer" in warning
    assert run(notebook, "net.eval(); del net.norm", "net")[0] == [], "nothing replaces it"


def test_parameters_without_memory_are_replaced_by_those_that_have_some(
    notebook: Notebook,
) -> None:
    notebook.cell(NET + "net.first.to('meta')")
    cell = """
        import torch
        full = torch.nn.Parameter(torch.full((2, 3), 7.0))
        torch.utils.swap_tensors(net.first.weight, full)
    """
    run(notebook, cell, "net")
    notebook.cell("assert net.first.weight.unique() == 7")


OWN_REDUCE = """
class Own(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
    def __reduce__(self):
        return Own, (self.weight.tolist(),), {"note": 1}
"""


@pytest.mark.parametrize(
    ("model", "warns"),
    [("Own([1.0])", True), ("torch.jit.script(nn.Dropout())", True), ("torch.compile(net)", False)],
)
def test_an_object_that_its_class_makes_whole_comes_back_whole(
    notebook: Notebook, model: str, warns: bool
) -> None:
    notebook.cell(NET + OWN_REDUCE + f"model = {model}; others = [model]")
    cell = "model.eval()\nwith torch.no_grad(): [one.fill_(7) for one in model.parameters()]"
    warnings, _ = run(notebook, cell, "model")
    assert len(warnings) == warns and all("`others`" in text for text in warnings)
    notebook.cell("assert (model is not others[0]) == " + str(warns))
    notebook.cell("assert all((one == 7).all() for one in model.parameters())")
    notebook.cell("assert isinstance(model, Own) or not model.training")


TRAINER = """
class Trainer:
    def __init__(self, **parts): self.__setstate__(parts)
    def __getstate__(self): return {"net": self.net, "steps": self.steps}
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.total = float(self.net.first.weight.sum() + self.steps.sum())
class Total:
    def __init__(self, net): self.net, self.total = net, float(net.first.weight.sum())
    def __reduce__(self): return Total, (self.net,)
"""


def test_code_that_unpickling_runs_sees_the_new_contents(notebook: Notebook) -> None:
    notebook.cell(NET + TRAINER + "del opt, sched; steps = np.zeros(2)")
    notebook.cell("trainer, total = Trainer(net=net, steps=steps), Total(net)")
    cell = """
        with torch.no_grad(): weight.fill_(7)
        net.norm = nn.Linear(2, 2); steps += 1
    """
    assert run(notebook, cell, "trainer", "total")[0] == []
    notebook.cell("assert trainer.total == 44 and total.total == 42 and trainer.steps is steps")
    notebook.cell("assert trainer.net is net and weight.unique() == 7")
    notebook.cell("assert trainer.opt.param_groups[0]['params'] == [*net.parameters()]")


def test_an_object_that_is_assigned_anew_leaves_the_old_one_alone(notebook: Notebook) -> None:
    notebook.cell(NET)
    net, weight = notebook.names["net"], notebook.names["weight"].detach().clone()
    (warning,), _ = run(notebook, "net = copy.deepcopy(net); net.first.weight.data += 1", "net")
    assert notebook.names["net"] is not net and bool((net.first.weight == weight).all())
    assert "`net` is a new object, and `opt`, `sched`" in warning
    assert "--out net,opt,sched" in warning


@pytest.mark.parametrize(
    "other",
    ["[net]", "{'models': [net, opt]}", "functools.partial(print, net)", "net.forward",
     "types.SimpleNamespace(model=net.first)", "[opt]", "lambda model=net: model"],
)  # fmt: skip
def test_stale_references_in_containers_are_named(notebook: Notebook, other: str) -> None:
    notebook.cell(NET + f"del sched\nimport functools, types\nother = {other}")
    notebook.cell("fresh = [1, {'weights': torch.ones(1)}, step]")
    notebook.cell("""
        class Jobs(list):
            def __iter__(self):
                while self: yield self.pop()
        jobs = Jobs([net])
    """)
    (warning,), _ = run(notebook, "net = copy.deepcopy(net)", "net")
    assert "`other`" in warning and "`fresh`" not in warning and "`step`" not in warning
    assert "`jobs`" in warning and len(notebook.names["jobs"]) == 1


ANSWERING = {
    "an optimizer that answers every attribute": """
        class Own(torch.optim.SGD):
            def __getattr__(self, name): return lambda *args: self
        own = Own([torch.ones(1)])
    """,
    "a module that raises other errors": """
        class Own(nn.Module):
            def __getattr__(self, name): return self._modules[name]
        own = Own()
    """,
}


@pytest.mark.parametrize("kind", ANSWERING)
def test_objects_are_updated_without_asking_them_for_attributes(
    notebook: Notebook, kind: str
) -> None:
    notebook.cell("import torch\nfrom torch import nn")
    notebook.cell(ANSWERING[kind])
    notebook.cell("own.steps = 0; same = own")
    assert run(notebook, "own.steps += 1", "own")[0] == []
    notebook.cell("assert own is same and own.steps == 1")


def test_only_a_class_says_how_its_instances_get_their_state() -> None:
    class Answers:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: self

    answers = Answers()
    identity.restore_state(answers, {"steps": 1})
    assert vars(answers) == {"steps": 1}


BRITTLE = """
class Brittle(nn.Linear):
    def __setstate__(self, state):
        super().__setstate__(state)
        if "spoilt" in state: raise KeyError("spoilt")
brittle = Brittle(2, 2)
"""


def test_an_update_that_fails_changes_nothing(notebook: Notebook) -> None:
    notebook.cell(NET + BRITTLE + "net.inner = brittle")
    net, brittle = notebook.names["net"], notebook.names["brittle"]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    cell = """
        brittle.spoilt = 1; net.history.append(1); net.norm.register_buffer("extra", torch.ones(1))
        with torch.no_grad(): [one.fill_(7) for one in net.parameters()]
    """
    results, _ = assigned(notebook, cell, "net", "brittle")
    assert results.errors.keys() == {"net", "brittle"}
    assert notebook.names["net"] is net and notebook.names["brittle"] is brittle
    after = net.state_dict()
    assert after.keys() == before.keys() and net.history == [] and not hasattr(brittle, "spoilt")
    assert all(bool((after[name] == value).all()) for name, value in before.items())
    notebook.cell(TRAINS)


def test_an_object_that_refuses_its_new_state_is_replaced(notebook: Notebook) -> None:
    notebook.cell(NET)
    notebook.cell("""
        class Once(nn.Linear):
            def __setstate__(self, state):
                if vars(self): raise KeyError("it has a state")
                super().__setstate__(state)
        net.inner = once = Once(2, 2)
    """)
    net, weight = notebook.names["net"], notebook.names["weight"]
    run(notebook, "weight.data.fill_(7)", "net", "once")
    assert notebook.names["net"] is not net and weight.unique().tolist() != [7]
    notebook.cell("assert net.inner is once and net.first.weight.unique() == 7")


def test_an_interrupt_of_the_classes_own_code_changes_nothing(notebook: Notebook) -> None:
    notebook.cell(NET)
    notebook.cell("""
        class Slow:
            is_stopped = False
            def __setstate__(self, state):
                self.__dict__.update(state)
                if Slow.is_stopped: raise KeyboardInterrupt
        slow, steps = Slow(), np.zeros(1)
        slow.net, net.tag, weight.tag, weight.grad = net, 1, 1, torch.ones(2, 3)
    """)
    before = notebook.names["weight"].detach().clone()
    cell = "net.tag = weight.tag = 2; net.double(); weight.data.fill_(7); steps += 1; slow"
    results, originals = ran(notebook, cell, "net", "steps", "slow")
    notebook.cell("Slow.is_stopped = True")
    with pytest.raises(KeyboardInterrupt):
        assign(results, ("net", "steps", "slow"), notebook.names, originals)
    assert torch.equal(notebook.names["weight"], before)
    notebook.cell("assert net.tag == weight.tag == 1 and steps == 0 and weight.grad.sum() == 6")
    notebook.cell(TRAINS)


def test_results_apart_from_one_that_cannot_be_opened_are_new_objects(notebook: Notebook) -> None:
    notebook.cell(NET + BRITTLE + "shared = nn.Linear(2, 2)\npair = [brittle, shared]")
    cell = "brittle.spoilt = 1\nwith torch.no_grad(): weight.fill_(7); shared.weight.fill_(7)"
    before = dict(notebook.names)
    results, warnings = assigned(notebook, cell, "net", "pair", "shared")
    assert results.errors.keys() == {"pair"}
    assert notebook.names["pair"] is before["pair"]
    for name in ("net", "shared"):
        assert notebook.names[name] is not before[name]
    assert notebook.names["net"].first.weight.unique().tolist() == [7]
    assert notebook.names["shared"].weight.unique().tolist() == [7]
    assert "`net` is a new object, and " in warnings[0] and "`opt`" in warnings[0]


def test_the_value_alone_changes_nothing(notebook: Notebook) -> None:
    notebook.cell(NET)
    weight = notebook.names["weight"].detach().clone()
    _, value = run(notebook, "weight.data += 1\nnet")
    assert value is not notebook.names["net"]
    assert bool((notebook.names["weight"] == weight).all())
    _, value = run(notebook, "weight.data += 1\nnet", "net")
    assert value is notebook.names["net"]


def test_tensors_and_arrays_are_updated_in_place(notebook: Notebook) -> None:
    notebook.cell("import numpy as np, torch\narray, tensor = np.zeros(3), torch.zeros(3)\n"
                  "same, alias = array, tensor")  # fmt: skip
    run(notebook, "array += 1; tensor += 1", "array", "tensor")
    notebook.cell("assert same is array and alias is tensor and array.sum() == alias.sum() == 3")
    run(notebook, "array = np.ones(4); tensor = tensor + 1", "array", "tensor")
    notebook.cell("assert len(array) == 4 and same.sum() == 3 and alias.sum() == 3")


@pytest.mark.parametrize(
    ("made", "change", "found"),
    [
        (
            "np.ma.array([1, 2, 3], mask=[0, 1, 0])",
            "array += 1; array[0] = np.ma.masked",
            [None, None, 4],
        ),
        ("np.ma.zeros(2)", "array += 1; array.mask = [0, 1]", [1, None]),
        ("np.rec.array([(1, 2)], names='a,b')", "array.b = 5", [(1, 5)]),
        ("np.matrix([[1, 2]])", "array *= 2", [[2, 4]]),
        ("np.zeros(2).view(Shifted)", "array += 1; array.unit = 'm'", [1, 1]),
    ],
)
def test_arrays_of_subclasses_are_updated_in_place(
    notebook: Notebook, made: str, change: str, found: list[Any]
) -> None:
    notebook.cell(f"""
        import numpy as np
        class Shifted(np.ndarray):
            unit = "cm"
            def __setitem__(self, key, value): super().__setitem__(key, value + 1)
        array = same = {made}
    """)
    assert run(notebook, change, "array") == ([], None)
    notebook.cell("assert same is array and getattr(array, 'unit', 'm') == 'm'")
    assert notebook.names["array"].tolist() == found


def test_a_memory_map_is_replaced_by_a_plain_array(notebook: Notebook, tmp_path: Path) -> None:
    path = str(tmp_path / "map")
    notebook.cell(f"import numpy as np\nsame = mapped = np.memmap({path!r}, shape=2, mode='w+')")
    assert run(notebook, "mapped += 1", "mapped") == ([], None)
    notebook.cell("assert same.tolist() == [0, 0] and mapped.tolist() == [1, 1]")
    notebook.cell("assert type(mapped) is np.ndarray")


@pytest.mark.parametrize("part", ["[::2]", "[::-1]", ".reshape(2, 3).T[1:]"])
def test_parts_of_an_array_are_updated_in_place(notebook: Notebook, part: str) -> None:
    notebook.cell(f"import numpy as np\nwhole = np.zeros(6)\npart = whole{part}; same = part")
    run(notebook, "part += 1", "part")
    notebook.cell(f"assert part is same and (part == 1).all() and (whole{part} == 1).all()")
    run(notebook, "whole += 1; part += 1", "whole", "part")
    notebook.cell(f"assert part is same and (part == 3).all() and (whole{part} == 3).all()")


def test_attributes_of_tensors_come_back(notebook: Notebook) -> None:
    notebook.cell(
        NET + "weight.scale, plain = 0.1, torch.zeros(1); plain.tag = 'old'; same = plain"
    )
    run(notebook, "weight.scale = 0.5; weight.extra = 1; plain.tag = 'new'", "net", "plain")
    notebook.cell("assert weight.scale == 0.5 and weight.extra == 1 and same.tag == 'new'")


@pytest.mark.parametrize("out", [("net", "opt"), ("handles", "net", "opt")])
def test_handles_of_hooks_remove_them(notebook: Notebook, out: tuple[str, ...]) -> None:
    notebook.cell(f"""{NET}
seen = []
handles = [net.register_forward_hook(lambda *_, **k: seen.append(1), with_kwargs=True)]
handles += [opt.register_step_post_hook(lambda *_: seen.append(2))]
""")
    run(notebook, "import torch.distributed.tensor\nstep()", *out)
    net, opt = notebook.names["net"], notebook.names["opt"]
    assert len(net._forward_hooks) == len(opt._optimizer_step_post_hooks) == 1
    notebook.cell("for handle in handles: handle.remove()")
    assert len(net._forward_hooks) == len(opt._optimizer_step_post_hooks) == 0
    assert len(net._forward_hooks_with_kwargs) == 0


def test_an_optimizer_comes_back_with_hooks_and_attributes(notebook: Notebook) -> None:
    notebook.cell(NET + "calls = []")
    opt = notebook.names["opt"]
    cell = (
        "opt.register_step_post_hook(lambda *args: calls.append(args[0] is opt)); opt.note = 1\n"
        "import warnings; warnings.simplefilter('error'); step(); sched.step()"
    )
    assert run(notebook, cell, "net", "opt", "sched", "calls")[0] == []
    assert notebook.names["opt"] is opt and opt.note == 1
    notebook.cell("step(); sched.step(); assert calls == [True, True], calls")
    notebook.cell(TRAINS)


def test_frames_over_the_memory_of_a_result_stay_as_they_are(notebook: Notebook) -> None:
    notebook.cell("""
        import pandas as pd
        raw = pd.DataFrame({"a": [1.0, 2.0], "when": pd.to_datetime(["2024", "2025"])})
        clean = raw.assign(b=0)
        raw_column = raw.a
    """)
    cell = "clean.loc[0, 'a'] = 9.0\nclean.loc[0, 'when'] = clean.when[1]"
    assert run(notebook, cell, "clean") == ([], None)
    names = notebook.names
    assert names["clean"].a.tolist() == [9, 2] and names["clean"].when.dt.year[0] == 2025
    assert names["raw"].a.tolist() == [1, 2] and names["raw"].when.dt.year[0] == 2024
    assert run(notebook, "view = clean.copy(deep=False)", "view", "clean") == ([], None)
    notebook.cell("view.loc[0, 'a'] = 5.0")
    assert names["clean"].a.tolist() == [9, 2] and names["raw_column"].tolist() == [1, 2]
