"""The text view, from hand-written lists of events: what a person reads is all that is compared."""

from __future__ import annotations

import dataclasses
import html
import io
import math
import re
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.culprit import verdict
from hydrogen_magic.driver.state.failure_report import headline, report
from hydrogen_magic.driver.state.formatting import duration, ranks_text
from hydrogen_magic.driver.state.gang_state import GangState, replay
from hydrogen_magic.driver.state.output_lines import OutputLines, clean
from hydrogen_magic.node.worker.results import results
from hydrogen_magic.serialization.result_stream import CELL_VALUE
from hydrogen_magic.views.outputs import NotebookOutput, PlainOutput, TerminalOutput
from hydrogen_magic.views.text_table import gang_lines, status_line, warnings
from hydrogen_magic.views.text_view import TextView, pick_surface
from hydrogen_magic.views.widget.rank_rows import rank_row
from tests import pictures, seconds
from tests.gang_events import launched, running
from tests.pictures import drawn


def out(rank: int, text: str, stream: str = "stdout", skipped: int = 0) -> ev.Output:
    return ev.Output(1.0, rank, stream, text, skipped)


def texts(events: Sequence[ev.Event]) -> list[str]:
    lines = OutputLines()
    return [line.text for line in [*lines.feed(events, "3f2a"), *lines.flush()]]


# ── output ───────────────────────────────────────────────────────────────────────────────────────


