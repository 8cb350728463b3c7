"""Tests of ``python -m hydrogen_magic``, without gangs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hydrogen_magic.__main__ import main
from hydrogen_magic.testing.entry_points import declare


def test_the_reader_of_its_output_may_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["gang", "list"]) == 1


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
