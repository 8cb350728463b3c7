"""Kernels whose gangs are shown by the live widget, with the cells that tests run in them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import kernels
from tests.jupyter import Cell, Kernel
from tests.pages import Page, QuietPage, show_widgets

STUCK = textwrap.dedent(
    """
    %%distributed --np 2 --grace 600
    import signal, time, hydrogen_magic as hm
    if hm.rank() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("<script>alert(1)</script>", flush=True)
    hm.log(step=1, loss=0.5)
    time.sleep(1000)
    """
).lstrip()
"""Runs until it is stopped; rank 0 does not react to an interrupt, as if it were in a collective."""

UNTIL_THERE_IS = textwrap.dedent(
    """
    %%distributed --np 1 {options}
    import os, time, hydrogen_magic as hm
    hm.log(step=1, loss=0.5)
    print("working", flush=True)
    while not os.path.exists({path!r}):
        time.sleep(0.01)
    "done"
    """
).lstrip()

NOTEBOOK = {"JPY_SESSION_NAME": "/somewhere/notebook.ipynb"}
"""The variable that Jupyter's server sets for a kernel that it starts for a page."""
VS_CODE = {"VSCODE_PID": "1"}


def kernel_of(version: str, folder: Path, environment: dict[str, str] = NOTEBOOK) -> Kernel:
    if not kernels.is_installed(version):
        pytest.skip(f"ipykernel {version} is not installed: python -m tests.kernels")
    kernel = Kernel(folder / "home", folder, environment, version)
    try:
        kernel.load()
        show_widgets(kernel, folder)
    except BaseException:
        kernel.shut_down()
        raise
    return kernel


def greeted(page: Page) -> None:
    """Send hello and wait for the full state."""
    page.ack(page.order("hello"))
    page.read_until(lambda: [m for m in page.of_kind("delta") if m.get("to") == page.name])


def stop(kernel: Kernel, page: Page, cell: Cell) -> None:
    page.ack(page.order("stop"))
    kernel.finish(cell)


def started(page: QuietPage, cell: str, word: str) -> Cell:
    """Start a cell that goes on, and wait for its output: that comes as text after three seconds."""
    running = page.start(cell)
    page.until(running, lambda: word in running.stream())
    return running


def assert_text_then_picture(page: QuietPage, go: Path) -> None:
    """Check what a page shows that takes no comm message while a cell runs."""
    cell = started(page, UNTIL_THERE_IS.format(options="", path=str(go)), "working")
    page.until(cell, lambda: "running" in cell.block and "loss 0.5" in cell.block)
    go.touch()
    page.finish(cell)
    assert cell.stream() == "working\n" and cell.value == "'done'"
    assert "1 rank · succeeded" in cell.block and "data:image" in cell.html
    assert bundles(cell)[-1].keys() == {"text/html", "text/plain"}
    assert page.heard == [], "the live view has got nothing"


def bundles(cell: Cell) -> list[dict[str, str]]:
    return [content["data"] for kind, content in cell.messages if "display_data" in kind]