@given(st.data())
def test_lines_do_not_depend_on_where_events_cut_them(data: st.DataObject) -> None:
    pieces = st.sampled_from(["a", "é", "\r", "\n", "\r\n", "\x1b[31m", "\x1b[0m", "\x1b[2K", "日"])
    text = "".join(data.draw(st.lists(pieces, max_size=30)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert texts([out(0, part) for part in parts]) == texts([out(0, text)])


def test_ranks_and_streams_do_not_mix() -> None:
    parts = [
        out(0, "he"),
        out(1, "wor"),
        out(0, "err\n", "stderr"),
        out(1, "ld\n"),
        out(0, "llo\n"),
    ]
    found = [(line.rank, line.stream, line.text) for line in OutputLines().feed(parts)]
    assert found == [(0, "stderr", "err"), (1, "stdout", "world"), (0, "stdout", "hello")]


def test_a_rewritten_line_is_shown_once_in_its_last_state() -> None:
    steps = [out(0, f"\r{n}%", "stderr") for n in range(100)]
    found = texts([*steps, out(0, "\r100%\n", "stderr"), out(0, "dos line\r\n")])
    assert found == ["100%", "dos line"]
    much = "".join(f"\r{n}" for n in range(5000))
    assert texts([out(0, much), out(0, "\rdone\n")]) == ["done"]


def test_a_day_of_progress_bar_and_an_endless_line_stay_small() -> None:
    lines = OutputLines()
    for n in range(2000):
        lines.feed([out(0, f"\r{n} " + "#" * 80)])
    assert sum(map(len, lines._partial.values())) < 200
    shown = lines.feed([out(1, "x" * 100_000)])
    assert sum(map(len, lines._partial.values())) < 20_000
    assert "".join(line.text for line in [*shown, *lines.flush(1)]) == "x" * 100_000


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("\x1b[2J\x1b[1;1Hhi", "hi"),
        ("\x1b]0;title\x07hi", "hi"),
        ("\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("a\x07b\x00c\x08\x7fd\x9b2J", "abcd"),
        ("\u202eevil", "evil"),
        ("tab\tstays 日本 [bold]", "tab\tstays 日本 [bold]"),
        ("cut \x1b[", "cut "),
        ("cut \x1b", "cut "),
    ],
)
def test_control_sequences_other_than_colours_are_taken_out(hostile: str, harmless: str) -> None:
    assert clean(hostile) == harmless


@given(st.text(st.characters(max_codepoint=0x2070), max_size=30))
def test_nothing_but_colours_survives_cleaning(text: str) -> None:
    left = re.sub(r"\x1b\[[0-9;:]*m", "", clean(text))
    assert not re.search("[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", left)


def test_what_was_skipped_is_said_with_the_way_to_all_of_it() -> None:
    assert texts([out(1, "begin"), out(1, "end\n", skipped=12_300_000)]) == [
        "begin",
        "... 12.3 MB not shown here; all of it: %gang logs 3f2a --rank 1",
        "end",
    ]


def test_what_was_skipped_and_is_in_no_log_has_no_way_to_it() -> None:
    lost = ev.Output(1.0, 1, "stdout", "end\n", 987_000, 10_000, is_logged=False)
    assert texts([lost]) == ["... 987 kB not shown here", "end"]


def test_a_line_without_an_end_appears_when_its_rank_exits() -> None:
    lines = OutputLines()
    assert lines.feed([out(0, "last words")]) == []
    assert [line.text for line in lines.feed([ev.RankExited(2.0, 0, 1)])] == ["last words"]


# ── the block ────────────────────────────────────────────────────────────────────────────────────


def busy(np: int = 2) -> list[ev.Event]:
    events = running(np)
    values = {"loss": (0.5, math.nan), "acc": (0.91, None), "grad\nnorm": (math.inf, None)}
    for rank in range(np):
        events += [
            ev.Progress(1.0, rank, 1, "epoch 日本\x1b[2J", 3, 10),
            ev.Steps(1.0, rank, 10),
            ev.Steps(3.0, rank, 35),
            ev.Metrics(3.0, rank, (1, 2), (2.0, 3.0), values),
            ev.RankHealth(3.0, rank, 512_000_000, 99.0, "R"),
        ]
    return events


def test_of_many_metrics_losses_come_first_and_learning_rates_last() -> None:
    names = ["lr/pg0", "learning_rate", "mAP50", "lr", "train/box_loss", "walrus", "val/Loss"]
    events = [*running(1), ev.Metrics(2.0, 0, (1,), (2.0,), dict.fromkeys(names, (0.5,)))]
    line = gang_lines(replay(events), 3.0, 200)[1]
    assert "train/box_loss 0.5  val/Loss 0.5  mAP50 0.5  walrus 0.5  +3" in line


def test_a_row_says_phase_progress_rate_metrics_and_memory() -> None:
    lines = gang_lines(replay(busy()), 65.0, 120)
    assert lines[0] == "gang 3f2a · 2 ranks · running · 1:05"
    rate = "0.4062 steps/s"  # 12.5 until 3 s, and none since
    told = f"epoch 日本 ███░░░░░░░░░ 3/10  {rate}  loss nan  acc 0.91  grad norm inf  512 MB"
    assert lines[1] == f"rank 0  cpu  running  {told}"


@pytest.mark.parametrize("name", ["history", "validation_history_of_each_fold", CELL_VALUE])
def test_how_much_of_a_result_is_sent_is_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(results, "_REPORT_S", 0.0)
    progress = results._PackingProgress(said.append)
    progress.begin(name, 99_900_000_000)
    progress.written(12_300_000_000)
    events = [*running(1), ev.RankPhase(2.0, 0, "finishing", said[-1])]
    state = replay(events)
    table = str(rank_row(state.ranks[0], "", 3.0)["doing"])
    for view in ("\n".join(gang_lines(state, 3.0, 100)), table, html.unescape(drawn(events))):
        assert "finishing: sending 12.3 GB of 99.9 GB: " in view


def test_one_of_a_kind_has_no_plural() -> None:
    """Neither in the text nor in the picture of a gang with one of everything."""
    spans = seconds.spans(1.0, 0, ["forward"], [0.3], [0.9], [0], skipped=1)
    steps = [ev.Steps(0.3, 0, 0), ev.Steps(1.3, 0, 1)]
    trained = [*running(1), *steps, spans, out(0, "hello\n")]
    rows = ev.RowsDone(1.5, 0.3, 1, 1, 1, 1)
    runs = [
        [*launched(1), ev.Queued(0.1, 0, 1, "")],
        *([*trained, told] for told in (rows, dataclasses.replace(rows, total=None, tasks=1))),
    ]
    shown = []
    for live in runs:
        for events in (live, pictures.ended(live)):
            state = replay(events)
            shown += [*gang_lines(state, 3.0, 200), status_line(state, 3.0)]
            shown.append(drawn(events, OutputLines().feed(events)))
    said = re.findall(r"(?<![\d.,])1 \w+(?![\w/])", "\n".join(shown))
    assert [each for each in said if each.endswith("s")] == []
    assert {*said} >= {f"1 {noun}" for noun in ("rank", "slot", "row", "task", "chunk", "step")}
    assert {*said} >= {"1 span", "1 line"}


@settings(max_examples=25)
@given(st.integers(0, 200), st.sampled_from([1, 3, 16, 17, 300]))
def test_no_line_is_wider_than_asked_for(width: int, np: int) -> None:
    lines = gang_lines(replay(busy(np)), 100.0, width)
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) <= 22


