"""A notebook in a browser tab, used as a person uses it: cells run by keys, buttons clicked."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
from nbformat import v4
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Playwright, expect

from tests.browser.front_ends import LAB, FrontEnd
from tests.browser.server import Server, kernel_name
from tests.kernels import NEWEST

PATIENCE_MS = 60_000
"""What takes longer hangs, even on a machine under load."""
_POLL_S = 0.02
_IGNORED_MS = 15_000.0
"""After which a page that shows no effect of a key has ignored it."""
expect.set_options(timeout=PATIENCE_MS)

_NUMBERED = re.compile(r"\[\d+\]")
_TAKEN = re.compile(r"\[[\d*]+\]")
_HAS_TRUST = """(trusted) => {
  const cells = window.jupyterapp.shell.currentWidget.content.widgets.map((cell) => cell.model);
  const code = cells.filter((cell) => cell.type === "code");
  return code.length > 0 && code.every((cell) => cell.trusted) === trusted;
}"""
_SHOW = """async (path) => {
  await window.jupyterapp.commands.execute("docmanager:open", {path});
}"""
_CLOSE = "() => window.jupyterapp.shell.currentWidget.dispose()"
"""Without a question about what is not saved."""
_DIALOGS = ("alert", "confirm", "prompt")
_ARGUMENTS = ["--disable-gpu", "--disable-dev-shm-usage", "--js-flags=--no-opt"]
"""Shared memory is looked at after every test; a browser's would come and go meanwhile. Pages are used for
too short a time for optimized code to be worth its compilation.
"""


def launch(playwright: Playwright) -> Browser:
    """Start the machine's Chromium."""
    return playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_ARGUMENTS)


def write_notebook(path: Path, cells: Sequence[str], version: str = NEWEST) -> Path:
    """Write a notebook of these code cells for a kernel of that ipykernel version."""
    name = kernel_name(version)
    spec = {"name": name, "display_name": name, "language": "python"}
    notebook = v4.new_notebook(
        cells=[v4.new_code_cell(code) for code in cells], metadata={"kernelspec": spec}
    )
    path.write_text(json.dumps(notebook))
    return path


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return cells


def wait_until(
    holds: Callable[[], Any],
    what: str,
    within_s: float = PATIENCE_MS / 1000,
    every_s: float = _POLL_S,
) -> Any:
    """Wait for something outside the page; return what ``holds`` returned."""
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
        time.sleep(every_s)
    return found


@dataclass
class Seen:
    """What the pages of a test did, and must not do."""

    foreign: list[str] = field(default_factory=list)
    """Addresses on other hosts that were requested."""
    dialogs: list[str] = field(default_factory=list)
    """Messages of dialogs that a script opened."""
    console: deque[str] = field(default_factory=lambda: deque(maxlen=40), compare=False)
    """The last lines that pages wrote to the console, which they may."""


