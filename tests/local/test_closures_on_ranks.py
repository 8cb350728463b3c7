"""Cells in bulk: each runs plainly in a notebook and on ranks of a gang, with the same outcome."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

import hydrogen_magic as hm
from hydrogen_magic.capture import Captured
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization import payload
from tests import cell_grammar, notebook_objects
from tests.capture_rig import open_notebook
from tests.cell_grammar import Case, Outcome, prepare, write_cell
from tests.closure_ranks import run_all
from tests.gangs import ended

FEW = 40
MOST_REFUSED, MOST_CAUTIOUS = 0.1, 0.02
"""How many cells may be refused for each one that is sent, and how many of these that succeed plainly: an
undefined name may be one that is never read."""
LIBRARIES = ("torch", "torch.fx", "pandas", "polars", "pyarrow", "sklearn")


def on_ranks(
    closures: Sequence[Captured], folder: Path, libraries: tuple[str, ...] = ()
) -> list[Outcome]:
    """Run closures on the two ranks of one gang; see :func:`run_all`."""
    folder.mkdir()
    for number, captured in enumerate(closures):
        with (folder / str(number)).open("wb") as file:
            payload.write(captured.payload, file.fileno())
    gang = ended(hm.launch(run_all, str(folder), libraries), within_s=280)
    found = {number: one for result in gang.results for number, one in result.items()}
    return [found[number] for number in range(len(closures))]


def check_cells(first: int, n_sent: int, folder: Path) -> None:
    """Run the first so many cells of the grammar that can be sent, from a seed on."""
    cases: list[Case] = []
    sent: list[Captured] = []
    while len(sent) < n_sent:
        assert len(cases) < (1 + MOST_REFUSED) * n_sent, "most cells can be sent"
        cases.append(case := prepare(write_cell(Random(first + len(cases)))))
        sent += [case.captured] if case.captured else []
    assert [(case.text, case.refusal) for case in cases if case.refusal] == []
    cautious = [case.text for case in cases if case.captured is None and not case.plain.problem]
    assert len(cautious) <= MOST_CAUTIOUS * n_sent, cautious
    outcomes = on_ranks(sent, folder)
    ran = [case for case in cases if case.captured]
    found = [(case.difference(rank), case.text) for case, rank in zip(ran, outcomes, strict=True)]
    assert [one for one in found if one[0]] == []


def test_generated_cells(tmp_path: Path) -> None:
    check_cells(0, FEW, tmp_path / "closures")


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_generated_cells(part: int, tmp_path: Path) -> None:
    check_cells(part * 10_000, 500, tmp_path / "closures")


def captured_object(setup: str, check: str) -> tuple[Captured, Outcome]:
    """Make an object in a notebook; return the closure of a cell that uses it, and its plain outcome."""
    with open_notebook() as notebook:
        notebook.cell(notebook_objects.IMPORTS)
        notebook.cell(setup)
        captured = notebook.capture(check)
        return captured, cell_grammar.plainly(check, notebook.module)


@pytest.mark.exhaustive
def test_objects_of_many_kinds(tmp_path: Path) -> None:
    texts = notebook_objects.OBJECTS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [captured_object(setup, check) for setup, check in texts.items()]
    assert [
        (setup, plain) for setup, (_, plain) in zip(texts, made, strict=True) if plain.problem
    ] == []
    outcomes = on_ranks([captured for captured, _ in made], tmp_path / "closures", LIBRARIES)
    found = zip(texts, made, outcomes, strict=True)
    assert [
        (text, plain, rank)
        for text, (_, plain), rank in found
        if (plain.problem, plain.value) != (rank.problem, rank.value)
    ] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("setup", notebook_objects.REFUSED)
def test_refusals_name_the_object(setup: str) -> None:
    with open_notebook() as notebook:
        notebook.cell(notebook_objects.IMPORTS)
        notebook.cell(setup)
        with pytest.raises(CaptureError, match="`x") as caught:
            notebook.capture("x")
        assert notebook_objects.REFUSED[setup] in str(caught.value)
