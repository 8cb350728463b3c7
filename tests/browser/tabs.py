"""Tabs that tests share, one test after the other: a page takes seconds to load, a cell does not."""

from __future__ import annotations

import warnings

from playwright.sync_api import Browser

from tests.browser.front_ends import LAB, FrontEnd
from tests.browser.gangs import ALL, LOAD
from tests.browser.page import NotebookPage, Seen, write_notebook
from tests.browser.server import Server
from tests.kernels import NEWEST

LOG_CHARACTERS = 3000
"""Of the end of the server's log, reported with a failure."""


class Tabs:
    """Tabs of one browser context; their kernels end with it."""

    def __init__(self, browser: Browser, server: Server) -> None:
        self.seen = Seen()
        """What the pages did, and must not do."""
        self._server = server
        self._context = browser.new_context(
            viewport={"width": 1280, "height": 1000},
            reduced_motion="reduce",  # without a GPU every frame of an animation is drawn by the processor
        )
        self._pages: dict[tuple[str, str], NotebookPage] = {}
        self._n_opened = 0

    def get(self, front_end: FrontEnd = LAB, version: str = NEWEST) -> NotebookPage:
        """Return the tab of this front end with a kernel of this version."""
        key = front_end.name, version
        page = self._pages.get(key)
        if page is not None and not page.is_usable():  # a test failed half-way
            page.close()
            page = None
        if page is None:
            page = self._pages[key] = self.open(*ALL, front_end=front_end, version=version)
        return page

    def open(self, *cells: str, front_end: FrontEnd = LAB, version: str = NEWEST) -> NotebookPage:
        """Open a new notebook of these cells, and load the extension."""
        self._n_opened += 1
        page = NotebookPage(self._context, self._server, self.seen, front_end)
        path = self._server.notebooks / f"notebook-{self._n_opened}.ipynb"
        page.open(write_notebook(path, (LOAD, *cells), version))
        page.start(LOAD)
        try:
            page.finish(LOAD)
        except AssertionError:
            if not page.has_missed_an_answer():
                raise
            # Seen once in hundreds of tabs, in a fresh page, whose cells no test has run.
            said = "\n".join((self._server.log()[-LOG_CHARACTERS:], *self.seen.console))
            warnings.warn(f"a page has missed that its first cell ended:\n{said}", stacklevel=2)
            page.reload()
            page.run(LOAD)
        return page

    def close(self) -> None:
        self._context.close()
        self._server.end_kernels()
