"""Settings of the interpreter that a notebook changes by functions of the standard library."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator

import pytest

from hydrogen_magic.node.worker import settings
from hydrogen_magic.serialization.closure import Setting

DEFAULTS = (True, None, 0.005)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(DEFAULTS[2])
    yield
    _set(True, None, interval)


def _set(is_collecting: bool, timeout_s: float | None, interval_s: float) -> None:
    gc.enable() if is_collecting else gc.disable()
    socket.setdefaulttimeout(timeout_s)
    sys.setswitchinterval(interval_s)


def _now() -> tuple[bool, float | None, float]:
    return gc.isenabled(), socket.getdefaulttimeout(), sys.getswitchinterval()


def test_they_are_read_applied_and_undone() -> None:
    _set(False, 3.0, 0.01)
    found = [
        each
        for each in settings.read()
        if isinstance(each, Setting) and each.provider in ("gc", "socket", "sys")
    ]
    _set(*DEFAULTS)
    with settings.apply(found, pytest.fail):
        assert _now() == (False, 3.0, pytest.approx(0.01))
    assert _now() == (True, None, pytest.approx(0.005))
