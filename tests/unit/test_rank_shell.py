"""Magics that a rank runs without IPython."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrogen_magic.node.worker.interactive.ipython_shell import RankShell


def test_cd_changes_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell, spaced = RankShell({"name": "my"}), tmp_path / "my folder"
    spaced.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(spaced))

    def cd(line: str) -> Path:
        shell.run_line_magic("cd", line)
        return Path.cwd()

    with pytest.raises(ValueError, match="write %cd FOLDER"):
        cd("-")
    assert [cd("{name} folder"), cd("-"), cd("-"), cd("..")] == [spaced, tmp_path] * 2
    assert [cd("{name} folder"), cd(".."), cd(""), cd("..")] == [spaced, tmp_path] * 2
    assert [cd("~/.."), cd("-q 'my folder'"), cd("-q ..")] == [tmp_path, spaced, tmp_path]
    assert [cd('"my folder"'), cd(".."), cd("'{name} folder' ")] == [spaced, tmp_path, spaced]
