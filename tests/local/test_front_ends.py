"""Front ends that deliver less than Jupyter's own: VS Code and Colab, imitated by their documented behaviour.

Neither handles comm messages while a cell runs (https://github.com/microsoft/vscode-jupyter/issues/17360).
Colab does not show what a thread of the kernel sends (https://github.com/googlecolab/colabtools/issues/3373).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import kernels
from tests.pages import QuietPage
from tests.widget_kernel import (
    STUCK,
    UNTIL_THERE_IS,
    VS_CODE,
    assert_text_then_picture,
    greeted,
    kernel_of,
    started,
)

# test_widget has the first one, for VS Code, in a kernel that it has anyway
pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("warm_agents")]

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


@pytest.fixture(
    scope="module",
    params=[pytest.param(VS_CODE, id="vscode"), pytest.param(COLAB, id="colab")],
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


def test_text_while_the_cell_runs_and_a_picture_at_its_end(page: QuietPage, tmp_path: Path) -> None:
    assert_text_then_picture(page, tmp_path / "go")


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
