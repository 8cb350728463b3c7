"""The rows of ``docs/migrating/databricks.md``, which tests name: each row has one that runs it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "migrating" / "databricks.md"
STATUSES = ("works", "change", "refused")
_ROW = re.compile(rf"^\| (.+?) \| ({'|'.join(STATUSES)}) \| ?(.*?) ?\|$", re.M)
_NAMED = re.compile(r"""(?:covers|cases)\(\s*('''|\"\"\")(.*?)\1""", re.S)


@dataclass(frozen=True)
class Row:
    """A line of Databricks' documentation."""

    line: str
    status: str
    here: str


def rows() -> list[Row]:
    return [Row(*found) for found in _ROW.findall(PAGE.read_text())]


def named() -> list[str]:
    """Return the lines that tests name, each as often as they do."""
    sources = (path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    return [
        line
        for source in sources
        for _, text in _NAMED.findall(source)
        for line in textwrap.dedent(text).splitlines()
        if line and not line.startswith(" ")
    ]


def covers(lines: str) -> pytest.MarkDecorator:
    """Mark a test that runs what these rows say, one in each line."""
    return pytest.mark.covers(textwrap.dedent(lines).strip())


@dataclass(frozen=True)
class Case:
    """Code that runs what some rows say."""

    lines: Sequence[str]
    code: str

    def __str__(self) -> str:
        return self.lines[0].strip("`")


def cases(text: str) -> list[Case]:
    """Return the cases of a text: rows at the margin, and the code for them indented below."""
    found = re.findall(
        r"((?:^\S.*\n)+)((?:^ .*\n|^\n)*)", textwrap.dedent(text).strip() + "\n", re.M
    )
    return [Case(lines.splitlines(), textwrap.dedent(code)) for lines, code in found]
