"""Settings of the interpreter that a notebook changes by functions of the standard library."""

from __future__ import annotations

import decimal
import gc
import socket
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from hydrogen_magic.node.worker import settings
from hydrogen_magic.serialization.closure import Setting


def test_they_are_read_applied_and_undone() -> None:
    socket.setdefaulttimeout(3.0)
    try:
        found = [
            each
            for each in settings.read()
            if isinstance(each, Setting) and each.provider == "socket"
        ]
    finally:
        socket.setdefaulttimeout(None)
    with settings.apply(found, pytest.fail):
        assert socket.getdefaulttimeout() == 3.0
    assert socket.getdefaulttimeout() is None


def test_a_value_that_a_library_refuses_is_named() -> None:
    refused = list[str]()
    with settings.apply([Setting("decimal", "decimal", "precision", -1)], refused.append):
        assert decimal.getcontext().prec == 28
    assert "decimal setting precision is not applied: ValueError: " in refused[0]


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


def test_a_filter_that_python_has_too_is_sent_if_the_notebook_sets_it() -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for category in (ResourceWarning, DeprecationWarning):  # as Python begins
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
        assert not [one for one in settings.read() if "ignore:" in str(one)]
        warnings.simplefilter("ignore", DeprecationWarning)
        (sent,) = [one for one in settings.read() if "ignore:" in str(one)]
        assert isinstance(sent, Setting) and "DeprecationWarning" in sent.label


def test_a_garbage_collector_that_spark_connect_has_switched_off_is_no_setting() -> None:
    """It does so for as long as a stage of a gang runs, in another thread."""
    gc.disable()
    try:
        assert not [
            one for one in settings.read() if isinstance(one, Setting) and one.module == "gc"
        ]
    finally:
        gc.enable()
