"""Syntax trees made in several threads at once."""

from __future__ import annotations

import ast
import gc
import sys
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
