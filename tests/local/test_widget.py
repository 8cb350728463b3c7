"""The live widget in real kernels, with pages that speak the widget protocol."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import kernels
from tests.jupyter import Kernel
from tests.pages import Page, QuietPage, show_widgets
from tests.widget_kernel import (
    STUCK,
    UNTIL_THERE_IS,
    VS_CODE,
    assert_text_then_picture,
    bundles,
    greeted,
    kernel_of,
    stop,
)

pytestmark = pytest.mark.usefixtures("warm_agents")

WIDGET = "application/vnd.jupyter.widget-view+json"
BREAKS = (
    "from hydrogen_magic.views.widget import page_updates\n"
    "whole = page_updates.PageUpdates.{method}\n"
    "def broken(*_): raise RuntimeError('no more')\n"
    "page_updates.PageUpdates.{method} = broken"
)
MENDS = "page_updates.PageUpdates.{method} = whole"
COMMS = "len(__import__('comm').get_comm_manager().comms)"
BOARD = (
    "import hydrogen_magic.views.widget.shell_interceptor as routes\n"
    "own = routes.interceptor_of(get_ipython().kernel)\n"
    "own._lines, own._onward, isinstance(own._stream._recv_callback, routes.ShellInterceptor)"
)


@pytest.fixture(scope="module")
def kernel_by_version(
    warm_agents: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Kernel]]:
    """Return a function that starts a kernel with a version of ipykernel, one for all tests."""
    started: dict[str, Kernel] = {}

    def get(version: str) -> Kernel:
        if version in started and started[version].is_busy:  # with the cell of a test that failed
            started.pop(version).shut_down()
        if version not in started:
            started[version] = kernel_of(version, tmp_path_factory.mktemp("notebooks"))
        return started[version]

    yield get
    for kernel in started.values():
        kernel.shut_down()


@pytest.fixture(params=kernels.EACH)
def each_kernel(
    request: pytest.FixtureRequest, kernel_by_version: Callable[[str], Kernel]
) -> Kernel:
    return kernel_by_version(request.param)


@pytest.fixture
def kernel(kernel_by_version: Callable[[str], Kernel]) -> Kernel:
    return kernel_by_version(kernels.NEWEST)


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of the kernel that the test uses."""
    name = "each_kernel" if "each_kernel" in request.fixturenames else "kernel"
    page = Page(request.getfixturevalue(name).manager)
    yield page
    page.close()


@contextmanager
def environment(kernel: Kernel, **variables: str) -> Iterator[None]:
    """Have a kernel with these variables in place of those by which front ends mark theirs."""
    kernel.run(
        "import os\nbefore = dict(os.environ)\ndel os.environ['JPY_SESSION_NAME']\n"
        f"os.environ.update({variables!r})"
    )
    try:
        yield
    finally:
        kernel.run("os.environ.clear()\nos.environ.update(before)")


@contextmanager
def without_text(kernel: Kernel) -> Iterator[None]:
    """Have gangs not be shown as text, however late a page says hello."""
    kernel.run(
        "import hydrogen_magic.views.widget as widget\n"
        "limit_s, widget._HELLO_TIMEOUT_S = widget._HELLO_TIMEOUT_S, 600.0"
    )
    try:
        yield
    finally:
        kernel.run("widget._HELLO_TIMEOUT_S = limit_s")


# ── while the cell blocks ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("with_subshell", [False, True], ids=["plain", "subshell"])
def test_stop_reaches_a_kernel_that_a_cell_blocks(each_kernel: Kernel, with_subshell: bool) -> None:
    version = each_kernel.value("__import__('ipykernel').__version__")
    if with_subshell and version.startswith("'6"):
        pytest.skip("ipykernel 6 has no subshells")
    page = Page(each_kernel.manager, with_subshell=with_subshell)
    try:
        cell = each_kernel.start(STUCK)
        greeted(page)
        page.read_until(
            lambda: [
                r
                for d in page.of_kind("delta")
                for r in d.get("ranks", ())
                if r["steps"] or r["metrics"]
            ]
        )
        assert not cell.ended
        ack = page.ack(page.order("stop"))
        assert ack["ok"], ack
        each_kernel.finish(cell)
    finally:
        page.close()
    assert "GangStoppedError" in cell.error and "stopped by you" in cell.error
    assert each_kernel.value("1 + 1") == "2"


