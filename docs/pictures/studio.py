"""JupyterLab in a headless Chromium, with nothing but a notebook in its window."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps
from playwright.sync_api import Browser, Locator, sync_playwright

from docs.pictures.cells import LOAD, SETUP, WARM
from tests.browser.page import NotebookPage, Seen, launch, write_notebook
from tests.browser.server import Server

__all__ = [
    "DARK",
    "LIGHT",
    "Studio",
    "hide_sidebar",
    "leave_alone",
    "shot",
    "taken",
    "wait_until_drawn",
]

_FIRST = (LOAD, SETUP, WARM)
DARK = "JupyterLab Dark"
LIGHT = "JupyterLab Light"
_BESIDE = 100
"""Pixels of the window to the left and right of a cell's input."""
_HEIGHT = 2000
_MARGIN = 12
_BELOW = 2
"""Pixels that may be of the part below: heights are not whole pixels."""
_HIDE_SIDEBAR = """() => {
  if (!window.jupyterapp.shell.leftCollapsed) window.jupyterapp.shell.collapseLeft();
}"""
_SELECT_FIRST = "() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0; }"
"""A selected cell has a coloured bar and buttons."""
_DRAWN = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 500))))"""
"""Canvases are drawn a few times a second; bars move slowly to their next value."""


class Studio:
    """One server and one browser for all pictures."""

    def __init__(self, server: Server, browser: Browser) -> None:
        self._server = server
        self._browser = browser

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Studio]:
        with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
            server = Server(Path(folder))
            try:
                yield cls(server, launch(playwright))
            finally:
                server.end_kernels()
                server.stop()

    @contextmanager
    def notebook(
        self, name: str, *cells: str, width: int, scale: float = 1.5, theme: str = LIGHT
    ) -> Iterator[NotebookPage]:
        """Open a notebook whose cells are ``width`` wide, ready for gangs.

        ``scale``: pixels of a picture for one of the page, so that text is sharp on a page that is narrower.
        """
        context = self._browser.new_context(
            viewport={"width": width + _BESIDE, "height": _HEIGHT}, device_scale_factor=scale
        )
        page = NotebookPage(context, self._server, Seen())
        path = self._server.notebooks / f"{name}.ipynb"
        page.open(write_notebook(path, (*_FIRST, *cells)))
        hide_sidebar(page)
        page.set_theme(theme)  # the server remembers the last one
        for cell in _FIRST:
            page.run(cell)
        yield page
        page.close()
        context.close()


def hide_sidebar(page: NotebookPage) -> None:
    """Give the width of the file browser to the notebook."""
    page.page.evaluate(_HIDE_SIDEBAR)


def wait_until_drawn(page: NotebookPage) -> None:
    page.page.evaluate(_DRAWN)


def leave_alone(page: NotebookPage) -> None:
    """Move pointer and selection away from what is to be seen."""
    page.page.mouse.move(0, 0)
    page.page.evaluate(_SELECT_FIRST)


def taken(page: NotebookPage, part: Locator) -> Image.Image:
    """Take a picture of a part of a page as it is when all is drawn, with a margin."""
    leave_alone(page)
    wait_until_drawn(page)
    whole = shot(part)
    picture = whole.crop((0, 0, whole.width, whole.height - _BELOW))
    return ImageOps.expand(picture, _MARGIN, fill=picture.getpixel((0, 0)))


def shot(part: Locator) -> Image.Image:
    """Take a picture of a part of a page as it is."""
    return Image.open(io.BytesIO(part.screenshot())).convert("RGB")