def test_a_long_notice_is_wrapped_so_that_its_remedy_can_be_read() -> None:
    text = "hvd.init() found no other rank, so each of the 2 trains by itself: launch with `--with horovod`"
    lines = gang_lines(replay([*running(), ev.Notice(2.0, "warning", text)]), 3.0, 60)[-2:]
    assert lines[0].startswith("! hvd.init()") and lines[1].startswith("  ")
    assert " ".join(line.strip() for line in lines) == f"! {text}"
    endless = gang_lines(replay([*running(), ev.Notice(2.0, "info", "word " * 99)]), 3.0, 60)
    assert endless[-1].endswith(" …")


def test_many_ranks_are_counted_and_the_slowest_and_failed_are_shown() -> None:
    events = busy(64)
    events += [ev.Progress(4.0, rank, 1, "", 9, 10) for rank in range(64) if rank != 33]
    events += [ev.RankExited(4.0, 12, None, "SIGKILL")]
    lines = gang_lines(replay(events), 5.0, 100)
    assert lines[1] == "63 running, 1 failed"
    assert lines[2].startswith("rank 12") and "SIGKILL" in lines[2]
    assert lines[4].startswith("rank 33")


def test_the_end_is_said_with_time_and_reason() -> None:
    over = [*running(), ev.GangEnded(12.34, "FAILED", "rank 1 failed: ValueError", 1)]
    lines = gang_lines(replay(over), 12.34, 100)
    assert lines[0] == "gang 3f2a · 2 ranks · failed after 12 s: rank 1 failed: ValueError"
    stopping = replay([*running(), ev.StopRequested(2.0, "user", kill=True)])
    assert "killing (you asked)" in gang_lines(stopping, 2.0, 100)[0]


def test_a_gang_that_is_stopped_before_it_starts_has_no_rank_that_waits() -> None:
    events = [*launched(), ev.StopRequested(0.1, "session", kill=True)]
    assert "killing (its session was ended)" in gang_lines(replay(events), 0.2, 100)[0]
    over = replay([*events, ev.GangEnded(0.2, "STOPPED", "stopped by you")])
    assert status_line(over, 0.2).endswith("stopped after 0.2 s by you · 2 stopped")


def test_empty_and_unlaunched_gangs_have_a_block_too() -> None:
    assert gang_lines(GangState(), 0.0, 80)[0].startswith("gang ")
    assert gang_lines(replay(launched(1)), 0.0, 80)[0] == "gang 3f2a · 1 rank · starting · 0.0 s"


def warned(events: Sequence[ev.Event], now_s: float) -> list[str]:
    return [one.text for one in warnings(replay(events), now_s)]


def test_ranks_that_need_attention_are_named() -> None:
    stopped = [*running(), ev.RankHealth(3.0, 1, 1, 0.0, "T")]
    assert warned(stopped, 4.0) == ["rank 1 is stopped (SIGSTOP): kill -CONT 101 resumes it"]
    late = [*launched(4), *(ev.RankPhase(0.2, r, "running") for r in (0, 2))]
    late += [ev.RankPhase(1.0, r, "loading", "importing slowmod") for r in (1, 3)]
    assert warned(late, 15.0) == []
    assert warned(late, 36.0) == ["waiting for ranks 1 and 3: importing slowmod, 35 s"]
    waiting = [*running(3), *(ev.CollectiveWait(5.0, r, "all_reduce", 7, 4.0) for r in (0, 2))]
    assert warned(waiting, 13.0) == []
    missing = "ranks 0 and 2 wait in all_reduce #7 for 30 s; missing: rank 1"
    assert warned(waiting, 34.0) == [missing]
    joining = [*running(), ev.CollectiveWait(5.0, 0, "init_process_group", 0, 4.0)]
    (late,) = warned(joining, 34.0)
    assert late == "rank 0 waits in init_process_group for 30 s; missing: rank 1", "not counted"
    over = [
        ev.CollectiveWait(6.0, 1, "", 7, 6.0),
        ev.RankResult(6.0, 1, 0),
        ev.RankExited(7.0, 1, 0),
    ]
    (left,) = warned([*waiting, *over], 34.0)
    assert "wait in all_reduce #7 for 30 s; rank 1 left it: do shapes and types agree" in left
    apart = [*running(), ev.CollectiveWait(5.0, 0, "all_reduce", 7, 4.0)]
    apart += [ev.CollectiveWait(5.0, 1, "barrier", 7, 4.0)]
    disagree = "rank 0 in all_reduce #7, rank 1 in barrier #7"
    assert warned(apart, 20.0) == [f"ranks disagree: {disagree}"]
    end = [
        ev.StopRequested(20.0, "timeout"),
        *(ev.RankExited(20.5, r, 0, "", True) for r in (0, 1)),
    ]
    end += [ev.StopRequested(20.5, "user", True), ev.GangEnded(21.0, "STOPPED", "too long")]
    known = "when it was stopped, {}"
    assert warned([*apart, *end], 500.0) == [known.format(f"ranks disagreed: {disagree}")]
    late = "ranks 0 and 2 waited in all_reduce #7 for 16 s; missing: rank 1"
    assert warned([*waiting, *end], 500.0) == [known.format(late)]
    silent = "ranks 0 and 1: no progress for 1:10: %gang stacks 3f2a shows where it is"
    assert (warned(running(), 59.0), warned(running(), 70.0)) == ([], [silent])
    assert warned([*running(), ev.GangEnded(1.0, "STOPPED", "you asked")], 500.0) == []


