"""Objects of common libraries work on ranks as they do in the notebook."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

import hydrogen_magic as hm
from tests.capture_rig import Notebook, Ranks
from tests.gangs import ended, notices_of

pytestmark = pytest.mark.xdist_group("capture")


def test_a_loader_with_persistent_workers(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(8.0))
        options = {"persistent_workers": True, "multiprocessing_context": "fork"}
        loader = DataLoader(data, batch_size=4, num_workers=1, **options)
        before = [batch.sum().item() for batch, in loader]
    """)
    try:
        captured = notebook.capture("before, [batch.sum().item() for batch, in loader]")
    finally:
        notebook.cell("loader._iterator._shutdown_workers(); del loader")
        gc.collect()
    assert ranks.run(captured).value == ([6.0, 22.0], [6.0, 22.0])


def test_operators_of_torch(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        aten, add, mul = torch.ops.aten, torch.ops.aten.add.Tensor, torch.ops.aten.mul
        table = {add: "sum", torch.ops.aten.relu.default: "relu"}
        x = torch.ones(2)
    """)
    captured = notebook.capture(
        "add(x, x).tolist(), mul(x, 3.0).tolist(), aten.neg(x).tolist(), table[torch.ops.aten.add.Tensor]"
    )
    assert ranks.run(captured).value == ([2.0, 2.0], [3.0, 3.0], [-1.0, -1.0], "sum")


def test_normed_and_parametrized_modules(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
        class Own(torch.nn.Linear): pass
        class Symmetric(torch.nn.Module):
            def forward(self, x): return x.triu() + x.triu(1).T
        def linear(): return torch.nn.Linear(2, 2)
        net = torch.nn.Sequential(
            weight_norm(linear()), spectral_norm(linear()), parametrizations.weight_norm(linear()),
            parametrizations.orthogonal(linear()),
            parametrize.register_parametrization(Own(2, 2), "weight", Symmetric()),
        ).eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sample = torch.ones(1, 2)
        expected = net(sample)
        expected.sum().backward()
    """)
    rank = ranks.run(
        notebook.capture(
            """
        shared = zip(net.parameters(), optimizer.param_groups[0]["params"], strict=True)
        same = torch.allclose(net(sample), expected), all(a is b for a, b in shared)
        net(sample).sum().backward()
        optimizer.step()
        changed = not torch.allclose(net(sample), expected)
        import torch.distributed.tensor  # modules are sent back in another way then
        (*same, changed, isinstance(net[-1], Own), net[-1])
        """,
        )
    )
    *checks, layer = rank.value
    assert checks == [True, True, True, True]
    assert torch.equal(layer.weight, layer.weight.T)  # it came back, too


def test_torchscript_shares_its_parameters(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        script = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
        @torch.jit.script
        def double(x): return x * 2
        optimizer = torch.optim.SGD(script.parameters(), lr=0.1)
        sample = torch.ones(2, 2)
        expected = script.eval()(sample), traced(sample), double(sample)
    """)
    rank = ranks.run(
        notebook.capture("""
        same = [torch.equal(f(sample), y) for f, y in zip([script, traced, double], expected)]
        shared = zip(script.parameters(), optimizer.param_groups[0]["params"], strict=True)
        same, all(a is b for a, b in shared), script.training
        """)
    )
    assert rank.value == ([True] * 3, True, False)


def test_hooks_of_tensors(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
        handles = [weight.register_hook(lambda g: g * 3), x.register_hook(lambda g: g * 5)]
        seen = []
        handles.append(weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight)))
        part = torch.ones(1_000_000)[:2].requires_grad_()
        handles.append(part.register_hook(lambda g: g * 7))
    """)
    captured = notebook.capture("""
        (weight * x * part).sum().backward()
        weight.grad, x.grad, part.grad, seen
    """)
    rank = ranks.run(captured)
    assert [value.tolist() for value in rank.value[:3]] == [[3, 3], [5, 5], [7, 7]]
    assert rank.value[3] == [True]
    assert sum(item.nbytes for item in captured.inventory) < 10_000  # the part alone


def test_a_finalizer_may_collect_garbage_while_what_was_pickled_is_released() -> None:
    """Such as when another thread captures, too. It would crash the process."""
    code = """
import gc, io
from hydrogen_magic.serialization.pickler import Pickler
class Part:
    pass
class Final:
    def __init__(self, n): self.n = n
    def __reduce__(self): return int, (self.n,)
    def __del__(self):
        self.again = [Part() for _ in range(300)]  # where others were
        gc.collect()
for _ in range(4):
    pickler = Pickler(io.BytesIO(), 5)
    pickler.dump([[Final(n), [n]] if n % 7 == 0 else [[n], {"a": n}] for n in range(1500)])
    pickler.clear_memo()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize(
    "made", ["accelerator = Accelerator(cpu=True)", "args = [Arguments('out')]"]
)
def test_what_accelerate_has_made_in_the_notebook_is_alone(notebook: Notebook, made: str) -> None:
    pytest.importorskip("transformers")
    notebook.cell("from accelerate import Accelerator, PartialState")
    notebook.cell("import functools\nfrom transformers import TrainingArguments")
    notebook.cell("Arguments = functools.partial(TrainingArguments, use_cpu=True, report_to=[])")
    notebook.cell(made)
    try:
        name = made.partition(" ")[0]
        [warning] = notebook.capture(name).warnings
    finally:
        notebook.cell("PartialState._reset_state()")
        notebook.cell("import accelerate.state as s; s.AcceleratorState._reset_state(True)")
    assert f"Accelerate has made `{name}` for the notebook's process alone" in warning


def test_what_ranks_add_to_an_accumulator_of_spark_is_said_to_stay_there() -> None:
    accumulators = pytest.importorskip("pyspark.accumulators")
    added = accumulators.Accumulator(7, 0, accumulators.AddingAccumulatorParam(0))
    try:
        gang = ended(hm.launch(added.add, 1, np=2))
    finally:
        del accumulators._accumulatorRegistry[7]
    gang.raise_for_state()
    assert "accumulator of Spark stays on each rank: return it" in notices_of(gang)


def test_loggers_of_loguru_are_those_of_the_rank(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("from loguru import logger\nlog = logger.bind(job=1)")
    captured = notebook.capture("log._core is logger._core, log._options[-1]")
    assert ranks.run(captured).value == (True, {"job": 1})


def test_models_of_sqlalchemy(notebook: Notebook, ranks: Ranks) -> None:
    pytest.importorskip("sqlalchemy")
    notebook.cell("""
        from sqlalchemy import ForeignKey, create_engine
        from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship
        class Base(DeclarativeBase): pass
        class Run(Base):
            __tablename__ = "runs"
            id: Mapped[int] = mapped_column(primary_key=True)
            steps: Mapped[list["Step"]] = relationship()
        class Step(Base):
            __tablename__ = "steps"
            id: Mapped[int] = mapped_column(primary_key=True)
            run: Mapped[int] = mapped_column(ForeignKey("runs.id"))
            loss: Mapped[float]
    """)
    captured = notebook.capture("""
        engine = create_engine("sqlite://")
        Base.metadata.create_all(engine)
        with Session(engine) as session:
            session.add(Run(steps=[Step(loss=0.5), Step(loss=0.25)]))
            session.commit()
            found = session.query(Step).filter(Step.loss < 0.3).one().loss
        found, sorted(Base.metadata.tables)
    """)
    assert ranks.run(captured).value == (0.25, ["runs", "steps"])
