"""Tests in this folder are pure: they start no process and no thread, and so leave none behind.

A test that does belongs in another folder, where it is checked for leaks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.capture_rig import Notebook, open_notebook

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"}
"""Python's audit events of a new process; of a thread there is none."""
REMEDY = "tests in tests/unit start no process and no thread; move this one to tests/local"


class Guard:
    """Refuses what starts something while it is active, and notes it down."""

    def __init__(self) -> None:
        self.active = False
        self.started: list[str] = []

    def audit(self, event: str, _: tuple[Any, ...]) -> None:
        if self.active and event in STARTS:
            self.refuse(event)

    def refuse(self, what: str) -> None:
        self.started.append(what)  # the code under test may catch the error
        raise AssertionError(f"{what}: {REMEDY}")


_guard = Guard()
sys.addaudithook(_guard.audit)  # for good: Python cannot remove one


def _start(thread: threading.Thread) -> None:
    _guard.refuse(f"thread {thread.name}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin with the fixtures, those of a module too."""
    _guard.started.clear()
    _guard.active = True


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    _guard.active = False


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with open_notebook() as notebook:
        yield notebook


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that starts a process or a thread."""
    monkeypatch.setattr(threading.Thread, "start", _start)
    yield
    if _guard.started:
        pytest.fail(f"{', '.join(_guard.started)}: {REMEDY}", pytrace=False)
