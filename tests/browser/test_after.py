"""What stays when gang and kernel are gone; and that nothing a rank says becomes part of a page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import OpenNotebook
from tests.browser.gangs import HOSTILE, LOAD, PAYLOAD, TRAINING
from tests.browser.page import PATIENCE_MS, NotebookPage, Seen
from tests.browser.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

OpenElsewhere = Callable[[Path], NotebookPage]

DRAWN = "image => image.complete && image.naturalWidth > 100"
INJECTED = """() => [
  window.hacked ?? 0,
  document.querySelectorAll("img[src='x'], a[href^='javascript:']").length,
]"""


@pytest.fixture
def open_elsewhere(browser: Browser, seen: Seen, tmp_path: Path) -> Iterator[OpenElsewhere]:
    """Open a notebook on a colleague's computer, whose server trusts nothing of ours."""
    server = Server(tmp_path)
    context = browser.new_context()

    def open_elsewhere(path: Path) -> NotebookPage:
        page = NotebookPage(context, server, seen)
        page.open(shutil.copy(path, server.notebooks / path.name))
        return page

    yield open_elsewhere
    context.close()
    server.end_kernels()
    server.stop()


@pytest.fixture
def offline(browser: Browser) -> Iterator[Page]:
    """A page of its own, without any server."""
    page = browser.new_page()
    yield page
    page.context.close()


def _as_html(path: Path) -> str:
    """Convert a notebook for readers that have no Jupyter, and may have no network."""
    exporter = HTMLExporter(require_js_url="", mathjax_url="", jquery_url="", mermaid_js_url="")
    notebook = nbformat.read(path, as_version=4)
    # As JupyterLab saves it unless told otherwise; with it, nbconvert's page asks another host.
    del notebook.metadata["widgets"]
    html, _ = exporter.from_notebook_node(notebook)
    return str(html)


def _check_picture(output: Locator, state: str) -> None:
    expect(output).to_contain_text(state, timeout=PATIENCE_MS)
    images = output.locator("img")
    expect(images.first).to_be_visible()
    for image in images.all():
        assert image.evaluate(DRAWN)


def test_a_finished_gang_is_seen_where_no_kernel_is(
    open_notebook: OpenNotebook, open_elsewhere: OpenElsewhere, offline: Page
) -> None:
    page = open_notebook(LOAD, TRAINING)
    page.run(0)
    page.run(1)
    path = page.save(1, "text/html", "data:image/svg+xml;base64,")
    there = open_elsewhere(path)
    _check_picture(there.output(1), "succeeded")
    expect(there.output(1)).to_contain_text("trained")
    expect(there.widget(1)).to_have_count(0)
    restored = page.open_copy()
    _check_picture(restored.widget(1).locator(".hm-final"), "succeeded")
    offline.set_content(_as_html(path))
    _check_picture(offline.locator(".jp-OutputArea").last, "succeeded")


def test_what_ranks_say_is_text_everywhere(
    open_notebook: OpenNotebook, open_elsewhere: OpenElsewhere, offline: Page
) -> None:
    page = open_notebook(LOAD, HOSTILE)
    page.run(0)
    page.run(1)
    expect(page.state(1)).to_have_attribute("data-state", "failed")
    expect(page.widget(1).locator(".hm-log")).to_contain_text(PAYLOAD)
    expect(page.widget(1).locator(".hm-failure")).to_contain_text(PAYLOAD)
    expect(page.widget(1).locator(".hm-curves")).to_contain_text(PAYLOAD)
    path = page.save(1, "text/html", "data:image/svg+xml;base64,")
    for each in (page, open_elsewhere(path), page.open_copy()):
        each.shows(1, PAYLOAD)
        assert each.page.evaluate(INJECTED) == [0, 0]
    offline.set_content(_as_html(path))
    expect(offline.locator(".jp-OutputArea").last).to_contain_text(PAYLOAD)
    assert offline.evaluate(INJECTED) == [0, 0]