def test_words_for_times_and_ranks() -> None:
    found = [duration(s) for s in (0.04, 9.96, 59.6, 125, 3725)]
    assert found == ["0.0 s", "10 s", "1:00", "2:05", "1:02:05"]
    found = [ranks_text(r) for r in ([1], [0, 2], [0, 1, 3], list(range(128)))]
    assert found == ["rank 1", "ranks 0 and 2", "ranks 0, 1 and 3", "ranks 0 to 127"]


# ── surfaces ─────────────────────────────────────────────────────────────────────────────────────


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_have_a_start_growing_intervals_and_an_end() -> None:
    written, clock = io.StringIO(), Clock()
    view = TextView(PlainOutput(written, written), clock=clock)
    state = replay(busy())
    for _ in range(3000):
        clock.now += 0.1
        view.update(state, [])
    view.close(replay([*busy(), ev.GangEnded(300.0, "SUCCEEDED", "")]))
    lines = written.getvalue().splitlines()
    assert lines[0] == "gang 3f2a · 2 ranks on this machine · --np 2"
    assert lines[-1].startswith("gang 3f2a · 2 ranks · succeeded in 5:00")
    assert 8 <= len(lines) <= 14
    assert sum("no progress" in line for line in lines) == 1
    assert "\x1b" not in written.getvalue()


def test_plain_lines_carry_rank_and_stream_and_survive_an_ascii_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw, stderr = io.BytesIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", stderr)
    view = TextView(PlainOutput(), quiet=True)
    view.update(replay(running()), [out(0, "\x1b[31mrot\x1b[0m é\n"), out(1, "oops\n", "stderr")])
    view.close(replay(running()))
    assert raw.getvalue() == b"[0] rot ?\n"
    assert stderr.getvalue() == "[1] oops\n"


