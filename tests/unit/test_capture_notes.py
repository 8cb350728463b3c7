"""What the user is told about objects that ranks get without something that the notebook's have."""

from __future__ import annotations

import sys
import types

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from tests.capture_rig import Notebook


def test_gradients_inside_of_other_objects(notebook: Notebook) -> None:
    notebook.cell("""
        import torch
        class Layer: pass
        layer = Layer()
        layer.weight = torch.ones(2, requires_grad=True)
        layer.out = layer.weight * 2
        layer.out.retain_grad()
        layers = [layer]
    """)
    cell = "layers[0].out.grad.mean()"
    assert notebook.capture(cell).hints == ()
    notebook.cell("layer.out.sum().backward()")
    (hint,) = notebook.capture(cell).hints
    assert "those of `layers` are None on the ranks" in hint
    assert notebook.capture("layers[0].out.sum()").hints == ()
    assert notebook.capture("layer.out.sum().backward(); layer.weight.grad", seed=1).hints == ()
    again = "layer.weight.grad.zero_(); (layer.weight * 2).sum().backward()"
    assert "those of `layer` are None on the ranks" in notebook.capture(again, seed=1).hints[0]


def test_definitions_do_not_come_back(notebook: Notebook) -> None:
    notebook.cell("""
        class CFG: best = None
        def f(): pass
        def make():
            def inner(): pass
            return inner
        inner = make()
    """)
    (warning,) = notebook.capture("CFG.best = f.calls = 1", out=("CFG", "f")).warnings
    assert warning.startswith(
        "--out `CFG`, `f`: functions and classes of the notebook are not updated"
    )
    for cell, out in (
        ("CFG.best = 1", ()),
        ("class CFG: best = 1", ("CFG",)),
        ("inner", ("inner",)),
    ):
        assert notebook.capture(cell, out=out).warnings == ()


REGISTRATIONS = {
    "@library.register_keras_serializable('p')\ndef f(x): return x": (
        "def load_model(x): return f(x)\nload_model(1)",
        "`f` by library.register_keras_serializable()",
    ),
    "def f(x): return x\nlibrary.register(f)": ("f(1)", "`f` by library.register()"),
    "class Point: pass\nlibrary.tree.register_node(Point, len, print)\nx = Point()": (
        "print(x)",
        "`Point` by library.tree.register_node()",
    ),
    "@library.register_kind\nclass A: pass": ("[A]", "`A` by library.register_kind()"),
    "@library.register_accessor('geo')\nclass G: pass\nx = 1": (
        "x.geo",
        "`geo` by library.register_accessor()",
    ),
    "tqdm = library\ntqdm.pandas()": (
        "class S: progress_apply = 1\nS.progress_apply",
        "`progress_apply` by tqdm.pandas()",
    ),
    "from library import register\n@register(name='b')\ndef b(): pass": (
        "b()",
        "`b` by register()",
    ),
    "class A: pass\nclass B: pass\nlibrary.register('a', A)\nlibrary.pandas.register(A, B)": (
        "library.register('a', A); B()",
        "`A` by library.pandas.register()",
    ),
    "class A: pass\nlibrary.register(A)\nlibrary.register_kind(A)": (
        "A()",
        "`A` by library.register() and `A` by library.register_kind()",
    ),
    "class A: pass\nlibrary.add_safe_globals([A])": (
        "A, library.load",
        "`A` by library.add_safe_globals()",
    ),
    "@library.custom_op('own::scale')\ndef scale(x): pass": (
        "library.own.scale",
        "`own::scale` by library.custom_op()",
    ),
}
SILENT = {
    "def f(x): return x\nbox = [1]\nlibrary.register(box, 'append', f)": "box.append(f(1))",
    "def f(x): return x\nlibrary.register(f)": "library.register(f); f(1)",
    "def f(x): return x\nlibrary.register(print)": "f(1)",
    "class Hooks:\n def register(self, f): self.f = f\nhooks = Hooks()\nf = lambda: 1\nhooks.register(f)": (
        "hooks.f()"
    ),
    "def f(x): return x\ndef never():\n    library.register(f)": "f(1)",
    "def register(f): return f\n@register\ndef f(x): return x": "f(1)",
    "@library.register_keras_serializable('p')\ndef f(x): return x": "f(1)",  # models bring it
    "class A: pass\nlibrary.add_safe_globals([A])": "A()",
    "class A: pass\nlibrary.pandas.register(A)": "from library import pandas\npandas.register(A)",
}
LIBRARY = """
import sys, types
library = sys.modules["library"] = types.ModuleType("library")
exec("def register(*x, **k): return register_kind\\ndef register_kind(x): return x", vars(library))
library.register_accessor = library.pandas = library.add_safe_globals = library.register
library.custom_op, library.load = library.register, print
library.own = types.SimpleNamespace(scale=1)
library.pandas.register = library.register
library.register_keras_serializable = library.register
library.tree = types.SimpleNamespace(register_node=print)
"""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore after the test which module has this name."""
    monkeypatch.setitem(sys.modules, "library", types.ModuleType("library"))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("registers", REGISTRATIONS)
def test_registrations_of_earlier_cells(notebook: Notebook, registers: str) -> None:
    cell, said = REGISTRATIONS[registers]
    notebook.cell(LIBRARY)
    notebook.cell(registers)
    (hint,) = notebook.capture(cell).hints
    assert f"the notebook registered {said}, and the ranks do not" in hint


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("registers", SILENT)
def test_registrations_that_do_not_concern_the_cell(notebook: Notebook, registers: str) -> None:
    notebook.cell(LIBRARY)
    notebook.cell(registers)
    assert notebook.capture(SILENT[registers]).hints == ()


@pytest.mark.parametrize(
    ("cell", "is_noted"),
    [
        ("torch.rand(1)", True),
        ("torch.rand(args.seed)", True),
        ("draw()", True),
        ("dropout(ones)", True),
        ("torch.manual_seed(args.seed); torch.rand(1)", False),
        ("draw_seeded()", False),
        ("len([args.seed])", False),
        ("import os; os.getpid()", False),
    ],
)
def test_seeds_are_noted_where_ranks_draw_without_them(
    notebook: Notebook, cell: str, is_noted: bool
) -> None:
    notebook.cell("""
        import types
        import torch
        torch.manual_seed(1)
        args = types.SimpleNamespace(seed=1)
        dropout, ones = torch.nn.Dropout(), torch.ones(1)
        def draw(): return torch.rand(args.seed)
        def draw_seeded():
            torch.manual_seed(args.seed)
            return draw()
    """)
    hints = notebook.capture(cell).hints
    assert ["torch.manual_seed(1), which does not seed" in hint for hint in hints] == [
        True
    ] * is_noted


def test_a_quiet_gang_leaves_its_notes_to_the_next_one(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_shown_hints", set())
    notebook.cell("import torch; torch.manual_seed(1)")
    captured = notebook.capture("torch.rand(1)")
    shown = [
        bool(launcher._new_hints(captured, JobSpec(quiet=quiet))) for quiet in (True, False, False)
    ]
    assert shown == [True, True, False]