def test_a_page_reloaded_meanwhile_comes_back_and_stops_the_gang(each_kernel: Kernel) -> None:
    first = Page(each_kernel.manager)
    cell = each_kernel.start(STUCK)
    greeted(first)
    first.close()
    second = Page(each_kernel.manager, wait=False)
    try:
        second.come_back()
        greeted(second)
        assert second.models[second.comm_id]["blocking"] is True
        stop(each_kernel, second, cell)
        second.read_until(second.picture)
    finally:
        second.close()
    assert "stopped by you" in cell.error


def test_cells_sent_meanwhile_wait_and_keep_their_order(
    each_kernel: Kernel, page: Page, tmp_path: Path
) -> None:
    path = tmp_path / "go"
    each_kernel.run("order = []")
    cell = each_kernel.start(UNTIL_THERE_IS.format(options="", path=str(path)))
    greeted(page)
    queued = [each_kernel.start(f"order.append({n}); len(order)") for n in range(3)]
    page.ack(page.order("rows", ranks=[0]))
    assert not any(each.messages for each in queued)
    path.touch()
    each_kernel.finish(queued[-1])
    assert cell.value == "'done'"
    assert each_kernel.value("order") == "[0, 1, 2]"


def test_the_kernel_is_busy_as_long_as_its_cell(each_kernel: Kernel, page: Page) -> None:
    """Also after it has answered pages: each of those messages ends with the kernel idle."""
    cell = each_kernel.start(STUCK)
    greeted(page)
    page.states.clear()
    page.ack(page.order("rows", ranks=[0]))
    page.read_until(lambda: page.states[-3:] == ["busy", "idle", "busy"])
    stop(each_kernel, page, cell)
    page.read_until(lambda: page.states[-1] == "idle")
    assert each_kernel.value("'still answers'") == "'still answers'"


def test_hooks_of_cells_do_not_see_orders(each_kernel: Kernel, page: Page) -> None:
    """matplotlib draws open figures in one of them, in the thread that calls it."""
    each_kernel.run(
        "seen = []\nnote = lambda *_: seen.append(1)\n"
        "get_ipython().events.register('post_execute', note)"
    )
    before = int(each_kernel.value("len(seen)"))
    cell = each_kernel.start(STUCK)
    greeted(page)
    for _ in range(5):
        page.ack(page.order("rows", ranks=[0]))
    stop(each_kernel, page, cell)
    greeted(page)  # and now that the kernel is idle
    assert int(each_kernel.value("len(seen)")) == before + 2
    each_kernel.run("get_ipython().events.unregister('post_execute', note)")


def test_an_order_is_done_once_and_always_answered(kernel: Kernel, page: Page) -> None:
    cell = kernel.start(STUCK)
    greeted(page)
    order = {"do": "stacks", "id": f"{page.name}.same", "client": page.name}
    for _ in range(3):
        page.send(order)
    page.read_until(lambda: [a["id"] for a in page.of_kind("ack")].count(order["id"]) == 3)
    for wrong in ("hack", None, "profile"):
        assert page.ack(page.order(wrong))["ok"] is False  # type: ignore[arg-type]
    page.send(["no", "order"])
    stop(kernel, page, cell)


# ── detached ─────────────────────────────────────────────────────────────────────────────────────


