"""What ranks display, from the call on a rank to the outputs of the cell."""

from __future__ import annotations

import base64
import itertools
import json
import re
import weakref
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrogen_magic.core import display_marks
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.node.agent.display_order import DisplayOrder
from hydrogen_magic.node.worker.interactive import display_functions
from hydrogen_magic.node.worker.interactive.displays import MOST_BYTES, DisplayQueue
from hydrogen_magic.node.worker.interactive.mime_bundle import as_text, bundle_of
from hydrogen_magic.node.worker.reporting import reporter as reporters
from hydrogen_magic.views import pick_view, text_view
from hydrogen_magic.views.widget import WidgetView, rank_displays
from hydrogen_magic.views.widget.live_lines import LiveLines
from hydrogen_magic.views.widget.rank_displays import RankDisplays
from tests.fake_gang import FakeGang

# ── objects as MIME bundles ──────────────────────────────────────────────────────────────────────


class Rich:
    """An object with all kinds of representations."""

    def __repr__(self) -> str:
        return "rich"

    def _repr_html_(self) -> str:
        return "<b>rich</b>"

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return b"\x89PNG", {"width": 3}

    def _repr_latex_(self) -> str:
        raise NotImplementedError

    def _repr_markdown_(self) -> str:
        raise ZeroDivisionError

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/json": {"a": [1]}, "text/html": "<i>rich</i>"}


def test_a_bundle_has_what_a_notebook_would_show(capsys: pytest.CaptureFixture[str]) -> None:
    data, metadata = bundle_of(Rich())
    assert as_text(data) == {
        "text/plain": "rich",
        "text/html": "<i>rich</i>",
        "image/png": base64.b64encode(b"\x89PNG").decode(),
        "application/json": '{"a": [1]}',
    }
    assert metadata == {"image/png": {"width": 3}}
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert bundle_of(Rich, include={"text/plain"})[0] == {"text/plain": repr(Rich)}
    assert bundle_of(Rich(), exclude={"image/png"})[1] == {}


@pytest.mark.usefixtures("matplotlib")
def test_a_figure_is_drawn_as_in_a_notebook() -> None:
    from IPython.core.pylabtools import print_figure
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("classic"):
        figure = Figure()
        assert set(bundle_of(figure)[0]) == {"text/plain"}, "an empty one has no picture"
        figure.subplots().plot([1, 2])
        assert bundle_of(figure)[0]["image/png"] == print_figure(figure)


def test_an_object_that_displays_itself_has_no_bundle() -> None:
    class Own:
        def _ipython_display_(self) -> None:
            shown.append(self)

    shown: list[object] = []
    assert bundle_of(Own()) == ({}, {}) and len(shown) == 1


def test_objects_that_have_every_attribute_are_shown_as_text() -> None:
    class Config(dict[str, int]):
        def __getattr__(self, name: str) -> int:
            return self[name]

    for obj in (Config(rate=1), MagicMock()):
        assert bundle_of(obj) == ({"text/plain": repr(obj)}, {})


def test_types_over_the_limit_are_named() -> None:
    found = as_text({"text/plain": "plot", "image/png": b"x" * MOST_BYTES, "text/html": "<b>"})
    assert found.keys() == {"text/plain", "text/html"}
    assert found["text/plain"].startswith("plot\n(image/png of 2.7 MB not shown: a display has")
    alone = as_text({"text/html": "x" * (MOST_BYTES + 1)})
    assert "characters left out" in alone["text/plain"]
    widget = {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "w"}
    assert "text/plain" in as_text(widget)


def test_half_an_emoji_becomes_a_character_that_messages_can_contain() -> None:
    halves = {"cut \ud83d": "\udcff", "whole": "\ud83d\ude00"}
    found = as_text({"text/plain": "cut \ud83d", "application/vnd.plot+json": halves})
    assert found["text/plain"] == "cut \ufffd"
    plot = json.loads(found["application/vnd.plot+json"])
    assert plot == {"cut \ufffd": "\ufffd", "whole": "\N{GRINNING FACE}"}


# ── the rank's queue ─────────────────────────────────────────────────────────────────────────────


class Rank:
    """A queue with a clock of the test's own; what it wrote, and what it would send."""

    def __init__(self, n_ranks: int = 1, earlier: Collection[str] = ()) -> None:
        self.now_s = 0.0
        self.written = b""
        self.queue = DisplayQueue(0, n_ranks, lambda: self.now_s, self._write, earlier)

    def _write(self, data: bytes) -> None:
        self.written += data

    def show(self, text: str, display_id: str = "") -> None:
        self.queue.show({"text/plain": text}, display_id=display_id)

    def update(self, text: str, display_id: str) -> None:
        self.queue.update({"text/plain": text}, "", display_id)

    def sent(self) -> list[str]:
        return [line(display) for display in self.queue.take(self.now_s)]


