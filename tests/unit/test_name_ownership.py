"""The rules by which a session's cells use the notebook's value of a name, or the ranks'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.capture.ownership import (
    Action,
    CellNames,
    SessionNames,
    SessionUse,
    Version,
)
from hydrogen_magic.core.events import HeldName, NamesChanged
from hydrogen_magic.errors import CaptureError

BOTH = frozenset({0, 1})


def decide(
    names: SessionNames, push: str = "", out: str = "", **versions: Version
) -> dict[str, Action]:
    """Return the actions before a cell on both ranks, which runs if there is no conflict."""
    asked = [frozenset(filter(None, text.split(","))) for text in (push, out)]
    use = use_of(names, CellNames(versions, BOTH, *asked))
    actions = {name: decision.action for name, decision in use.decisions.items()}
    if Action.CONFLICT not in actions.values():
        run(names, use)
    return actions


def use_of(names: SessionNames, cell: CellNames, where: str = "Cell In[5]") -> SessionUse:
    return SessionUse(cell, names.decide(cell), {}, names, where)


def run(names: SessionNames, use: SessionUse, **did: tuple[str, ...]) -> None:
    """Let the ranks of a cell report ``did``."""
    received = {name: HeldName("value", "int") for name in use.of(Action.SEND, Action.FILL)}
    names.after_cell(use, {rank: report(received, **did) for rank in use.cell.ranks})


def report(
    received: Mapping[str, HeldName],
    assigned: tuple[str, ...] = (),
    changed: tuple[str, ...] = (),
    uncertain: tuple[str, ...] = (),
    deleted: tuple[str, ...] = (),
) -> NamesChanged:
    bound = dict.fromkeys(assigned, HeldName("value", "int"))
    return NamesChanged(0.0, 0, received, bound, deleted, changed, uncertain, 0, None, 0)


def ranks_did(
    names: SessionNames, before: Mapping[str, Version] | None = None, **did: tuple[str, ...]
) -> None:
    """Let both ranks change names in a cell that uses none; ``before``: the notebook's versions of them."""
    run(names, SessionUse(CellNames({}, BOTH), {}, before or {}, names, "Cell In[5]"), **did)


@dataclass
class Side:
    """What one side has of the name, and whether it changed it since both had the same."""

    value: int | None = None
    """A number for each content there ever was."""
    identity: int = 0
    did_change: bool = False


NOTEBOOK = ("notebook assigns", "notebook assigns the same", "notebook changes")
CELLS = ("cell", "cell --push", "cell --out")
STEPS = st.lists(st.sampled_from((*NOTEBOOK, "ranks assign", "ranks change", *CELLS)), max_size=20)


@settings(max_examples=300)
@given(STEPS)
def test_each_side_sees_the_value_of_the_one_that_changed_it(steps: list[str]) -> None:
    names, notebook, ranks = SessionNames(), Side(), Side()
    for number, step in enumerate(steps, start=1):
        if step.startswith("notebook"):
            _change_in_notebook(notebook, step, number)
        elif step.startswith("ranks"):
            _change_on_ranks(names, notebook, ranks, step, number)
        elif notebook.value is not None:
            _run_cell(names, notebook, ranks, step)


def _version(side: Side) -> Version:
    return Version(str(side.value), side.identity)


def _change_in_notebook(notebook: Side, step: str, number: int) -> None:
    if notebook.value is None and step != "notebook assigns":
        return
    if "same" not in step:
        notebook.value = number
    if "assigns" in step:
        notebook.identity = number
    notebook.did_change = True


def _change_on_ranks(
    names: SessionNames, notebook: Side, ranks: Side, step: str, number: int
) -> None:
    if ranks.value is None and step == "ranks change":
        return
    before = {} if notebook.value is None else {"x": _version(notebook)}
    is_assigned = step == "ranks assign"
    ranks_did(names, before, **{"assigned" if is_assigned else "changed": ("x",)})
    ranks.value, ranks.did_change = number, True
    if is_assigned:  # in the cell's own view of both sides
        notebook.did_change = False


