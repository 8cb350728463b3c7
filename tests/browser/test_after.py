"""What a saved notebook shows without its kernel; and that output of ranks never becomes part of a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.gangs import HOSTILE, PAYLOAD, TRAINING
from tests.browser.page import NotebookPage
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
    page = tabs.get()
    page.run(TRAINING)
    page.run(HOSTILE)
    return page


@pytest.fixture(scope="module")
def saved(live: NotebookPage) -> Path:
    live.save(TRAINING, "text/html", FINAL)
    return live.save(HOSTILE, "text/html", FINAL)


@pytest.fixture
def offline(browser: Browser) -> Iterator[Page]:
    """A page without a server."""
    page = browser.new_page()
    yield page
    page.context.close()


def _as_html(path: Path) -> str:
    """Convert a notebook for readers without Jupyter or a network."""
    exporter = HTMLExporter(require_js_url="", mathjax_url="", jquery_url="", mermaid_js_url="")
    html, _ = exporter.from_notebook_node(nbformat.read(path, as_version=4))
    return str(html)


def _check_picture(output: Locator, state: str) -> None:
    expect(output).to_contain_text(state)
    images = output.locator("img")
    expect(images.first).to_be_visible()
    for image in images.all():
        expect(image).to_have_js_property("complete", True)
        assert image.evaluate(DRAWN)


def test_a_saved_notebook_shows_its_gangs_without_their_kernel(
    live: NotebookPage, saved: Path
) -> None:
    """On another computer, where the server does not trust it, and where it does."""
    foreign = live.open_copy(trusted=False)
    _check_copy(foreign)
    trusted = live.open_copy(trusted=True, instead_of=foreign)
    _check_copy(trusted)
    trusted.close()


def _check_copy(copy: NotebookPage) -> None:
    _check_picture(copy.output(TRAINING), "succeeded")
    expect(copy.output(TRAINING)).to_contain_text("trained")
    copy.shows(HOSTILE, PAYLOAD)
    expect(copy.widget(TRAINING)).to_have_count(0)
    assert copy.page.evaluate(INJECTED) == [0, 0]


def test_a_notebook_that_was_converted_shows_its_gangs(saved: Path, offline: Page) -> None:
    offline.set_content(_as_html(saved))
    outputs = offline.locator(".jp-OutputArea")
    _check_picture(outputs.nth(-2), "succeeded")
    expect(outputs.last).to_contain_text(PAYLOAD)
    assert offline.evaluate(INJECTED) == [0, 0]


def test_a_notebook_that_is_opened_again_shows_the_live_view_of_a_finished_gang(
    live: NotebookPage, saved: Path
) -> None:
    """As a page that is reloaded, which tests of Stop do in ``make test-all``."""
    live.open_again()
    expect(live.state(TRAINING)).to_have_attribute("data-state", "done")
    expect(live.output(TRAINING).locator("img")).to_have_count(0)
    live.widget(TRAINING).get_by_role("button", name="log").click()


def test_output_of_ranks_is_text_in_the_live_view(live: NotebookPage) -> None:
    expect(live.state(HOSTILE)).to_have_attribute("data-state", "failed")
    grouped = PAYLOAD.partition("/")[2]  # metrics are grouped by what comes before
    for section, text in {"log": PAYLOAD, "failure": PAYLOAD, "curves": grouped}.items():
        expect(live.widget(HOSTILE).locator(f".hm-{section}")).to_contain_text(text)
    live.shows(HOSTILE, PAYLOAD)
    assert live.page.evaluate(INJECTED) == [0, 0]
