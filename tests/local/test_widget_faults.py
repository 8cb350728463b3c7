"""The live view with a stand-in for its page: how often it sends, and what happens if the page breaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import GangState, replay
from hydrogen_magic.views.widget import WidgetView
from hydrogen_magic.views.widget import display as displays
from tests.fake_gang import FakeGang


class FakePage:
    """A page that records what it is sent."""

    interval_s = 0.1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, content: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self.sent.append(dict(content))

    def show(self, text: str) -> None: ...
    def pump(self) -> None: ...
    def unblock(self) -> None: ...
    def end(self, *_: str) -> None: ...
    def close(self) -> None: ...


class Rig:
    """A view of a gang that runs, with a clock of the test's own; the test acts as the page."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hydrogen_magic.views.widget.model.Page", FakePage)
        monkeypatch.setattr(displays.CellOutput, "show", lambda *_: None)
        self.now_s = 0.0
        self.gang = FakeGang(folder)
        gang: Any = self.gang
        self.view = WidgetView(gang, blocking=True, expected=True, clock=lambda: self.now_s)
        self.events = self.gang.events()
        self.tick(self.events)

    def tick(self, fresh: Sequence[ev.Event] = (), after_s: float = 0.1) -> None:
        self.now_s += after_s
        self.view.update(self.state, fresh)

    @property
    def state(self) -> GangState:
        return replay(self.events)

    @property
    def sent(self) -> list[dict[str, Any]]:
        page: Any = self.view._page
        found: list[dict[str, Any]] = page.sent
        return found

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [message for message in self.sent if message["kind"] == "delta"]

    def order(self, number: int, **content: Any) -> None:
        self.view._commands.take({"id": str(number), "client": "me", **content})


def test_at_most_one_message_a_tenth_of_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    rig.order(0, do="hello")
    rig.tick()
    n_before = len(rig.deltas)
    for number in range(200):  # two seconds
        output = ev.Output(1.0, 0, "stdout", f"{number}\n")
        rig.gang._events.append(output)
        rig.events = rig.gang.events()
        rig.tick([output], after_s=0.01)
    assert 15 <= len(rig.deltas) - n_before <= 20


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


def test_requests_without_their_fields_are_refused_and_the_page_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, monkeypatch)
    wrong = ("detail", "rows", "tracks")
    for number, do in enumerate(("hello", *wrong)):
        rig.order(number, do=do)
    rig.tick()
    refused = [message["id"] for message in rig.sent if message.get("ok") is False]
    assert refused == [str(number + 1) for number, _ in enumerate(wrong)]


@pytest.mark.parametrize("fails_in", ["__init__", "show", "pump", "end"])
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
    assert printed.err.startswith("the live view of gang 3f2a failed") and "no page" in printed.err


def show(rig: Rig, fresh: list[ev.Event]) -> None:
    """Let a page say hello, ``fresh`` happen, and the view end."""
    rig.order(0, do="hello")
    rig.gang._events += fresh
    rig.events = rig.gang.events()
    rig.tick(fresh)
    rig.view.close(rig.state)
