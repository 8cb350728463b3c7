"""Tests of ``python -m hydrogen_magic``, without gangs."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hydrogen_magic.__main__ import main
from hydrogen_magic.driver.rendezvous import Diagnosis
from hydrogen_magic.notebook import doctor
from hydrogen_magic.testing.entry_points import declare
from tests.records import ENDED, launched, write


def test_the_reader_of_its_output_may_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["gang", "list"]) == 1


def test_a_process_without_streams_carries_out_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["gang", "list"]) == 0


@pytest.mark.parametrize("line", ["--help", "gang show g1"])
def test_a_stdout_that_lacks_characters_gets_question_marks(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("g1", launched("g1"), ENDED)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(line.split()) == 0
    sys.stdout.flush()
    assert b"?" in raw.getvalue()


def test_the_shell_has_split_and_unquoted_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    write("g1", replace(launched("g1"), name="#1 isn't wide"), ENDED)
    write("g2", launched("g2", wall_time=2e9), ENDED)
    assert main(["gang", "show", "#1 isn't wide"]) == 0
    assert "gang g1" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gangs")
@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("gang stpo", 2, "python -m hydrogen_magic gang stpo is not a command; did you mean stop?"),
        ("train.py", 2, "unknown command 'train.py': choose gang"),
        ("gnag list", 2, "unknown command 'gnag': did you mean gang?"),
        ("", 2, "usage: python -m hydrogen_magic COMMAND"),
        ("gang logs --rank x", 2, "whole number"),
        ("gang attach g1 --out model", 2, "a terminal has none: drop it"),
        ("gang attach g1 --take", 2, "`python -m hydrogen_magic gang stop ID --take` stops it"),
        ("gang stop --all", 2, "a terminal has none: name each gang to stop"),
        ("gang logs unknown", 1, "no gang has run yet"),
    ],
)
def test_a_wrong_command_differs_from_one_that_fails(
    line: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == status
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("is_well", "status"), [(True, 0), (False, 1)])
def test_the_doctors_status_is_for_scripts(
    is_well: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        Diagnosis("disk", is_well, "12 GB free", "delete files"),
        Diagnosis("GPUs", True, "none"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(checks))
    assert main(["gang", "doctor"]) == status
    shown = capsys.readouterr().out
    assert "ok   GPUs: none" in shown and ("-> delete files" in shown) is not is_well


def test_a_plug_in_adds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(tmp_path, "hydrogen_magic.commands", {"mpi": "its_command:main"})
    (tmp_path / "its_command.py").write_text(
        "def main(words): return 3 if words == ['build'] else 1"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["mpi", "build"]) == 3
    assert main(["--help"]) == 0
    assert "mpi …" in capsys.readouterr().out
