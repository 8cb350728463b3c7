"""Syntax trees made in several threads at once."""

from __future__ import annotations

import ast
import gc
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hydrogen_magic.core import syntax


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns, and garbage is collected, all the time."""
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(10, 2, 2)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("eager_switches")
def test_threads_do_not_disturb_each_other() -> None:
    source = Path(__file__).read_text() * 20
    gc.callbacks.append(_switch)
    try:
        with ThreadPoolExecutor(4) as threads:
            for tree in threads.map(syntax.parse, [source] * 40):
                assert isinstance(tree, ast.Module)
    finally:
        gc.callbacks.remove(_switch)


def _switch(phase: str, info: object) -> None:
    """Code of Python within a collection, at which threads switch."""


def test_errors_are_those_of_python() -> None:
    with pytest.raises(SyntaxError, match="invalid syntax"):
        syntax.parse("a = = 2")


@pytest.mark.parametrize("warns", [False, True])
def test_warnings_are_shown_on_request_only(warns: bool) -> None:
    """They were shown when the cell ran; those of Python 3.12 and later are on by default."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        syntax.parse(r'p = "\d"', warns=warns)
    assert len(shown) == warns


def test_a_source_that_is_not_python_has_an_empty_tree() -> None:
    assert syntax.parsed("%time x").body == syntax.parsed("\0").body == []
    assert len(syntax.parsed("x = 1").body) == 1