class NotebookPage:
    """One tab with one notebook."""

    def __init__(
        self,
        context: BrowserContext,
        server: Server,
        seen: Seen,
        front_end: FrontEnd = LAB,
        page: Page | None = None,
    ) -> None:
        """``page``: what shows it, if it is open; None: a new one."""
        self._server = server
        self._seen = seen
        self._front_end = front_end
        self._path = Path()
        self._codes: list[str] = []
        self.page = page or context.new_page()
        if page is not None:
            return
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("request", lambda request: self._note(request.url))
        self.page.on("websocket", lambda socket: self._note(socket.url))
        self.page.on("dialog", self._dismiss)
        self.page.on(
            "console", lambda line: self._seen.console.append(line.text.partition("\n")[0])
        )

    def _note(self, url: str) -> None:
        parts = urlsplit(url)
        host = urlsplit(self._server.url).netloc
        if parts.scheme not in ("data", "blob", "about") and parts.netloc != host:
            self._seen.foreign.append(url)

    def _dismiss(self, dialog: Any) -> None:
        if dialog.type in _DIALOGS:
            self._seen.dialogs.append(dialog.message)
            dialog.dismiss()
        else:
            dialog.accept()  # the front end asks whether to leave the page

    # ── opening ──────────────────────────────────────────────────────────────────────────────────

    def open(self, path: Path) -> None:
        """Open a notebook that lies below the server's directory, and wait for its kernel."""
        self._path = path
        self._codes = [
            "".join(cell["source"]) for cell in _cells(path) if cell["cell_type"] == "code"
        ]
        self._server.start_kernel(self._name)  # while the page loads
        self._choose_kernel_if_asked(json.loads(path.read_text())["metadata"]["kernelspec"]["name"])
        self._go()
        self.page.wait_for_function(self._front_end.has_kernel)

    def _choose_kernel_if_asked(self, name: str) -> None:
        """Answer the front end's dialog, which it opens when it finds the running kernel too late."""
        dialog = self.page.locator(".jp-Dialog", has_text="Select Kernel")

        def choose() -> None:
            options = dialog.locator("option").all()
            value = next(v for o in options if name in (v := o.get_attribute("value") or ""))
            dialog.locator("select").select_option(value)
            dialog.locator(".jp-mod-accept").click()

        self.page.add_locator_handler(dialog, choose)

    def _go(self) -> None:
        query = {"reset": ""} if self._front_end is LAB else {}
        self.page.goto(self._server.address(self._front_end.path + self._name, **query))
        self.page.locator(self._front_end.cell).first.wait_for()

    @property
    def _name(self) -> str:
        return str(self._path.relative_to(self._server.notebooks))

    def second_tab(self) -> NotebookPage:
        """Open the notebook, as saved, once more; the kernel may be busy."""
        other = self._like_this()
        other._path, other._codes = self._path, self._codes
        other._go()
        return other

    def open_copy(self, *, trusted: bool, instead_of: NotebookPage | None = None) -> NotebookPage:
        """Open a copy of the notebook as saved, with a fresh kernel, in a tab of its own, or with another
        copy's tab and kernel.

        The server trusts a notebook whose content it has saved itself. A copy that is not ``trusted`` has
        one cell more, so the server has never seen it, as a notebook that came from another computer.
        """
        copy = self._path.with_name(f"{'trusted' if trusted else 'foreign'}-{self._path.name}")
        notebook = nbformat.read(self._path, as_version=4)
        if not trusted:
            notebook.cells.append(v4.new_markdown_cell("from another computer"))
        nbformat.write(notebook, copy)
        other = self._like_this(instead_of and instead_of.page)
        if instead_of is None:
            other.open(copy)
        else:
            instead_of.page.evaluate(_CLOSE)
            other._path, other._codes = copy, self._codes
            self._server.move_kernel(instead_of._name, other._name)
            other._show()
        other.page.wait_for_function(_HAS_TRUST, arg=trusted)
        return other

    def open_again(self) -> None:
        """Close the notebook as saved, and open it; its kernel runs meanwhile."""
        self.page.evaluate(_CLOSE)
        self._show()

    def _show(self) -> None:
        """Have JupyterLab show the notebook in its page. Another page would take seconds to load."""
        self.page.evaluate(_SHOW, self._name)
        self.page.locator(self._front_end.cell).first.wait_for()
        self.page.wait_for_function(self._front_end.has_kernel)

    def _like_this(self, page: Page | None = None) -> NotebookPage:
        return NotebookPage(self.page.context, self._server, self._seen, self._front_end, page)

    def reload(self) -> None:
        self.page.reload()
        self.page.locator(self._front_end.cell).first.wait_for()

    def restart_kernel(self) -> None:
        """Do as the menu's entry of JupyterLab does, without its question."""
        context = "jupyterapp.shell.currentWidget.sessionContext"
        self.page.evaluate(f"() => {context}.session.kernel.restart()")
        self.page.wait_for_function(self._front_end.has_kernel)

    def has_missed_an_answer(self) -> bool:
        """Return whether a cell runs here that the kernel has finished, by what its server knows."""
        return self.is_any_running() and self._server.is_idle(self._name)

    def is_usable(self) -> bool:
        """True while the tab is open and no cell runs."""
        return not self.page.is_closed() and not self.is_any_running()

    def close(self) -> None:
        """Close the tab and end its kernel."""
        self.page.close()
        self._server.end_kernels(self._name)

    # ── cells, named by their code ───────────────────────────────────────────────────────────────

    def cell(self, code: str) -> Locator:
        return self.page.locator(self._front_end.cell).nth(self._codes.index(code))

    def prompt(self, code: str) -> Locator:
        return self.cell(code).locator(self._front_end.prompt).first

    def output(self, code: str) -> Locator:
        return self.cell(code).locator(self._front_end.output).first

    def widget(self, code: str) -> Locator:
        """Return the live view under a cell."""
        return self.cell(code).locator(".hm")

    def state(self, code: str) -> Locator:
        """Return the element with the state of the gang under a cell, in ``data-state``."""
        return self.widget(code).locator("[data-state]").first

    def write(self, old: str, code: str) -> None:
        """Replace a cell's text."""
        self.cell(old).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(code)
        self._codes[self._codes.index(old)] = code

    def start(self, code: str) -> None:
        """Run a cell, and return as soon as it runs."""
        before = self.prompt(code).inner_text()

        def is_taken() -> bool:
            """Press again if a page that was still loading has ignored the keys."""
            self.prompt(code).click()
            self.page.keyboard.press("Control+Enter")
            try:
                expect(self.prompt(code)).not_to_have_text(before, timeout=_IGNORED_MS)
            except AssertionError:
                return False
            return True

        wait_until(is_taken, f"cell that runs: {code}")
        expect(self.prompt(code)).to_have_text(_TAKEN)

    def finish(self, code: str) -> None:
        """Wait for a cell's end."""
        expect(self.prompt(code)).to_have_text(_NUMBERED)

    def run(self, code: str) -> None:
        """Run a cell to its end."""
        self.start(code)
        self.finish(code)

    def is_running(self, code: str) -> bool:
        return "*" in self.prompt(code).inner_text()

    def is_any_running(self) -> bool:
        prompts = self.page.locator(f"{self._front_end.cell} {self._front_end.prompt}")
        return any("*" in text for text in prompts.all_inner_texts())

    def shows(self, code: str, text: str | re.Pattern[str]) -> None:
        """Wait for text in a cell's output."""
        expect(self.output(code)).to_contain_text(text)

    # ── the front end's own buttons and menus ────────────────────────────────────────────────────

    def interrupt(self) -> None:
        """Click the square button."""
        self.page.locator(self._front_end.interrupt).first.click()

    def save(self, code: str, mime: str, text: str, within_s: float = PATIENCE_MS / 1000) -> Path:
        """Save until a cell has such an output in the file; return the file."""

        def saved() -> bool:
            try:
                outputs = _cells(self._path)[self._codes.index(code)]["outputs"]
            except ValueError:
                return False  # still being written
            data = [output.get("data", {}) for output in outputs]
            if any(text in "".join(each.get(mime, "")) for each in data):
                return True
            # again each time: an output that comes just now may not be in the page's notebook yet
            self.page.keyboard.press("Control+s")
            return False

        what = f"{mime} with {text!r} in the saved notebook"
        wait_until(saved, what, within_s, every_s=min(0.5, within_s / 10))
        return self._path

    def set_theme(self, name: str) -> None:
        """Choose a theme of JupyterLab: ``JupyterLab Dark``."""
        self.page.evaluate(
            "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
            name,
        )
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-name", name)