def line(display: ev.Display) -> str:
    return f"{display.action} {display.data.get('text/plain', '')}".strip()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """Return a rank for which this process calls ``display``."""
    rank = Rank()
    monkeypatch.setattr(reporters._process, "reporter", SimpleNamespace(displays=rank.queue))
    return rank


def test_an_output_that_is_displayed_without_an_object_shows_its_updates(rank: Rank) -> None:
    handle = display_functions.display(display_id=True)
    assert handle is not None
    handle.update("loss: 1")
    assert Cell().take(rank.queue) == ["'loss: 1'"]


def test_an_update_without_content_leaves_the_output(rank: Rank) -> None:
    class Own:
        def _ipython_display_(self) -> None:
            display_functions.display("its own")

    handle = display_functions.display("first", display_id="x")
    assert handle is not None
    handle.update("second")
    handle.update(Own())
    handle.update("third", exclude={"text/plain"})
    assert rank.sent()[1:] == ["show 'first'", "update 'second'", "show 'its own'"]


def test_an_animation_skips_frames_that_would_not_be_seen() -> None:
    rank = Rank()
    for frame in range(100):
        rank.queue.clear(wait=True)
        rank.show(f"frame {frame}", "plot")
        rank.update(f"old title {frame}", "plot")
        rank.update(f"title {frame}", "plot")
    assert rank.sent() == ["clear later", "show frame 99", "update title 99"]
    rank.show("shown")
    rank.queue.clear(wait=True)
    assert rank.sent() == ["show shown", "clear later"], "it stays until the next one"
    rank.show("removed")
    rank.queue.clear(wait=False)
    rank.update("of a display that is gone", "plot")
    assert rank.sent() == ["clear"]


def test_a_page_that_only_prints_is_cleared_once() -> None:
    """``clear_output(wait=True)`` before each line, in a loop of thousands."""
    rank = Rank()
    for _ in range(1000):
        rank.queue.clear(wait=True)
    assert rank.sent() == ["clear later"]


def test_an_update_of_an_earlier_cells_display_is_a_new_one() -> None:
    first = Rank()
    first.show("loss: ?", "loss")
    second = Rank(earlier=first.queue.ids)
    second.update("loss: 1", "loss")
    second.update("loss: 2", "loss")
    second.update("of no display", "other")
    assert second.sent() == ["clear later", "show loss: 1", "update loss: 2"]
    assert second.queue.ids == {"loss"}


def test_displays_wait_for_their_rate_and_none_is_lost() -> None:
    rank = Rank()
    for number in range(5):
        rank.show(f"{number}" * 1_000_000)
    assert [text[:6] for text in rank.sent()] == ["clear ", "show 0", "show 1"]
    later: dict[int, list[str]] = {}
    for second in range(1, 6):
        rank.now_s += 1.0
        later[second] = [text[:6] for text in rank.sent()]
    assert later == {1: [], 2: ["show 2"], 3: ["show 3"], 4: ["show 4"], 5: []}, "0.75 MB/s"


def test_displays_that_still_wait_at_the_end_are_counted() -> None:
    """As of a cell that fails or is stopped."""
    rank, sent = Rank(), list[ev.Event]()
    for number in range(7):
        rank.show(f"{number}" * 1_000_000)
    reporter = reporters.Reporter(0, 0.0, sent.extend)
    reporter.displays = rank.queue
    reporter.close()
    lines = [line(event)[:13] for event in sent if isinstance(event, ev.Display)]
    shown = ["clear later", "show 00000000", "show 11111111"]
    assert lines == [*shown, "show 1 more n", "update 5 more"]


def test_displays_over_the_limits_are_counted() -> None:
    rank = Rank()
    for number in range(1005):
        rank.show(f"{number}")
    *_, last, _, note = rank.sent()
    assert last == "show 999" and note.startswith("update 5 more not shown")
    rank.queue.clear(wait=False)
    rank.show("space again")
    assert rank.sent() == ["clear", "show space again"]


# ── the agent's order ────────────────────────────────────────────────────────────────────────────


