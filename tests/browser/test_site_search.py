"""The built documentation is searched from a folder: by no server, and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

DOCS = Path(__file__).parents[2] / "docs"

# No smaller one: the index is that of the whole site, which takes a minute to build.
pytestmark = [pytest.mark.exhaustive, pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with notebooks that have no outputs; ``make test-all`` has built it."""
    if built := os.environ.get("DOCS_SITE"):
        return Path(built)
    pytest.importorskip("myst_nb", reason="the documentation's tools are not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    around = {**os.environ, "DOCS_NOTEBOOKS": "off"}
    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", str(DOCS), str(folder)]
    subprocess.run(build, check=True, cwd=DOCS.parent, env=around)
    return folder


@pytest.mark.usefixtures("cold")  # no agent that outlives the browser
def test_a_search_finds_pages_without_a_server(browser: Browser, site: Path) -> None:
    page = browser.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((site / "search.html").as_uri() + "?q=sweep")
    found = page.locator("#search-results a[href*='how-to/sweep.html']").first
    expect(found).to_be_visible()
    found.click()
    expect(page.locator("h1")).to_contain_text("sweep")
    page.close()
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
