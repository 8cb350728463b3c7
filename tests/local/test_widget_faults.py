"""A live view that breaks, and pages that ask for nonsense: the gang and its output go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.utils import ensure_event_loop

from hydrogen_magic import events as ev
from hydrogen_magic.gang.state import GangState, replay
from hydrogen_magic.views.widget import WidgetView
from hydrogen_magic.views.widget import display as displays
from tests import kernels
from tests.fake_gang import FakeGang
from tests.jupyter import Kernel
from tests.pages import Page
from tests.widget_kernel import STUCK, UNTIL_THERE_IS, bundles, greeted, kernel_of, stop

BREAKS = (
    "import hydrogen_magic.views.widget.feed as feed\n"
    "whole = feed.Feed.{method}\n"
    "def broken(*_): raise RuntimeError('no more')\n"
    "feed.Feed.{method} = broken"
)
MENDS = "feed.Feed.{method} = whole"
COMMS = "len(__import__('comm').get_comm_manager().comms)"
BOARD = (
    "import hydrogen_magic.views.widget.routes as routes\n"
    "routes._board._lines, routes._board._onward, "
    "isinstance(routes._board._stream._recv_callback, routes.Switchboard)"
)


@pytest.fixture(scope="module", autouse=True)
def jupyter_loop() -> None:
    """Make jupyter_core's event loop, which stays for good, before anybody looks for leaks."""
    ensure_event_loop()


@pytest.fixture(scope="module")
def kernel(warm_agents: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = kernel_of(kernels.NEWEST, tmp_path_factory.mktemp("notebooks"))
    yield kernel
    kernel.shut_down()


@pytest.fixture
def page(kernel: Kernel) -> Iterator[Page]:
    page = Page(kernel.manager)
    yield page
    page.close()


@pytest.mark.usefixtures("warm_agents")
@pytest.mark.parametrize("method", ["update", "whole"])
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
    assert "broke, text goes on" in cell.stream("stderr") and "no more" in cell.stream("stderr")
    assert cell.stream() == "working\n"
    assert bundles(cell)[-1].keys() == {"text/html", "text/plain"}
    assert kernel.value(COMMS) == comms
    assert kernel.value(BOARD) == "({}, None, False)"


@pytest.mark.usefixtures("warm_agents")
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


# ── without a kernel ─────────────────────────────────────────────────────────────────────────────


class FakePage:
    """A page that takes note of what it is sent."""

    interval_s = 0.1

    def __init__(self, *_: Any) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, content: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self.sent.append(dict(content))

    def open(self, *_: Any, **__: Any) -> None: ...
    def show(self, text: str) -> None: ...
    def pump(self) -> None: ...
    def unblock(self) -> None: ...
    def end(self, *_: str) -> None: ...
    def close(self) -> None: ...


class Rig:
    """A view of a gang that runs, whose page says what a test wants."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hydrogen_magic.views.widget.model.Page", FakePage)
        monkeypatch.setattr(displays.Display, "put", lambda *_: None)
        self.now_s = 0.0
        self.gang = FakeGang(folder)
        actions: Any = self.gang
        self.view = WidgetView(actions, blocking=True, expected=True, clock=lambda: self.now_s)
        self.events = self.gang.events()
        self.tick(self.events)

    def tick(self, fresh: Sequence[ev.Event] = ()) -> None:
        self.now_s += 0.1
        self.view.update(self.state, fresh)

    @property
    def state(self) -> GangState:
        return replay(self.events)

    @property
    def sent(self) -> list[dict[str, Any]]:
        page: Any = self.view._page
        found: list[dict[str, Any]] = page.sent
        return found

    def order(self, number: int, **content: Any) -> None:
        self.view._desk.take({"id": str(number), "client": "me", **content})


def test_a_page_that_says_hello_all_the_time_gets_everything_once_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    for number in range(100):
        rig.order(number, do="hello")
    rig.tick()
    assert (
        len([message for message in rig.sent if message.get("to") == "me" and "full" in message])
        == 1
    )
    assert len([message for message in rig.sent if message["kind"] == "ack"]) == 100


def test_only_the_newest_of_details_of_one_metric_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    rig.order(0, do="hello")
    rig.tick()
    for number in range(1, 50):
        rig.order(number, do="detail", metric="loss", **{"from": 0, "until": number, "buckets": 9})
    rig.order(50, do="detail", metric="other", **{"from": 0, "until": 1, "buckets": 9})
    rig.tick()
    details = [message for message in rig.sent if message["kind"] == "detail"]
    assert [(message["id"], message["metric"]) for message in details] == [("49", "loss")]
    assert rig.sent[-1]["id"] == "50" and rig.sent[-1]["ok"] is False


@pytest.mark.parametrize("fails_in", ["open", "show", "pump", "end"])
def test_whatever_of_the_page_fails_the_output_is_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails_in: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no page")

    monkeypatch.setattr(FakePage, fails_in, fail)
    output = ev.Output(1.0, 0, "stdout", "hello\n")
    show(Rig(tmp_path, monkeypatch), [output, ev.GangEnded(2.0, "SUCCEEDED", "")])
    printed = capsys.readouterr()
    assert printed.out == "[0] hello\n"
    assert printed.err.startswith("the live view of gang 3f2a broke") and "no page" in printed.err


def show(rig: Rig, fresh: list[ev.Event]) -> None:
    """Let a page say hello, ``fresh`` happen, and the view end."""
    rig.order(0, do="hello")
    rig.gang._events += fresh
    rig.events = rig.gang.events()
    rig.tick(fresh)
    rig.view.close(rig.state)
