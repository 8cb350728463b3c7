"""What the user is told about objects that ranks get without something that the notebook's have."""

from __future__ import annotations

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from tests.capture_rig import Notebook


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


@pytest.mark.parametrize(
    ("cell", "is_noted"),
    [
        ("torch.rand(1)", True),
        ("draw()", True),
        ("dropout(ones)", True),
        ("torch.manual_seed(args.seed); torch.rand(1)", False),
        ("draw_seeded()", False),
        ("torch.rand(args.seed)", False),
    ],
)
def test_seeds_are_noted_if_the_code_of_the_ranks_names_none(
    notebook: Notebook, cell: str, is_noted: bool
) -> None:
    notebook.cell("""
        import types
        import torch
        torch.manual_seed(1)
        args = types.SimpleNamespace(seed=1)
        dropout, ones = torch.nn.Dropout(), torch.ones(1)
        def draw(): return torch.rand(1)
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
    notebook.cell("%%time\nimport torch; torch.manual_seed(1)")
    captured = notebook.capture("torch.rand(1)")
    shown = [
        bool(launcher._new_hints(captured, JobSpec(quiet=quiet))) for quiet in (True, False, False)
    ]
    assert shown == [True, True, False]