class Broken(io.StringIO):
    """A stream whose reader has ended, or whose disk is full."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]

    def write(self, text: str) -> int:
        raise BrokenPipeError("no reader")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_stream_that_cannot_be_written_is_reported_once_and_ends_nothing(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(is_terminal=is_terminal))
    view = TextView(pick_surface())
    view.update(replay(running()), [out(0, "lost\n")])
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # whose lines would begin in the middle
    view.close(replay([*running(), ev.GangEnded(4.0, "SUCCEEDED", "")]))
    assert sys.stdout.getvalue() == ""  # type: ignore[attr-defined]
    said = capsys.readouterr().err
    assert said.startswith("hydrogen_magic: stdout cannot be written (no reader)")
    assert len(said.splitlines()) == 1


def test_a_process_without_streams_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    view = TextView(pick_surface())
    view.update(replay(running()), [out(0, "lost\n"), out(0, "lost\n", "stderr")])
    view.close(replay(running()))


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_may_lack_characters_or_movements_of_the_cursor(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="latin-1")
    monkeypatch.setattr(stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("TERM", term)
    view = TextView(pick_surface())
    view.update(replay(busy()), [out(0, "漢字 é\n")])
    shown = raw.getvalue().decode("latin-1")
    assert "?? é" in shown and "gang 3f2a" in shown
    view.close(replay(busy()))


def test_one_rank_has_no_prefix() -> None:
    written = io.StringIO()
    view = TextView(PlainOutput(written, written), quiet=True)
    view.update(replay(running(1)), [out(0, "[bold]hello[/bold]\n")])
    assert written.getvalue() == "[bold]hello[/bold]\n"


def test_a_terminal_shows_output_above_one_block_and_no_markup() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system="standard")
    view = TextView(TerminalOutput(console))
    view.update(replay(running()), [out(0, "[bold]x[/bold] \x1b[32mgreen\x1b[0m\n")])
    view.update(replay(busy()), [out(1, "bad\n", "stderr")])
    view.close(replay([*busy(), ev.GangEnded(4.0, "SUCCEEDED", "")]))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
    assert "[0] [bold]x[/bold] green" in plain and "[1] bad" in plain
    assert "\x1b[32mgreen" in written.getvalue() and "\x1b[31m" in written.getvalue()
    assert "succeeded in 4.0 s" in plain[plain.rindex("gang 3f2a") :]
    assert written.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_a_terminal_has_no_block_while_a_rank_asks_the_user() -> None:
    written = io.StringIO()
    view = TextView(TerminalOutput(Console(file=written, force_terminal=True, width=80)))
    view.update(replay(running()), [])
    view.update(replay([*running(), ev.InputRequested(1.0, 0, 1, "name? ")]), [out(0, "above\n")])
    shown = written.getvalue()
    assert shown.rindex("above") > shown.rindex("gang 3f2a"), "removed, and not drawn below it"
    assert "\x1b[?25h" in shown, "the cursor is back"
    answered = [ev.InputRequested(1.0, 0, 1, ""), ev.InputAnswered(2.0, 0, 1)]
    view.update(replay([*running(), *answered]), [])
    assert written.getvalue()[len(shown) :].count("gang 3f2a") == 1


def test_displays_are_text_where_nothing_else_can_be_drawn() -> None:
    written = io.StringIO()
    view = TextView(PlainOutput(written, written), quiet=True)
    shown = ev.Display(1.0, 0, 1, ev.SHOW, {"text/html": "<b>x</b>", "text/plain": "x\n\x1b[2Jy"})
    hidden = ev.Display(1.0, 0, 1, ev.CLEAR)
    view.update(replay(running()), [out(0, "above"), shown, hidden, out(0, "below\n")])
    assert written.getvalue() == "[0] above\n[0] x\n[0] y\n[0] below\n"


def test_a_quiet_terminal_shows_no_block() -> None:
    written = io.StringIO()
    view = TextView(TerminalOutput(Console(file=written, force_terminal=True)), quiet=True)
    view.update(replay(running()), [out(0, "x\n")])
    view.close(replay([*running(), ev.GangEnded(4.0, "SUCCEEDED", "")]))
    assert "gang" not in written.getvalue()


def test_a_kernel_updates_one_display_at_most_twice_a_second() -> None:
    sent: list[str] = []
    clock = Clock()
    view = TextView(NotebookOutput(sent.append, clock), clock=clock)
    for tick in range(100):
        clock.now += 0.1
        view.update(replay([*busy(), ev.Steps(3.0 + tick / 10, 0, 100 + tick)]), [])
    view.close(replay([*busy(), ev.GangEnded(13.0, "SUCCEEDED", "")]))
    assert len(sent) <= 22
    assert "succeeded" in sent[-1] and "\x1b" not in sent[-1]
    # Nothing updates one in a notebook that is saved meanwhile.
    dated = r"(?s).*running.*\nas of [\d-]+ [\d:]+; %gang show 3f2a shows the present state"
    assert all(re.fullmatch(dated, text) for text in sent[:-1]) and "as of" not in sent[-1]


def test_a_gang_that_ended_before_it_was_shown_needs_its_block_only_above_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent: list[str] = []
    over = replay([*busy(), ev.GangEnded(4.0, "SUCCEEDED", "")])
    view = TextView(NotebookOutput(lambda text: sent.append(capsys.readouterr().out)))
    view.update(over, [])
    assert sent == []
    view.update(over, [out(0, "x\n")])
    assert (sent, capsys.readouterr().out) == ([""], "[0] x\n")


# ── failures ─────────────────────────────────────────────────────────────────────────────────────

CELL_FRAME = ev.Frame("<cell 7>", 5, "<module>", "loss = step(batch)")
STEP_FRAME = ev.Frame("/tmp/ipykernel_1/22.py", 2, "step", "raise ValueError(f'bad batch {n}')")
TORCH_FRAMES = tuple(
    ev.Frame(f"/v/lib/python3.11/site-packages/torch/nn/modules/{name}.py", 1, "forward", "x")
    for name in ("module", "module", "conv")
)


def failed(np: int, rank: int, error: ev.ErrorReport, phase: str = "running") -> list[ev.Event]:
    return [*running(np), ev.RankFailed(2.0, rank, error, phase)]


def ended(events: Sequence[ev.Event], culprit: int | None, reason: str = "") -> GangState:
    return replay([*events, ev.GangEnded(3.0, "FAILED", reason, culprit)])


def test_a_failure_shows_the_notebooks_lines_and_the_victims_in_one_line() -> None:
    events = failed(4, 1, ev.ErrorReport("ValueError", "bad batch 17", (CELL_FRAME, STEP_FRAME)))
    victim = ev.ErrorReport("RuntimeError", "Connection closed by peer\nlong text")
    events.append(ev.RankFailed(2.1, 0, victim, "running"))
    events += [ev.RankExited(2.5, r, None, "SIGTERM", asked=True) for r in (2, 3)]
    assert report(ended(events, 1), ["", "epoch 1", "epoch 2"]).splitlines() == [
        "rank 1 failed: ValueError: bad batch 17        (Cell In[7], line 5)",
        "  Cell In[7], line 5, in <module>",
        "      loss = step(batch)",
        "  Cell In[3], line 2, in step",
        "      raise ValueError(f'bad batch {n}')",
        "ValueError: bad batch 17",
        "ranks 0, 2 and 3 were stopped.   (rank 0: RuntimeError: Connection closed by peer)",
        "last output of rank 1:",
        "  epoch 1",
        "  epoch 2",
    ]


def test_a_long_line_of_output_is_cut_in_a_report() -> None:
    events = failed(1, 0, ev.ErrorReport("ValueError", "bad batch 17", (CELL_FRAME,)))
    last = report(ended(events, 0), ["a" * 65_000]).splitlines()[-1]
    assert last.startswith("  aaa") and len(last) < 1_100


def test_ranks_that_fail_by_themselves_were_not_stopped() -> None:
    events = failed(3, 1, ev.ErrorReport("ValueError", "bad batch 1", (CELL_FRAME,)))
    own = ev.ErrorReport("ValueError", "bad batch 2", (CELL_FRAME,))
    events += [ev.RankFailed(2.1, 2, own, "running"), ev.RankExited(2.2, 2, 1)]
    events.append(ev.RankExited(2.5, 0, None, "SIGTERM", asked=True))
    assert report(ended(events, 1)).splitlines()[-2:] == [
        "rank 0 was stopped.",
        "rank 2 failed, too.   (rank 2: ValueError: bad batch 2)",
    ]
    both = [*running(2), *(ev.RankExited(2.0, rank, None, "SIGALRM") for rank in (1, 0))]
    text = report(ended(both, 1))
    assert text.endswith("rank 0 failed, too.   (rank 0: killed by SIGALRM)")


def test_ranks_that_a_peers_end_made_fail_count_as_stopped() -> None:
    lost = ev.ErrorReport("RuntimeError", "Connection closed by peer")
    events = failed(2, 1, ev.ErrorReport("ValueError", "bad batch 17", (CELL_FRAME,)))
    events += [ev.RankFailed(2.1, 0, lost, "running"), *(ev.RankExited(2.2, r, 1) for r in (0, 1))]
    state = ended(events, 1)
    assert status_line(state, 3.0).endswith(" · 1 stopped, 1 failed")
    rows = gang_lines(state, 3.0, 80)[1:]
    assert "stopped" in rows[0] and "failed: ValueError" in rows[1]
    assert report(state).endswith(
        "rank 0 was stopped.   (rank 0: RuntimeError: Connection closed by peer)"
    )


@pytest.mark.parametrize("np", [2, 40])
def test_the_row_of_a_culprit_whose_error_looks_like_a_victims_has_the_error(np: int) -> None:
    events = list(running(np))
    for rank in range(np):
        lost = ev.ErrorReport("ConnectionResetError", "closed")
        events += [ev.RankFailed(2.0, rank, lost, "running"), ev.RankExited(2.2, rank, 1)]
    lines = gang_lines(ended(events, np - 1), 3.0, 80)
    assert [line for line in lines if "failed: " in line] == [
        f"rank {np - 1}  cpu  failed: ConnectionResetError"
    ]


def test_frames_of_libraries_are_folded() -> None:
    error = ev.ErrorReport("RuntimeError", "shape", (CELL_FRAME, *TORCH_FRAMES))
    lines = report(ended(failed(1, 0, error), 0)).splitlines()
    assert "  ... 3 frames in torch/nn/modules ..." in lines
    assert not any("site-packages" in line for line in lines)


def test_frames_are_not_folded_when_there_is_nothing_else() -> None:
    error = ev.ErrorReport("ImportError", "no", TORCH_FRAMES)
    text = report(ended(failed(1, 0, error, "loading"), 0))
    assert text.startswith("rank 0 failed while loading the cell: ImportError: no")
    assert "conv.py, line 1, in forward" in text


def test_causes_and_notes_are_shown_oldest_first() -> None:
    first = ev.ErrorReport("KeyError", "'x'", (STEP_FRAME,))
    second = ev.ErrorReport("ValueError", "b", (CELL_FRAME,), first, True, notes=("try x=1",))
    third = ev.ErrorReport("OSError", "", (CELL_FRAME,), second, False)
    lines = report(ended(failed(1, 0, third), 0)).splitlines()
    wanted = [
        "KeyError: 'x'",
        "The above exception was the direct cause of the following exception:",
        "ValueError: b",
        "try x=1",
        "During handling of the above exception, another exception occurred:",
        "OSError",
    ]
    assert [line for line in lines if line in wanted] == wanted


def test_a_traceback_in_a_message_has_the_notebooks_labels() -> None:
    """As torch and multiprocessing write that of another process into it."""
    there = 'Traceback:\n  File "{}", line 4, in __getitem__\nKeyError: 1'
    error = ev.ErrorReport("KeyError", f"Caught KeyError\n{there.format(STEP_FRAME.file)}")
    lines = report(ended(failed(1, 0, error), 0)).splitlines()
    assert lines[-2:] == ["  Cell In[3], line 4, in __getitem__", "KeyError: 1"]


def test_a_recursion_and_a_huge_message_stay_readable() -> None:
    cut = ev.Frame("", 0, "", "", n_left_out=800)  # by the rank
    frames = (CELL_FRAME, *[STEP_FRAME] * 49, cut, *[STEP_FRAME] * 50)
    error = ev.ErrorReport("RecursionError", "x" * 100_000, frames)
    text = report(ended(failed(1, 0, error), 0))
    assert "... 888 more frames ..." in text and len(text) < 8000
    assert text.splitlines()[0].startswith(f"rank 0 failed: RecursionError: {'x' * 220}")
    text = report(ended(failed(1, 0, ev.ErrorReport("E", f"{'x' * 100_000}\nsee line 7")), 0))
    assert text.splitlines()[-1] == "see line 7" and len(text) < 8000


def test_exits_without_an_exception_are_named() -> None:
    def said(exited: ev.RankExited) -> str:
        return report(ended([*running(1), exited], 0))

    early = "rank 0 exited with status 0 without finishing the cell"
    assert said(ev.RankExited(2.0, 0, 0)) == early
    killed = ev.RankExited(2.0, 0, None, "SIGKILL", hint="the kernel's OOM killer")
    assert said(killed) == "rank 0 was killed by SIGKILL (the kernel's OOM killer)"
    stack = 'Fatal Python error: Segmentation fault\n\n  File "<cell 7>", line 3 in <module>'
    text = said(ev.RankExited(2.0, 0, None, "SIGSEGV", crash_stack=stack))
    assert text.splitlines()[0] == "rank 0 was killed by SIGSEGV"
    assert "Cell In[7], line 3, in <module>" in text


def test_a_scripts_exit_code_and_a_missing_culprit() -> None:
    error = ev.ErrorReport("SystemExit", "3")
    events: list[ev.Event] = [*running(1), ev.RankFailed(2.0, 0, error, "running", exit_code=3)]
    assert report(ended(events, 0)).startswith("rank 0 failed: the script exited with status 3")
    assert report(ended(running(1), None, "the agent died")) == "the gang failed: the agent died"
    stopped = [*running(2), ev.RankHealth(2.0, 1, 1, 0.0, "T")]
    stopped.append(ev.RankExited(2.5, 1, None, "SIGKILL", asked=True))
    text = report(ended(stopped, 1, "timed out"))
    assert text.startswith("rank 1 failed: its process is stopped")


GLOO = "[/a/gloo/pair.cc:5] Connection closed by peer [::1]:1. This is typically caused by a. GLHF!"
ALL_REDUCE = ev.Frame("/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce", "x")
LEFT_ALONE = ev.ErrorReport("RuntimeError", GLOO, (CELL_FRAME, ALL_REDUCE))


def blamed(events: Sequence[ev.Event]) -> tuple[int, str]:
    """Return the culprit, and the headline about it."""
    state = replay(events)
    found = verdict(state, math.inf)
    assert found is not None and found.culprit is not None
    return found.culprit, headline(state, found.culprit)


def left(*others: ev.Event) -> tuple[str, str]:
    """Return headline and report of a gang of two whose rank 0 fails by its peer's doing."""
    events = [*running(2), *others, ev.RankFailed(2.0, 0, LEFT_ALONE, "running")]
    culprit, text = blamed(events)
    return text, report(ended(events, culprit, text))


