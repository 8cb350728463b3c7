"""Which local modules of a session's ranks were edited since they were sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrogen_magic.capture.modules import LocalModules, ModuleFile
from hydrogen_magic.capture.sent_modules import SentModules


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sent_pkg").mkdir()
    return tmp_path / "sent_pkg" / "net.py"


def edit(place: Path, text: str) -> dict[str, ModuleFile]:
    """Return the files that a cell sends after an edit."""
    place.write_text(text)
    local = LocalModules()
    local.add(["sent_pkg"])
    return local.files


def test_each_edit_is_sent_until_all_ranks_have_it(place: Path) -> None:
    sent = SentModules()
    sent.after_cell(edit(place, "x = 1"), is_whole=False, failed=False)
    assert sent.edited(()) == {}, "a package without __init__.py has no file"
    edited = edit(place, "x = 20")
    assert [*sent.edited(())] == ["sent_pkg.net"] and sent.edited(["sent_pkg.net"]) == {}
    for is_whole, failed in ((False, False), (True, True), (False, False)):
        sent.after_cell(edited, is_whole=is_whole, failed=failed)
        assert [*sent.edited(())] == ["sent_pkg.net"]
    sent.after_cell(edited, is_whole=True, failed=False)
    assert sent.edited(()) == {}
    sent.after_cell(edited, is_whole=False, failed=True)
    assert sent.edited(()) == {}, "the ranks had it before that cell"


def test_a_file_that_is_gone_is_sent_again_when_it_is_back(place: Path) -> None:
    sent = SentModules()
    sent.after_cell(edit(place, "x = 1"), is_whole=True, failed=False)
    place.unlink()
    assert sent.edited(()) == {}
    place.write_text("x = 20")
    assert [*sent.edited(())] == ["sent_pkg.net"]
