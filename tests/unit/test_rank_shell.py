"""Magics that a rank runs without IPython."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.node.worker.ipython_shell import RankShell


def test_cd_takes_what_that_of_ipython_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, spaced = RankShell({"name": "my"}), tmp_path / "my folder"
    spaced.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(spaced))

    def cd(line: str) -> Path:
        shell.run_line_magic("cd", line)
        return Path.cwd()

    with pytest.raises(HydrogenError, match="no previous directory"):
        cd("-")
    assert [cd('-q "my folder"'), cd("-"), cd("{name} folder")] == [spaced, tmp_path, spaced]
    assert [cd(".."), cd(""), cd("-"), cd("~")] == [tmp_path, spaced, tmp_path, spaced]
    spaced.rmdir()
    assert cd(str(tmp_path)) == tmp_path