def test_a_detached_gang_is_stopped_from_its_page(each_kernel: Kernel, page: Page) -> None:
    cell = each_kernel.run(STUCK.replace("--np 2", "--np 2 --detach"))
    assert cell.value is not None and cell.value.startswith("<Gang ")
    greeted(page)
    assert page.models[page.comm_id]["blocking"] is False
    assert page.ack(page.order("stop"))["ok"]
    page.read_until(page.picture)


def test_a_detached_gang_is_stopped_while_another_cell_runs(kernel: Kernel, page: Page) -> None:
    kernel.run(STUCK.replace("--np 2", "--np 2 --detach"))
    greeted(page)
    cell = kernel.start(
        "import hydrogen_magic as hm\ngang = list(hm.gangs().values())[-1]\ngang.wait(60)"
    )
    kernel.until(cell, lambda: cell.messages)
    assert page.ack(page.order("stop"))["ok"]
    assert kernel.finish(cell).value == "True"


# ── after the end ────────────────────────────────────────────────────────────────────────────────


def test_after_the_end_pages_get_everything_and_a_stale_stop_does_nothing(
    each_kernel: Kernel, page: Page
) -> None:
    cell = each_kernel.start(STUCK)
    greeted(page)

    def logged() -> set[int]:
        rows = (row for delta in page.of_kind("delta") for row in delta.get("ranks", ()))
        return {row["rank"] for row in rows if row["metrics"]}

    page.read_until(lambda: logged() == {0, 1})
    stop(each_kernel, page, cell)
    late = Page(each_kernel.manager)
    try:
        late.come_back()
        refused = late.ack(late.order("stop"))
        assert refused["ok"] is False and "has already ended: stopped" in refused["text"]
        greeted(late)
        everything = next(d for d in late.of_kind("delta") if d.get("full"))
        assert everything["gang"]["state"] == "stopped"
        assert [curve["metric"] for curve in everything["curves"]] == ["loss"]
        assert (
            late.file(late.order("csv")).decode().splitlines()[0] == "attempt,rank,step,time_s,loss"
        )
        assert b"alert(1)" in late.file(late.order("log", rank=1))
        both = late.file(late.order("log", rank=None)).decode()
        assert both.index("── rank 0 ──") < both.index("── rank 1 ──")
        trace = json.loads(gzip.decompress(late.file(late.order("trace"))))
        assert {entry["pid"] for entry in trace["traceEvents"]} == {0, 1}
    finally:
        late.close()


def test_what_a_saved_notebook_holds(kernel: Kernel, page: Page) -> None:
    with without_text(kernel):
        cell = kernel.start(STUCK)
        greeted(page)
        page.read_until(lambda: "alert(1)" in str([d.get("lines") for d in page.of_kind("delta")]))
        stop(kernel, page, cell)
    page.read_until(page.picture)
    shown = bundles(cell)
    assert len(shown) == 2  # an update draws a page's view anew, so there is one, at the end
    # Nothing updates it in a notebook that is saved meanwhile and opened without its kernel.
    assert re.fullmatch(
        r"gang \w+ · 2 ranks · started [\d-]+ \d\d:\d\d; was running when this notebook was saved",
        shown[0]["text/plain"],
    )
    # A saved widget would be an error message where its kernel is gone.
    assert [list(data) for data in shown] == [["text/html", "text/plain"]] * 2
    final = shown[1]["text/html"]
    assert final == page.picture()
    assert re.search(r"stopped after [\d.]+ s by you\n", shown[1]["text/plain"])
    assert "<script" not in final and "alert(1)" in final
    synced = {name for name in page.models[page.comm_id] if not name.startswith("_")}
    assert synced - {"layout", "tabbable", "tooltip"} == {
        "kernel_id",
        "blocking",
        "place",
        "withdrawn",
    }


def test_where_widgets_are_opened_on_sight_the_widget_itself_is_shown(
    kernel: Kernel, page: Page
) -> None:
    with environment(kernel, **VS_CODE):
        cell = kernel.start(STUCK)
        greeted(page)
        stop(kernel, page, cell)
        page.read_until(page.picture)
    shown = bundles(cell)
    assert shown[0][WIDGET]["model_id"] == page.comm_id and WIDGET not in shown[-1]


