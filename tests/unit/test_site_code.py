"""Every block of the documentation runs, or is named with the reason why it cannot.

``tests/local/test_site_code.py`` and ``tests/spark/test_site_code.py`` run them. Commands for a terminal are
compared with what they call.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Sequence

import pytest
from packaging.requirements import Requirement

from hydrogen_magic import __main__ as command_line
from hydrogen_magic.frameworks.horovod import command as horovod_command
from hydrogen_magic.notebook.arguments.gang import parse_gang_words
from tests.site_code import PYPROJECT, ROOT, SHELL, Block, Page, blocks
from tests.site_pages import ELSEWHERE, LOCAL, SPARK

FILES = [
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    if "notebooks" not in path.parts
]
PAGES = {page.name: page for page in [*LOCAL, *SPARK]}


def test_every_block_runs_or_says_why_not() -> None:
    assert [
        f"{name}: {block.text}"
        for name in FILES
        for block in blocks(ROOT / name)
        if not _is_covered(block, name, PAGES.get(name))
    ] == []


def _is_covered(block: Block, name: str, page: Page | None) -> bool:
    if block.language.startswith("{") or block.language in SHELL or name in ELSEWHERE:
        return True
    if page is None:
        return False
    parts = [*page.shown_by, *page.not_run]
    return block.language == "python" or any(part in block.text for part in parts)


def test_pages_that_run_elsewhere_are_named_there() -> None:
    texts = {page: (ROOT / module).read_text() for page, module in ELSEWHERE.items()}
    assert [page for page, text in texts.items() if page not in text] == []


def test_what_a_page_needs_is_about_its_blocks() -> None:
    for page in (*LOCAL, *SPARK):
        texts = [block.text for block in page.blocks]
        assert texts, page.name
        for part in (*page.changes, *page.slow):
            assert any(part in text for text in texts), page.name
        for part in (*page.before, *page.shown_by, *page.not_run):
            assert sum(part in text for text in texts) == 1, page.name


# ── commands for a terminal ──────────────────────────────────────────────────────────────────────


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, _, value = word.partition("=")
        assert re.search(rf"^{name} \?=" if value else rf"^{name}:", makefile, re.M), word


def check_pip(words: Sequence[str]) -> None:
    """What is installed is this project, with one of its extras, or what one of them requires."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    known = {Requirement(line).name for line in sum(extras.values(), project["dependencies"])}
    assert words[0] == "install"
    for each in map(Requirement, set(words[1:]) - {"."}):
        assert each.name in {project["name"], *known}
        assert each.name != project["name"] or each.extras <= set(extras)


def check_python(words: Sequence[str]) -> None:
    if words[:2] == ["-m", "hydrogen_magic"] and words[2] == "gang":
        parse_gang_words(words[3:])
    elif words[:2] == ["-m", "hydrogen_magic"]:
        assert command_line.main(words[2:]) == 0
    else:
        source = (ROOT / words[0]).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))


def check_jupyter(words: Sequence[str]) -> None:
    # loads all exporters, for seconds of a processor, which every worker would do
    from nbconvert.nbconvertapp import NbConvertApp

    options = {f"--{name}" for name in [*NbConvertApp.flags, *NbConvertApp.aliases]}
    assert words[0] == "nbconvert"
    assert {word for word in words if word.startswith("--")} <= options


CHECKS = {"make": check_make, "pip": check_pip, "python": check_python, "jupyter": check_jupyter}


def test_commands_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_command, "_build", lambda given: 0)
    monkeypatch.setattr(signal, "signal", lambda signum, handler: None)
    shells = [
        block.text for name in FILES for block in blocks(ROOT / name) if block.language in SHELL
    ]
    for line in dict.fromkeys(line for text in shells for line in text.splitlines()):
        command, *words = shlex.split(line, comments=True)
        CHECKS[command](words)
