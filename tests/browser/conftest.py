"""One server and one browser for all tests here; a fresh tab, notebook and kernel for each.

Server and browser start before the first test's snapshot and end after the last one's: no test is
held to account for them, and what the package of tests leaves behind is looked at in the end.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from hydrogen_magic import record
from tests import leaks
from tests.browser.front_ends import LAB, FrontEnd
from tests.browser.gangs import Run
from tests.browser.page import NotebookPage, Seen, write_notebook
from tests.browser.server import Server
from tests.kernels import NEWEST

OpenNotebook = Callable[..., NotebookPage]
NewRun = Callable[[], Run]

_ARGUMENTS = ["--disable-gpu", "--disable-dev-shm-usage"]
"""Shared memory is looked at after every test; a browser's would come and go meanwhile."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take pictures of what was on the pages when a test failed, and say where they are."""
    report = yield
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "browser" in arguments:
        pages = [page for context in arguments["browser"].contexts for page in context.pages]
        for number, page in enumerate(pages):
            path = arguments["tmp_path"] / f"page-{number}.png"
            path.write_bytes(page.screenshot())
            report.sections.append((f"page {number}", str(path)))
    return report


@pytest.fixture(scope="package", autouse=True)
def nothing_stays() -> Iterator[None]:
    """Look for what server and browser left behind, after both have ended."""
    processes = leaks.tree(os.getpid())
    yield
    assert leaks.settle(lambda: _commands(leaks.tree(os.getpid()) - processes), 5.0) == []


def _commands(pids: set[int]) -> list[str]:
    return [leaks.command(pid) or str(pid) for pid in pids]


@pytest.fixture(scope="package")
def server(nothing_stays: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="package")
def browser(nothing_stays: None) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=_ARGUMENTS
        )
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser, server: Server) -> Iterator[BrowserContext]:
    """A browser that remembers nothing; the test's kernels end with it."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    yield context
    context.close()
    server.end_kernels()


@pytest.fixture
def new_run(server: Server, hydrogen_home: Path, monkeypatch: pytest.MonkeyPatch) -> NewRun:
    """Wait for a gang that was not there when the test began."""
    monkeypatch.setenv("HYDROGEN_MAGIC_HOME", str(server.runs.parent))
    known = frozenset(record.recent_ids())
    return lambda: Run(known)


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Judge in the end what this test's pages did."""
    seen = Seen()
    yield seen
    assert seen == Seen()


@pytest.fixture
def open_notebook(
    context: BrowserContext, server: Server, seen: Seen, tmp_path: Path
) -> OpenNotebook:
    """Open a notebook of these cells in a tab of its own."""

    numbers = itertools.count()

    def open_notebook(
        *cells: str, front_end: FrontEnd = LAB, version: str = NEWEST
    ) -> NotebookPage:
        page = NotebookPage(context, server, seen, front_end)
        name = f"{tmp_path.name}-{next(numbers)}.ipynb"
        page.open(write_notebook(server.notebooks / name, cells, version))
        return page

    return open_notebook