def test_a_running_gang_gets_a_second_live_view(kernel: Kernel, page: Page) -> None:
    kernel.run(STUCK.replace("--np 2", "--np 2 --detach"))
    first = page.comm_id
    kernel.run("%gang show")
    second = page.read_until(lambda: next(iter(page.models.keys() - {first}), ""))
    page.ack(page.order("hello", comm_id=first))
    page.ack(page.order("stop", comm_id=second))
    page.read_until(lambda: all(map(page.picture, (first, second))))


def test_widgets_of_older_views_are_closed(kernel: Kernel, page: Page) -> None:
    kernel.run("%%distributed --np 1\n1")
    oldest = page.comm_id
    for _ in range(4):
        kernel.run("%%distributed --np 1\n1")
    assert kernel.value(f"{oldest!r} in __import__('comm').get_comm_manager().comms") == "False"
    page.read_until(lambda: len(page.models) == 5)
    assert page.ack(page.order("hello"))["ok"]


# ── where no page is ─────────────────────────────────────────────────────────────────────────────


def test_without_a_page_text_takes_over_with_everything_so_far(
    each_kernel: Kernel, tmp_path: Path
) -> None:
    kernel, path = each_kernel, tmp_path / "go"
    cell = kernel.start(UNTIL_THERE_IS.format(options="", path=str(path)))
    kernel.until(cell, lambda: "working" in cell.stream())
    kernel.until(cell, lambda: bundles(cell)[-1].keys() == {"text/plain"})
    path.touch()
    kernel.finish(cell)
    assert cell.stream() == "working\n" and cell.value == "'done'"
    assert bundles(cell)[-1].keys() == {"text/html", "text/plain"}
    assert "succeeded" in cell.block


def test_text_takes_over_in_vs_code(kernel: Kernel, tmp_path: Path) -> None:
    """It handles no comm message while a cell runs; test_front_ends has more of it."""
    with environment(kernel, **VS_CODE):
        page = QuietPage(kernel.manager)
        try:
            assert_text_then_picture(page, tmp_path / "go")
        finally:
            page.close()


def test_a_page_that_comes_late_takes_over_from_the_text(
    kernel: Kernel, page: Page, tmp_path: Path
) -> None:
    path = tmp_path / "go"
    cell = kernel.start(UNTIL_THERE_IS.format(options="", path=str(path)))
    kernel.until(cell, lambda: "working" in cell.stream())
    greeted(page)
    kernel.until(cell, lambda: "text/html" in bundles(cell)[-1])
    path.touch()
    kernel.finish(cell)
    assert bundles(cell)[-1]["text/html"] == page.read_until(page.picture)
    assert cell.value == "'done'"


def test_headless_there_is_text_and_a_picture_and_no_widget(kernel: Kernel) -> None:
    with environment(kernel):
        cell = kernel.run("%%distributed --np 1\nprint('hello')\n1")
        gang = kernel.run("import hydrogen_magic as hm\nlist(hm.gangs().values())[-1]")
    assert cell.stream() == "hello\n" and cell.value == "1"
    assert "comm_open" not in [kind for kind, _ in cell.messages]
    assert bundles(cell)[-1].keys() == {"text/html", "text/plain"}
    values = [content["data"] for kind, content in gang.messages if kind == "execute_result"]
    assert values[0].keys() == {"text/html", "text/plain"}
    assert "hello" in values[0]["text/html"]  # the output of the first cell


def test_without_the_built_view_there_is_text(kernel: Kernel) -> None:
    kernel.run("bundle, display.BUNDLE = display.BUNDLE, pathlib.Path('missing.js')")
    cell = kernel.run("%%distributed --np 1\nprint('hello')")
    kernel.run("display.BUNDLE = bundle")
    assert cell.stream() == "hello\n" and cell.stream("stderr") == ""


