"""One server, one browser, and tabs with their kernels, for all tests of this package.

They start before the first test's snapshot and end after the last one's, so that no test is blamed for
them; what they leave behind is checked when the package ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from hydrogen_magic.core import run_log
from tests import leaks
from tests.browser.gangs import Run
from tests.browser.page import NotebookPage, Seen, launch
from tests.browser.server import Server
from tests.browser.tabs import LOG_CHARACTERS, Tabs
from tests.gangs import PATIENCE_S

OpenTab = Callable[..., NotebookPage]
NewRun = Callable[[], Run]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report what server, kernels and pages said when a test fails, and where pictures of the pages are."""
    report = yield
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    if report.when != "teardown" and report.failed and "server" in arguments:
        server: Server = arguments["server"]
        report.sections.append(("server", server.log()[-LOG_CHARACTERS:]))
        with suppress(OSError):  # it does not answer
            report.sections.append(("sessions", json.dumps(server.request("GET", "sessions"))))
    if report.when != "teardown" and report.failed and "tabs" in arguments:
        report.sections.append(("console of the pages", "\n".join(arguments["tabs"].seen.console)))
    if report.when == "call" and report.failed and "browser" in arguments:
        pages = [page for context in arguments["browser"].contexts for page in context.pages]
        for number, page in enumerate(pages):
            path = arguments["pictures"] / f"page-{number}.png"
            path.write_bytes(page.screenshot())
            report.sections.append((f"page {number}", str(path)))
    return report


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path) -> Path:
    """Folder of a test for pictures of its pages."""
    return tmp_path


@pytest.fixture(scope="package", autouse=True)
def nothing_stays() -> Iterator[None]:
    """Check that server and browser leave no process behind, after both have ended."""
    processes = leaks.tree(os.getpid())
    yield
    assert leaks.settle(lambda: _commands(leaks.tree(os.getpid()) - processes), PATIENCE_S) == []


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
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def warm_agents(nothing_stays: None, server: Server, browser: Browser) -> Iterator[None]:
    """Check for leaks when the tabs are closed; agents are warm in their kernels until then.

    This takes the place of the fixture of the same name that is per module.
    """
    before = leaks.Snapshot.take()
    yield
    assert leaks.leaks_after(before, PATIENCE_S) == []


@pytest.fixture(scope="package")
def tabs(browser: Browser, server: Server, warm_agents: None) -> Iterator[Tabs]:
    """Tabs that all tests share."""
    tabs = Tabs(browser, server)
    yield tabs
    tabs.close()
    assert tabs.seen == Seen()


@pytest.fixture
def open_tab(tabs: Tabs) -> OpenTab:
    """Return the tab of a front end and a kernel: a notebook of all cells, with the extension loaded."""
    return tabs.get


@pytest.fixture
def lab(open_tab: OpenTab) -> NotebookPage:
    """JupyterLab with the newest kernel."""
    return open_tab()


@pytest.fixture
def new_run(server: Server, hydrogen_home: Path, monkeypatch: pytest.MonkeyPatch) -> NewRun:
    """Wait for a gang that did not exist when the test began."""
    monkeypatch.setenv("HYDROGEN_MAGIC_HOME", str(server.runs.parent))
    known = frozenset(run_log.recent_ids())
    return lambda: Run(known)
