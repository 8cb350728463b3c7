"""Tests in this folder are pure: they start no process and no thread, and so leave none behind.

A test that does belongs in another folder, where it is checked for leaks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch  # noqa: F401  # a build for CUDA starts a process when it is imported

from tests.capture_rig import Notebook, open_notebook

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"}
"""Python's audit events of a new process; of a thread there is none."""
REMEDY = "tests in tests/unit start no process and no thread; move this one to tests/local"


class Guard:
    """Refuses what a test starts, and notes it down.

    Other threads may start something meanwhile, such as those of an agent that local tests have left warm.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        """The thread that runs a test."""
        self.started: list[str] = []

    def audit(self, event: str, _: tuple[Any, ...]) -> None:
        if event in STARTS:
            self.check(event)

    def check(self, what: str) -> None:
        if threading.get_ident() == self.thread:
            self.started.append(what)  # the code under test may catch the error
            raise AssertionError(f"{what}: {REMEDY}")


_guard = Guard()
sys.addaudithook(_guard.audit)  # for good: Python cannot remove one


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin with the fixtures, those of a module too."""
    _guard.started.clear()
    _guard.thread = threading.get_ident()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    _guard.thread = None


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    with open_notebook() as notebook:
        yield notebook


@pytest.fixture
def matplotlib() -> None:
    """Import Matplotlib, which starts a process and a thread if it has no cache of the system's fonts."""
    thread, _guard.thread = _guard.thread, None
    try:
        pytest.importorskip("matplotlib.font_manager")
    finally:
        _guard.thread = thread


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that starts a process or a thread."""
    real_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        _guard.check(f"thread {thread.name}")
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    yield
    if _guard.started:
        pytest.fail(f"{', '.join(_guard.started)}: {REMEDY}", pytrace=False)