def test_quiet_shows_output_only(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed --np 1 --quiet\nprint('hello')")
    assert cell.stream() == "hello\n" and bundles(cell) == []


def test_the_progress_of_a_write_is_one_text_under_its_cell(each_kernel: Kernel) -> None:
    cell = each_kernel.run(
        "import threading\nfrom hydrogen_magic.views import row_progress\n"
        "row_progress._SHOWN_AFTER_S = row_progress._REFRESH_S = 0\n"
        "with row_progress.RowProgress(20) as progress:\n"
        "    thread = threading.Thread(target=progress.add, args=(10,))\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    progress.add(10)"
    )
    assert not cell.error, cell.error
    kinds = [kind for kind, _ in cell.messages if kind not in ("status", "execute_input")]
    assert kinds == ["display_data", *["update_display_data"] * (len(kinds) - 1)]
    texts = [shown["text/plain"] for shown in bundles(cell)]
    assert "10 of 20 rows" in texts[0] and "20 of 20 rows" in texts[-1]


# ── faults ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["update", "full"])
def test_text_takes_over_from_a_view_that_breaks(
    kernel: Kernel, page: Page, tmp_path: Path, method: str
) -> None:
    path = tmp_path / "go"
    comms = kernel.value(COMMS)
    kernel.run(BREAKS.format(method=method))
    try:
        cell = kernel.start(UNTIL_THERE_IS.format(options="", path=str(path)))
        page.order("hello")
        kernel.until(cell, lambda: "working" in cell.stream())
        path.touch()
        kernel.finish(cell)
    finally:
        kernel.run(MENDS.format(method=method))
    assert cell.value == "'done'" and not cell.error
    assert "failed and was replaced by text" in cell.stream("stderr") and "no more" in cell.stream(
        "stderr"
    )
    assert cell.stream() == "working\n"
    assert bundles(cell)[-1].keys() == {"text/html", "text/plain"}
    assert kernel.value(COMMS) == comms
    assert kernel.value(BOARD) == "({}, None, False)"


def test_a_detail_that_there_is_not_is_refused_and_nothing_else(kernel: Kernel, page: Page) -> None:
    """A page that has not heard yet of the next attempt asks for metrics of the last one."""
    cell = kernel.start(STUCK)
    greeted(page)
    detail: dict[str, Any] = {"metric": "gone", "from": 0, "until": 9, "buckets": 5}
    order = page.order("detail", **detail)
    page.read_until(lambda: [a for a in page.of_kind("ack") if a["id"] == order and not a["ok"]])
    page.ack(page.order("rows", ranks=[0]))
    assert not cell.ended
    stop(kernel, page, cell)
    assert "stopped by you" in cell.error


# ── after a restart ──────────────────────────────────────────────────────────────────────────────


def test_gang_show_draws_a_gang_of_before_the_restart(
    kernel_by_version: Callable[[str], Kernel], tmp_path: Path
) -> None:
    """The last test here: with the kernel its agent ends, and the next gang would start slowly."""
    kernel = kernel_by_version(kernels.NEWEST)
    cell = kernel.run("%%distributed --np 1\nimport hydrogen_magic as hm\nhm.log(step=1, loss=0.5)")
    name = bundles(cell)[-1]["text/plain"].split()[1]
    kernel.restart(now=True)
    kernel.load()
    show_widgets(kernel, tmp_path)
    page = Page(kernel.manager)
    try:
        shown = kernel.run(f"%gang show {name}")
        assert f"gang {name}" in bundles(shown)[-1]["text/html"]
        greeted(page)
        everything = next(d for d in page.of_kind("delta") if d.get("full"))
        assert [curve["metric"] for curve in everything["curves"]] == ["loss"]
    finally:
        page.close()