def test_the_headline_says_who_never_entered_the_collective() -> None:
    never = "rank 1 never entered the all_reduce its peers were waiting in"
    text, shown = left(ev.RankResult(1.0, 1, 4), ev.RankExited(1.5, 1, 0))
    assert text == f"{never} (rank 1 had already finished)"
    assert shown.startswith(f"{text}        (rank 0: Cell In[7], line 5)\n")
    text, shown = left(ev.RankStacks(1.9, 1, '  File "<cell 7>", line 9 in <module>'))
    assert text == never
    assert "rank 0 was waiting at Cell In[7], line 5" in shown and "Cell In[7], line 9" in shown
    text, _ = left(ev.RankHealth(1.0, 1, 1, 0.0, "T"))
    assert text == f"{never}: its process is stopped (SIGSTOP)"
    text, _ = left(ev.RankPhase(0.3, 1, "loading"))
    assert text == f"{never} (rank 1 had not reached the cell yet)"
    barrier = dataclasses.replace(ALL_REDUCE, function="barrier")
    error = ev.ErrorReport("RuntimeError", GLOO, (barrier,))
    text, _ = left(ev.RankFailed(2.0, 1, error, "running"))
    assert text.endswith(
        "waiting in different collectives: rank 0 in all_reduce, rank 1 in barrier"
    )


