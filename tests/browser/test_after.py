"""What stays when gang and kernel are gone; and that nothing a rank says becomes part of a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.gangs import HOSTILE, PAYLOAD, TRAINING
from tests.browser.page import NotebookPage, Seen
from tests.browser.server import Server
from tests.browser.tabs import Tabs

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("warm_agents")]

DRAWN = "image => image.complete && image.naturalWidth > 100"
INJECTED = """() => [
  window.hacked ?? 0,
  document.querySelectorAll("img[src='x'], a[href^='javascript:']").length,
]"""
FINAL = "data:image/svg+xml;base64,"


@pytest.fixture(scope="module")
def live(tabs: Tabs) -> NotebookPage:
    """A notebook in which one gang has succeeded, and one has failed."""
    page = tabs.open(TRAINING, HOSTILE)
    page.run(TRAINING)
    page.run(HOSTILE)
    return page


@pytest.fixture(scope="module")
def saved(live: NotebookPage) -> Path:
    live.save(TRAINING, "text/html", FINAL)
    return live.save(HOSTILE, "text/html", FINAL)


@pytest.fixture(scope="module")
def elsewhere(
    browser: Browser, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NotebookPage]:
    """The notebook on a colleague's computer, whose server trusts nothing of ours."""
    server = Server(tmp_path_factory.mktemp("elsewhere"))
    context = browser.new_context()
    seen = Seen()
    page = NotebookPage(context, server, seen)
    page.open(shutil.copy(saved, server.notebooks / saved.name))
    yield page
    assert seen == Seen()
    context.close()
    server.end_kernels()
    server.stop()


@pytest.fixture(scope="module")
def restored(live: NotebookPage, saved: Path) -> NotebookPage:
    """A copy of the notebook, opened where it is trusted, with a kernel that knows nothing."""
    return live.open_copy()


@pytest.fixture
def offline(browser: Browser) -> Iterator[Page]:
    """A page of its own, without any server."""
    page = browser.new_page()
    yield page
    page.context.close()


def _as_html(path: Path) -> str:
    """Convert a notebook for readers that have no Jupyter, and may have no network."""
    exporter = HTMLExporter(require_js_url="", mathjax_url="", jquery_url="", mermaid_js_url="")
    html, _ = exporter.from_notebook_node(nbformat.read(path, as_version=4))
    return str(html)


def _check_picture(output: Locator, state: str) -> None:
    expect(output).to_contain_text(state)
    images = output.locator("img")
    expect(images.first).to_be_visible()
    for image in images.all():
        assert image.evaluate(DRAWN)


def test_a_finished_gang_is_seen_where_no_kernel_is(
    saved: Path, elsewhere: NotebookPage, restored: NotebookPage, offline: Page
) -> None:
    _check_picture(elsewhere.output(TRAINING), "succeeded")
    expect(elsewhere.output(TRAINING)).to_contain_text("trained")
    _check_picture(restored.output(TRAINING), "succeeded")
    for page in (elsewhere, restored):
        expect(page.widget(TRAINING)).to_have_count(0)
    offline.set_content(_as_html(saved))
    _check_picture(offline.locator(".jp-OutputArea").nth(-2), "succeeded")


def test_while_its_kernel_lives_a_finished_gang_can_be_looked_into(live: NotebookPage) -> None:
    live.reload()
    expect(live.state(TRAINING)).to_have_attribute("data-state", "done")
    expect(live.output(TRAINING).locator("img")).to_have_count(0)
    live.widget(TRAINING).get_by_role("button", name="log").click()


def test_what_ranks_say_is_text_everywhere(
    live: NotebookPage, saved: Path, elsewhere: NotebookPage, restored: NotebookPage, offline: Page
) -> None:
    expect(live.state(HOSTILE)).to_have_attribute("data-state", "failed")
    for section in ("log", "failure", "curves"):
        expect(live.widget(HOSTILE).locator(f".hm-{section}")).to_contain_text(PAYLOAD)
    for page in (live, elsewhere, restored):
        page.shows(HOSTILE, PAYLOAD)
        assert page.page.evaluate(INJECTED) == [0, 0]
    offline.set_content(_as_html(saved))
    expect(offline.locator(".jp-OutputArea").last).to_contain_text(PAYLOAD)
    assert offline.evaluate(INJECTED) == [0, 0]
