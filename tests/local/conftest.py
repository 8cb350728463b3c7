"""Notebooks of this process whose cells are captured, and processes that run them as ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.capture_rig import Notebook, Ranks, open_notebook


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A process that has imported torch; modules that use it are in the group ``capture``."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with open_notebook() as notebook:
        yield notebook


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a temporary folder as the notebook's: modules written there are local ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
