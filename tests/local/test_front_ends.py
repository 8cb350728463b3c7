"""Front ends that deliver less than Jupyter's own: VS Code and Colab, imitated by their documented behaviour.

Neither handles comm messages while a cell runs (https://github.com/microsoft/vscode-jupyter/issues/17360).
Colab does not show what a thread of the kernel sends (https://github.com/googlecolab/colabtools/issues/3373).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import kernels
from tests.jupyter import Cell, Manager
from tests.pages import Page
from tests.widget_kernel import STUCK, UNTIL_THERE_IS, bundles, greeted, kernel_of

pytestmark = pytest.mark.usefixtures("warm_agents")

VS_CODE = {"VSCODE_PID": "1"}
COLAB = {"COLAB_RELEASE_TAG": "release"}
DROP_WHAT_THREADS_SEND = textwrap.dedent(
    """
    import threading, comm
    from ipykernel.iostream import OutStream
    from ipykernel.zmqshell import ZMQDisplayPublisher
    from hydrogen_magic.views.widget import display as shown

    def of_main_thread(send):
        def call(*args, **options):
            if threading.current_thread() is threading.main_thread():
                return send(*args, **options)
        return call

    OutStream.write = of_main_thread(OutStream.write)
    ZMQDisplayPublisher.publish = of_main_thread(ZMQDisplayPublisher.publish)
    comm.base_comm.BaseComm.publish_msg = of_main_thread(comm.base_comm.BaseComm.publish_msg)
    shown.send_under = of_main_thread(shown.send_under)
    """
)


class QuietPage(Page):
    """A page that takes comm messages only while no cell runs, and sends none before."""

    def __init__(self, manager: Manager) -> None:
        self._kept: list[dict[str, Any]] = []
        super().__init__(manager)

    def _take(self, message: dict[str, Any]) -> None:
        is_comm = message["msg_type"].startswith("comm_")
        if is_comm and not all(cell.ended for cell in self._cells.values()):
            self._kept.append(message)
            return
        super()._take(message)
        if not is_comm and all(cell.ended for cell in self._cells.values()):
            kept, self._kept = self._kept, []
            for each in kept:
                super()._take(each)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(VS_CODE, id="vscode"),
        pytest.param(COLAB, id="colab", marks=pytest.mark.exhaustive),
    ],
)
def page(
    request: pytest.FixtureRequest, warm_agents: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[QuietPage]:
    folder = tmp_path_factory.mktemp("notebooks")
    kernel = kernel_of(kernels.NEWEST, folder, request.param)
    page = QuietPage(kernel.manager)
    if request.param is COLAB:
        page.run(DROP_WHAT_THREADS_SEND)
    yield page
    page.close()
    kernel.shut_down()


def started(page: QuietPage, cell: str, word: str) -> Cell:
    """Start a cell that goes on, and wait for its output: that comes as text after three seconds."""
    running = page.start(cell)
    page.until(running, lambda: word in running.stream())
    return running


def test_text_while_the_cell_runs_and_a_picture_at_its_end(page: QuietPage, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = started(page, UNTIL_THERE_IS.format(options="", path=str(go)), "working")
    page.until(cell, lambda: "running" in cell.block and "loss 0.5" in cell.block)
    go.touch()
    page.finish(cell)
    assert cell.stream() == "working\n" and cell.value == "'done'"
    assert "1 rank · succeeded" in cell.block and "data:image" in cell.html
    assert bundles(cell)[-1].keys() == {"text/html", "text/plain"}
    assert page.heard == [], "the live view has got nothing"


def test_the_stop_button_of_the_front_end_stops(page: QuietPage) -> None:
    cell = started(page, STUCK.replace("--grace 600", "--grace 1"), "alert(1)")
    page._manager.interrupt_kernel()
    page.finish(cell)
    assert "stopped by you" in cell.error
    assert "2 ranks · stopped" in cell.block


def test_the_input_line_is_used(page: QuietPage) -> None:
    cell = page.start("%%distributed --np 1\ninput('name: ')")
    assert page.type("Ada") == "name: "
    assert page.finish(cell).value == "'Ada'"


def test_a_detached_gang_is_shown_on_request(page: QuietPage, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = page.run(UNTIL_THERE_IS.format(options="--detach --name seen", path=str(go)))
    assert cell.value is not None and cell.value.startswith("<Gang ")
    greeted(page)
    go.touch()
    assert page.run("%gang wait seen").value == "'done'"
    shown = page.run("%gang show seen")
    assert "1 rank · succeeded" in shown.block and "data:image" in shown.html
