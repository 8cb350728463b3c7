"""The rows of ``docs/migrating/databricks.md``, which tests name: each row has one that runs it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "migrating" / "databricks.md"
STATUSES = ("works", "change", "refused")
_ROW = re.compile(rf"^\| (.+?) \| ({'|'.join(STATUSES)}) \| ?(.*?) ?\|$", re.M)
_NAMED = re.compile(r"""(?:covers(_in_both_places)?|cases)\(\s*('''|\"\"\")(.*?)\2""", re.S)
IN_BOTH_PLACES = ("HorovodRunner", "TorchDistributor")
"""Pages whose rows have tests that run here and on executors."""
IN_ONE_PLACE = """
`HorovodRunner(np=2)`
`HorovodRunner(np=-2)`
`HorovodRunner(np=-1)`
a notebook with `np` above 1 that imports from other relative files
`pip install horovod==0.18.1 --force-reinstall` after an upgrade
`TorchDistributor(num_processes=2, local_mode=True, use_gpu=True)`
`TorchDistributor(num_processes=2, local_mode=False, use_gpu=True)`
`TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)`
`spark.task.resource.gpu.amount` of the cluster
`pytorch.spark.distributor.ignoreSsl`
`from tensorflow import keras`, `from tensorflow.keras import layers, models`
`def train(): import tensorflow as tf; hvd.init()`
"""
"""Their rows that name a place, or configure one, and those of TensorFlow: a minute of a processor each time.
Rows that are refused run nowhere."""


@dataclass(frozen=True)
class Row:
    """A line of Databricks' documentation."""

    page: str
    line: str
    status: str
    here: str


def rows() -> list[Row]:
    pages = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)[1:]
    return [
        Row(page, *found)
        for page, text in zip(pages[::2], pages[1::2], strict=True)
        for found in _ROW.findall(text)
    ]


def named(*, in_both_places: bool = False) -> list[str]:
    """Return the lines that tests name, each as often as they do."""
    sources = (path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    return [
        line
        for source in sources
        for both, _, text in _NAMED.findall(source)
        if both or not in_both_places
        for line in textwrap.dedent(text).splitlines()
        if line and not line.startswith(" ")
    ]


def covers(lines: str) -> pytest.MarkDecorator:
    """Mark a test that runs what these rows say, one in each line."""
    return pytest.mark.covers(textwrap.dedent(lines).strip())


def covers_in_both_places(
    lines: str, executors: Sequence[pytest.MarkDecorator] = (pytest.mark.exhaustive,)
) -> Callable[[Any], Any]:
    """Do as :func:`covers`; the test has an argument ``on_executors``, and runs with both values.

    ``executors``: marks of the run there, beside those that give it the cluster's session.
    """
    marks = (*executors, pytest.mark.spark, pytest.mark.xdist_group("spark"))
    places = [pytest.param(False, id="here"), pytest.param(True, id="executors", marks=marks)]

    def mark(test: Any) -> Any:
        return covers(lines)(pytest.mark.parametrize("on_executors", places)(test))

    return mark


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