def _run_cell(names: SessionNames, notebook: Side, ranks: Side, step: str) -> None:
    push, out = ("x" if option in step else "" for option in ("push", "out"))
    wins = notebook if push or ranks.value is None or not ranks.did_change else ranks
    is_conflict = notebook.did_change and ranks.did_change and ranks.value is not None
    (action,) = decide(names, push, out, x=_version(notebook)).values()
    assert (action is Action.CONFLICT) == (is_conflict and not push and not out)
    if action is Action.CONFLICT:
        return
    if action is Action.SEND:
        ranks.value = notebook.value
    assert ranks.value == wins.value
    if action is Action.SEND or not ranks.did_change:
        notebook.did_change = ranks.did_change = False
    if out:
        notebook.value = ranks.value
        names.brought_back("x", _version(notebook), BOTH)
        notebook.did_change = ranks.did_change = False


def test_the_error_names_both_sides_and_offers_both_ways_out() -> None:
    names = SessionNames()
    decide(names, a=Version("1"), b=Version("1"))
    ranks_did(names, {"b": Version("1")}, changed=("a",), assigned=("b",))
    cell = CellNames({"a": Version("2"), "b": Version("2", identity=2)}, BOTH)
    with pytest.raises(CaptureError) as caught:
        use_of(names, cell).check()
    assert str(caught.value).splitlines() == [
        "`a`: the ranks changed it in Cell In[5], and the notebook changed it",
        "`b`: the ranks assigned it in Cell In[5], and the notebook assigned it",
        "--push a,b sends the notebook's values; --out a,b keeps those of the ranks and brings them back",
    ]


def test_a_function_defined_later_replaces_that_of_the_ranks() -> None:
    names = SessionNames()
    ranks_did(names, assigned=("loss",))
    assert decide(names, loss=Version("new", is_code=True)) == {"loss": Action.SEND}


def test_ranks_that_were_not_in_earlier_cells_get_what_they_lack() -> None:
    names = SessionNames()
    x, newer = Version("1"), Version("2")

    def on_rank_0(version: Version, **did: tuple[str, ...]) -> None:
        run(names, use_of(names, CellNames({"x": version}, frozenset({0}))), **did)

    decide(names, x=x)
    on_rank_0(newer)
    assert decide(names, x=newer) == {"x": Action.SEND}, "rank 1 has the value before"
    on_rank_0(Version("3"))
    on_rank_0(Version("3"), changed=("x",))
    (found,) = names.decide(CellNames({"x": Version("3")}, frozenset({0, 1, 2}))).values()
    assert str(found) == "sent to some ranks: ranks without it: 2; ranks with an earlier value: 1"
    assert found.ranks == {1, 2}
    assert decide(names, x=Version("3")) == {"x": Action.FILL}
    assert decide(names, x=Version("3")) == {"x": Action.KEEP}


def test_a_value_that_cannot_be_compared_is_in_doubt_after_each_cell() -> None:
    names = SessionNames()
    decide(names, x=Version("1"))
    use = use_of(names, CellNames({}, BOTH), "Cell In[6]")  # which has another name of it
    run(names, use, uncertain=("x",))
    (found,) = names.decide(CellNames({"x": Version("2")}, BOTH)).values()
    assert found.why == "the ranks may have changed it in Cell In[6], and the notebook changed it"
    names.brought_back("x", Version("2"), BOTH)
    assert decide(names, x=Version("3")) == {"x": Action.SEND}