@given(st.data())
def test_displays_are_where_the_rank_made_them_however_they_arrive(data: st.DataObject) -> None:
    printed = data.draw(st.lists(st.sampled_from(["a", "b\n", ""]), max_size=6))
    wanted: list[str] = []
    text = ""
    for place, part in enumerate(printed, 1):
        text += part + display_marks.mark(place).decode()
        wanted += [*part, f"display {place}"]
    events: list[ev.Event] = []
    order = DisplayOrder(events.append)
    displays = [ev.Display(0.0, 0, place, ev.SHOW) for place in range(1, len(printed) + 1)]
    chunks = display_marks.split(text)
    # An agent reads the mark and the display in any order, but no display is ahead of earlier text.
    for index, chunk in enumerate(chunks):
        mark = display_marks.mark(chunk).decode() if isinstance(chunk, int) else chunk
        if isinstance(chunk, int) and data.draw(st.booleans()):
            order.emit_ready()
            while displays and displays[0].mark <= chunk:
                order.add_display(displays.pop(0))
        order.add_output(ev.Output(0.0, 0, "stdout", mark))
        if data.draw(st.booleans()) or index == len(chunks) - 1:
            order.emit_ready()
    for display in displays:
        order.add_display(display)
    order.emit_ready(is_final=True)
    found: list[str] = []
    for event in events:
        found += [f"display {event.mark}"] if isinstance(event, ev.Display) else [*_text(event)]
    assert found == wanted


def _text(event: ev.Event) -> str:
    assert isinstance(event, ev.Output)
    return event.text


def test_a_mark_that_a_program_printed_delays_its_output_only_for_a_while() -> None:
    events: list[ev.Event] = []
    order = DisplayOrder(events.append)
    order.add_output(ev.Output(0.0, 0, "stdout", f"a{display_marks.mark(7).decode()}b"))
    for _ in range(100):
        order.emit_ready()
    assert [_text(event) for event in events] == ["a", "b"]


def test_omitted_output_is_reported_once_and_logs_have_no_marks() -> None:
    events: list[ev.Event] = []
    order = DisplayOrder(events.append)
    order.add_display(ev.Display(0.0, 0, 1, ev.SHOW))
    mark = display_marks.mark(1)
    order.add_output(ev.Output(0.0, 0, "stdout", f"{mark.decode()}b", 10, 2))
    order.emit_ready()
    assert [getattr(event, "skipped_bytes", None) for event in events] == [10, None, 0]
    assert display_marks.without(b"a" + mark + b"b") == b"ab"


def test_secrets_are_masked_in_what_is_displayed() -> None:
    html, values = "<b>correct horse</b>", {"k": 'correct"horse'}
    data = as_text({"text/html": html, "application/json": values})
    masked = Mask(["correct horse", 'correct"horse']).event(ev.Display(0.0, 0, 1, ev.SHOW, data))
    assert masked.data["text/html"] == "<b>***</b>"
    assert json.loads(masked.data["application/json"]) == {"k": "***"}


# ── the cell's outputs ───────────────────────────────────────────────────────────────────────────


class Cell:
    """The outputs of a cell, as a front end has them."""

    def __init__(self) -> None:
        self.outputs: list[str] = []
        self.n_messages = 0
        self.displays = RankDisplays(self._new)

    def _new(self) -> Any:
        return _CellOutput(self)

    def carry_out(
        self, *actions: tuple[str, str, str], rank: int = 0, label: str = ""
    ) -> list[str]:
        """Carry out actions with their text and id; return the outputs."""
        events = [
            ev.Display(0.0, rank, 0, action, {"text/plain": text} if text else {}, "", name, label)
            for action, text, name in actions
        ]
        self.displays.show(events)
        return self.outputs

    def take(self, queue: DisplayQueue) -> list[str]:
        """Show what a rank may send; return the outputs."""
        self.displays.show(list(queue.take(0.0)))
        return self.outputs


class _CellOutput:
    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._index = -1

    def show(self, data: dict[str, str], metadata: object = None) -> None:
        if self._index < 0:
            self._index = len(self._cell.outputs)
            self._cell.outputs.append("")
        self._cell.outputs[self._index] = data.get("text/plain", "")
        self._cell.n_messages += 1


def test_clear_output_leaves_no_gap_that_the_next_display_does_not_fill() -> None:
    cell = Cell()
    later = (ev.CLEAR_LATER, "", "")
    assert cell.carry_out((ev.SHOW, "a", ""), (ev.SHOW, "b", "")) == ["a", "b"]
    assert cell.carry_out(later) == ["a", "b"]
    assert cell.carry_out((ev.SHOW, "c", "")) == ["c", ""]
    assert cell.carry_out((ev.CLEAR, "", "")) == ["", ""]
    n_messages = cell.n_messages
    assert cell.carry_out((ev.CLEAR, "", "")) == ["", ""] and cell.n_messages == n_messages
    assert cell.carry_out(*[(ev.SHOW, text, "") for text in "def"]) == ["d", "e", "f"]