def test_the_headline_has_the_cause_of_a_process_that_the_rank_started() -> None:
    message = "\n\n-- Process 0 terminated:\nTraceback:\n  File\nValueError: no\n"
    error = ev.ErrorReport("ProcessRaisedException", message)
    found = blamed([*running(2), ev.RankFailed(2.0, 0, error, "running")])
    assert found == (0, "rank 0 failed: ProcessRaisedException: ValueError: no")


def test_a_connection_of_the_users_own_blames_no_other_rank() -> None:
    refused = ev.ErrorReport("ConnectionRefusedError", "[Errno 111] Connection refused")
    waiting = ev.CollectiveWait(1.5, 1, "all_reduce", 3, 0.5)
    found = blamed([*running(3), waiting, ev.RankFailed(2.0, 0, refused, "running")])
    text = "rank 0 failed: ConnectionRefusedError: [Errno 111] Connection refused"
    assert found == (0, text), "rank 2 computes"


def test_a_rank_that_aborts_alone_is_named() -> None:
    """NCCL aborts ranks that wait for others; on a CPU the rank has aborted by itself."""
    aborted = ev.RankExited(2.0, 0, None, "SIGABRT")
    assert blamed([*running(2), aborted]) == (0, "rank 0 failed: killed by SIGABRT")
    on_gpus = [ev.RankStarted(0.1, rank, 7, "here", f"cuda:{rank}") for rank in (0, 1)]
    started = [ev.RankPhase(0.2, rank, "running") for rank in (0, 1)]
    assert blamed([*launched(2), *on_gpus, *started, aborted])[0] == 1


def test_hosts_are_named_where_there_are_several() -> None:
    elsewhere = ev.RankStarted(0.1, 1, 101, "node-b", "cpu")
    error = ev.ErrorReport("ValueError", "no")
    events = [*running(2), elsewhere, ev.RankFailed(2.0, 1, error, "running")]
    assert report(ended(events, 1)).splitlines()[1] == "  on host node-b"
    assert "here · cpu" in gang_lines(replay(events), 3.0, 100)[1]
    assert "here" not in report(ended(failed(2, 0, error), 0))


def test_a_report_cannot_steer_the_terminal() -> None:
    error = ev.ErrorReport("E", "\x1b[2J\x1b]0;t\x07bad", (CELL_FRAME,))
    assert "\x1b" not in report(ended(failed(1, 0, error), 0), ["\x1b[5A"])
