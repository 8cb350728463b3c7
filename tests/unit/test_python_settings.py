"""Settings of the interpreter that a notebook changes by functions of the standard library."""

from __future__ import annotations

import gc
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hydrogen_magic.node.worker import settings
from hydrogen_magic.serialization.closure import Setting

DEFAULTS = (None, 0.005)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(DEFAULTS[1])
    yield
    _set(None, interval)


def _set(timeout_s: float | None, interval_s: float) -> None:
    socket.setdefaulttimeout(timeout_s)
    sys.setswitchinterval(interval_s)


def _now() -> tuple[float | None, float]:
    return socket.getdefaulttimeout(), sys.getswitchinterval()


def test_they_are_read_applied_and_undone() -> None:
    _set(3.0, 0.01)
    found = [
        each
        for each in settings.read()
        if isinstance(each, Setting) and each.provider in ("socket", "sys")
    ]
    _set(*DEFAULTS)
    with settings.apply(found, pytest.fail):
        assert _now() == (3.0, pytest.approx(0.01))
    assert _now() == (None, pytest.approx(0.005))


def _filters(messages: Sequence[str]) -> list[Setting]:
    """Return the settings of a notebook that ignores warnings with these messages."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for message in messages:
            warnings.filterwarnings("ignore", message)
        found = [one for one in settings.read() if isinstance(one, Setting)]
    return [one for one in found if one.provider == "warnings"]


def test_a_session_undoes_each_filter_of_warnings() -> None:
    kept = settings.NotebookSettings()
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for messages in (["a", "b"], ["b", "c"], []):
            sent = _filters(messages)
            kept.undo_others([setting.label for setting in sent], pytest.fail)
            kept.apply(sent, {}, pytest.fail)
            filters: list[Any] = list(warnings.filters)
            assert [each[1].pattern for each in filters] == messages[::-1]


def test_a_garbage_collector_that_spark_connect_has_switched_off_is_no_setting() -> None:
    """It does so for as long as a stage of a gang runs, in another thread."""
    gc.disable()
    try:
        assert not [
            one for one in settings.read() if isinstance(one, Setting) and one.module == "gc"
        ]
    finally:
        gc.enable()