def test_an_update_reaches_all_outputs_of_its_id_on_its_rank() -> None:
    cell = Cell()
    cell.carry_out((ev.SHOW, "a", "x"), (ev.SHOW, "b", ""), (ev.SHOW, "c", "x"))
    cell.carry_out((ev.SHOW, "other", "x"), rank=1, label="rank 1")
    assert cell.carry_out((ev.UPDATE, "new", "x")) == ["new", "b", "new", "rank 1", "other"]
    cell.carry_out((ev.CLEAR, "", ""), rank=1)
    assert cell.carry_out((ev.UPDATE, "gone", "x"), rank=1)[3:] == ["", ""]


def test_a_display_that_jupyter_refuses_is_replaced_by_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, bool]] = []

    def publish(data: dict[str, str], update: bool, **_: Any) -> None:
        data["text/plain"].encode()  # as Jupyter's session does
        sent.append((data["text/plain"], update))

    monkeypatch.setattr("IPython.display.publish_display_data", publish)
    texts = {ev.SHOW: {"text/plain": "half \ud83d"}, ev.UPDATE: {"text/plain": "whole"}}
    RankDisplays().show([ev.Display(0.0, 0, 1, *shown, "", "x") for shown in texts.items()])
    (refused, is_update), updated = sent
    assert "cannot be shown: UnicodeEncodeError" in refused and not is_update
    assert updated == ("whole", True)


def test_displays_of_a_quiet_detached_gang_stay_under_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: list[str] = []

    def output_under(cell: str) -> Any:
        cells.append(cell)
        return SimpleNamespace(show=lambda *_: None)

    monkeypatch.setattr(text_view, "kernel_here", lambda: "a kernel")
    monkeypatch.setattr(rank_displays, "CellOutput", output_under)
    monkeypatch.setattr(rank_displays, "running_cell", lambda: "of the gang")
    gang = FakeGang(tmp_path)
    view = pick_view(gang, quiet=True, detached=True)
    # as ipykernel 6 tells the thread of the view
    monkeypatch.setattr(rank_displays, "running_cell", lambda: "another")
    view.update(gang.snapshot(), [ev.Display(0.0, 0, 1, ev.SHOW, {"text/plain": "figure"})])
    assert cells == ["of the gang"]


def test_what_is_shown_stays_in_no_memory_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Figure(str): ...

    def display_one() -> weakref.ref[Figure]:
        figure = Figure("<svg>")
        displays.show([ev.Display(0.0, 0, 1, ev.SHOW, {"image/svg+xml": figure})])
        return weakref.ref(figure)

    monkeypatch.setattr("IPython.display.publish_display_data", lambda **_: None)
    displays = RankDisplays()  # of a view that is kept after the end
    assert display_one()() is None


def test_what_a_rank_printed_before_it_asks_is_shown() -> None:
    lines, printed = LiveLines(), ev.Output(1.0, 0, "stdout", "your name, ")
    lines.feed([printed, ev.InputRequested(1.0, 0, 1, "? ")], "id")
    assert [line[2] for line in lines.take(1.0)[0]] == ["your name, "]


@pytest.mark.parametrize(
    ("blocking", "expected"),
    [(True, False), (False, False), (False, True)],
    ids=["cell waits", "detached", "detached in a front end without widgets"],
)
def test_output_that_a_tool_without_widgets_may_have_ignored_is_in_the_picture(
    blocking: bool,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """nbclient ignores what is printed after the end of its cell."""
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(
        "IPython.display.publish_display_data", lambda data, **_: shown.append(data)
    )
    gang = FakeGang(tmp_path, ended=True)
    gang._events.insert(-1, ev.Output(1.5, 1, "stdout", "accuracy 0.93\n"))
    clock = itertools.count(0, 10.0).__next__  # no page says hello in time
    view = WidgetView(gang, blocking=blocking, expected=expected, clock=clock)
    view.update(gang.snapshot(), gang.events())
    view.close(gang.snapshot())
    assert capsys.readouterr().out == "[1] accuracy 0.93\n"
    for kind in ("text/html", "text/plain"):
        assert ("accuracy 0.93" in shown[-1][kind]) is not (blocking or expected)


def test_a_displayed_gang_says_when_it_had_its_state(tmp_path: Path) -> None:
    """A saved notebook keeps it."""
    running, ended = (repr(FakeGang(tmp_path, ended=ended)) for ended in (False, True))
    assert re.fullmatch(r"<Gang 3f2a: 2 ranks on local, [A-Z]+ at \d\d:\d\d:\d\d>", running)
    assert ended == "<Gang 3f2a: 2 ranks on local, SUCCEEDED>"