def test_the_value_that_one_rank_gave_the_notebook_reaches_ranks_that_left_theirs_alone() -> None:
    names, ranks = SessionNames(), frozenset({0, 1, 2})
    use = use_of(names, CellNames({"x": Version("1")}, ranks))
    sent = {"x": HeldName("value", "int")}
    did = {0: report(sent), 1: report(sent, changed=("x",)), 2: report(sent, changed=("x",))}
    names.after_cell(use, did)
    names.brought_back("x", Version("2"), frozenset({2}))
    (found,) = names.decide(CellNames({"x": Version("2")}, ranks)).values()
    assert found.action is Action.FILL and found.ranks == {0}


def test_a_rank_outside_of_the_cell_gets_what_out_has_changed_of_other_names() -> None:
    names, part = SessionNames(), frozenset({1})
    before, after = (Version(text, 0, part) for text in ("before", "after"))
    decide(names, model=before, opt=before)
    use = use_of(names, CellNames({"model": before}, frozenset({0})))
    run(names, use, changed=("model", "opt"))
    assert names.sharing(["model"]) == ["opt"]
    names.brought_back("model", after, frozenset({0}))
    names.follow("opt", before, after, frozenset({0}), returned=part, is_whole=False)
    (found,) = names.decide(CellNames({"opt": after}, BOTH)).values()
    assert found.action is Action.FILL and found.ranks == {1}


def test_ranks_outside_of_the_cell_keep_what_they_changed() -> None:
    names = SessionNames()
    decide(names, x=Version("1"), y=Version("1"))
    ranks_did(names, changed=("x", "y"))
    versions = {"x": Version("1"), "y": Version("1")}
    cell = CellNames(versions, frozenset({0}), frozenset("x"), frozenset("y"))
    run(names, use_of(names, cell))
    versions["y"] = Version("2")
    names.brought_back("y", versions["y"], cell.ranks)
    for name, found in names.decide(CellNames(versions, BOTH)).items():
        assert str(found) == "kept: the ranks changed it in Cell In[5]", name
    versions = {"x": Version("3"), "y": Version("3")}
    on_rank_0 = names.decide(CellNames(versions, frozenset({0})))
    assert {found.action for found in on_rank_0.values()} == {Action.SEND}
    on_rank_1 = names.decide(CellNames(versions, frozenset({1})))
    assert {found.action for found in on_rank_1.values()} == {Action.CONFLICT}


def test_a_cell_on_one_rank_leaves_the_conflict_of_another() -> None:
    names = SessionNames()
    decide(names, epoch=Version("0"))
    cell = CellNames({"epoch": Version("0")}, frozenset({1}))
    names.after_cell(use_of(names, cell), {1: report({}, changed=("epoch",))})
    names.note_cells(["epoch = 0"])
    run(names, use_of(names, replace(cell, ranks=frozenset({0}))))
    assert decide(names, epoch=Version("0")) == {"epoch": Action.CONFLICT}


def test_what_some_ranks_lack_does_not_overwrite_objects_that_they_changed() -> None:
    names = SessionNames()
    model, opt = (Version(name, name, frozenset({1, 2})) for name in ("model", "opt"))
    decide(names, model=model)
    ranks_did(names, changed=("model",))
    names.after_cell(
        SessionUse(CellNames({}, BOTH), {}, {"opt": opt}, names),
        {0: report({}, assigned=("opt",)), 1: report({})},
    )
    assert decide(names, opt=opt) == {"opt": Action.CONFLICT}


def test_a_name_that_one_rank_assigned_and_gave_the_notebook_reaches_the_others() -> None:
    names = SessionNames()
    did = {0: report({}, assigned=("best",)), 1: report({})}
    names.after_cell(use_of(names, CellNames({}, BOTH)), did)
    names.brought_back("best", Version("7"), BOTH)
    assert decide(names, best=Version("7")) == {"best": Action.SEND}
    assert decide(names, best=Version("7")) == {"best": Action.KEEP}


def test_a_deleted_name_is_sent_again() -> None:
    names = SessionNames()
    decide(names, x=Version("1"))
    ranks_did(names, deleted=("x",))
    assert decide(names, x=Version("1")) == {"x": Action.SEND}
