"""Updates of a page: a page that follows them knows the gang, at a rate that it can take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import GangState, fold, replay
from hydrogen_magic.views.curves import ALL_RANKS
from hydrogen_magic.views.widget import page_updates
from hydrogen_magic.views.widget.live_updates import LiveUpdates
from hydrogen_magic.views.widget.page_updates import PageMessage, PageUpdates
from tests import seconds
from tests.fake_gang import FakeGang
from tests.gang_events import running
from tests.mirror import Mirror, MirroredCurve, columns

HOSTILE = "\x1b[2J\u202egnp.exe\ud800<script>\n\t\x00" + "é" * 10_000


def out(rank: int, text: str, stream: str = "stdout") -> ev.Output:
    return ev.Output(1.0, rank, stream, text)


def batch(rank: int, steps: Sequence[int], **values: Sequence[float | None]) -> ev.Metrics:
    named = {name: tuple(column) for name, column in values.items()}
    return ev.Metrics(1.0, rank, tuple(steps), (1.0,) * len(steps), named)


def spans(rank: int, n: int, start_s: float = 0.0, track: str = "spans") -> ev.Spans:
    starts = tuple(start_s + i / 1000 for i in range(n))
    names = tuple("fb"[i % 2] for i in range(n))
    ends = (start + 5e-4 for start in starts)
    return seconds.spans(1.0, rank, names, starts, ends, (0,) * n, 0, track)


class Rig:
    """The updates after some events, and the pages that follow it."""

    def __init__(self, *events: ev.Event) -> None:
        self.updates = PageUpdates()
        self.state = GangState()
        self.now_s = 0.0
        self.pages = [Mirror()]
        if events:
            self.tick(*events)

    @property
    def page(self) -> Mirror:
        return self.pages[0]

    def tick(self, *events: ev.Event, after_s: float = 0.1) -> PageMessage | None:
        """Let ``events`` happen and time pass; tell the pages."""
        for event in events:
            self.state = fold(self.state, event)
        self.now_s += after_s
        message = self.updates.update(self.state, events, self.now_s)
        for page in self.pages if message is not None else ():
            page.apply(message)
        return message

    def arrive(self, name: str) -> Mirror:
        page = Mirror(name)
        for message in self.updates.full(name):
            page.apply(message)
        self.pages.append(page)
        return page

    def end(self, *events: ev.Event) -> int:
        """Let the gang end and the updates say the rest; return the number of messages."""
        self.tick(*events)
        n = 1
        while self.tick() is not None:
            n += 1
        return n


ENDED = ev.GangEnded(99.0, "SUCCEEDED", "2 ranks finished")


# ── pages know the gang ──────────────────────────────────────────────────────────────────────────

ranks = st.integers(0, 1)
some_events = st.one_of(
    st.builds(out, ranks, st.text("ab\r\n\x1b[31m", max_size=30)),
    st.builds(
        batch, ranks, st.just((1, 5, 9)), loss=st.tuples(*[st.floats(width=32) | st.none()] * 3)
    ),
    st.builds(
        lambda rank, start: batch(rank, range(start, start + 700), acc=[0.5] * 700),
        ranks,
        st.integers(-900, 900),
    ),
    st.builds(spans, ranks, st.integers(0, 5000), track=st.sampled_from(["spans", "profiler"])),
    st.builds(lambda rank, n: ev.Progress(1.0, rank, 0, "train", n, 10.0), ranks, st.floats()),
    st.builds(lambda rank, n: ev.Steps(1.0, rank, n), ranks, st.integers(0, 9)),
    st.builds(lambda rank: ev.RankStacks(1.0, rank, "Thread 1\n  File"), ranks),
    st.builds(lambda rank: ev.RankHealth(1.0, rank, 5, math.nan, "T", math.inf), ranks),
    st.builds(lambda attempt: ev.AttemptStarted(1.0, attempt), st.integers(1, 3)),
    st.builds(lambda text: ev.Notice(1.0, "info", text), st.text(max_size=5)),
)


@settings(max_examples=30)
@given(st.lists(st.lists(some_events, max_size=4), min_size=1, max_size=8), st.data())
def test_one_that_arrives_knows_what_those_know_that_were_there(
    ticks: list[list[ev.Event]], data: st.DataObject
) -> None:
    rig = Rig()
    arrives = data.draw(st.integers(-1, len(ticks)))
    if arrives == -1:
        rig.arrive("late")
    rig.tick(*running())
    for number, events in enumerate(ticks):
        if number == arrives:
            rig.arrive("late")
        rig.tick(*events, after_s=data.draw(st.sampled_from([0.0, 0.1, 2.0])))
    rig.end(ENDED)
    after = rig.arrive("after the end")
    for page in rig.pages[1:]:
        for name in ("gang", "ranks", "names", "spans", "skipped", "stacks", "report", "lines"):
            assert getattr(page, name) == getattr(rig.page, name), name
        assert page.n_lines_before == rig.page.n_lines_before
        assert page.curves.keys() == rig.page.curves.keys()
        for metric, curve in page.curves.items():
            first = rig.page.curves[metric]
            assert (curve.width, curve.bad_steps) == (first.width, first.bad_steps)
            assert {r: s.keys() for r, s in curve.series.items() if s} == {
                r: s.keys() for r, s in first.series.items() if s
            }
    assert_is_complete(after, rig)


def assert_is_complete(page: Mirror, rig: Rig) -> None:
    assert page.gang["state"] == "done" and page.gang["ended_s"] is not None
    assert page.names == rig.updates.tracks.names
    for key, spans in rig.updates.tracks.tracks().items():
        assert [row[0] for row in page.spans.get(key, [])] == spans.starts_s.tolist()
    for whole in rig.updates.curves.full(None):
        for rank, buckets in whole.series.items():
            curve = page.curves.get(whole.metric, MirroredCurve())
            told = curve.series.get(rank, {})
            assert sorted(told) == buckets.keys.tolist()
            assert [told[key][2] for key in sorted(told)] == buckets.mins.tolist()


def test_only_what_is_new_is_told() -> None:
    rig = Rig()
    first = rig.tick(*running())
    assert first is not None and {"gang", "ranks"} <= first.content.keys()
    assert rig.tick() is None, "nothing is new"
    message = rig.tick(ev.RankPhase(0.5, 1, "finishing"))
    assert message is not None and [row["rank"] for row in message.content["ranks"]] == [1]
    assert "gang" not in message.content


def test_a_heart_beats_once_a_second_until_the_end() -> None:
    rig = Rig(*running())
    told = [message for _ in range(50) if (message := rig.tick()) is not None]
    assert len(told) in (4, 5) and set(told[-1].content) == {"kind", "seq", "now_s"}
    rig.end(ENDED)
    assert rig.tick(after_s=100.0) is None


def test_a_page_may_be_there_before_the_first_event() -> None:
    rig = Rig()
    page = rig.arrive("early")
    rig.tick(*running())
    assert page.gang["id"] == "3f2a" and len(page.ranks) == 2


def test_names_of_spans_come_with_their_index() -> None:
    rig = Rig(*running(), spans(0, 2))
    for name in "xy":
        message = rig.tick(seconds.spans(1.0, 0, (name,), (5.0,), (6.0,), (0,)))
        assert message is not None and message.content["names"] == [name]
        # A page that has lost a message would otherwise give them the index of an earlier one.
        assert message.content["names_at"] == rig.updates.tracks.names.index(name)


def test_the_last_profile_is_the_one_that_was_recorded() -> None:
    rig = Rig(*running())
    profiles = [(10.0, "waiting"), (11.0, "recording"), (12.0, ""), (500.0, "waiting")]
    for at_s, phase in profiles:
        rig.tick(ev.Profiling(at_s, phase))
    assert rig.page.gang["profiled_since_s"] == 10.0
    rig.tick(ev.Profiling(501.0, "recording"))
    rig.tick(ev.Profiling(502.0, "reading"))
    for page in (rig.page, rig.arrive("late")):
        assert page.gang["profiled_since_s"] == 500.0


def test_curves_of_a_new_attempt_replace_those_from_its_first_step_on() -> None:
    rig = Rig(*running(), batch(0, range(3000), loss=[1.0] * 3000), out(0, "first\n"))
    rig.tick(after_s=1.0)
    rig.tick(batch(1, range(800), loss=[1.0] * 799 + [math.nan], acc=[0.5] * 800))
    rig.tick(ev.RankStacks(1.5, 0, "Thread 1"), after_s=1.0)
    message = rig.tick(ev.AttemptStarted(2.0, 1))
    assert message is not None and message.content["restarted"] and rig.page.gang["attempt"] == 1
    rig.tick(batch(0, [501, 503], loss=[2.0, 2.0], acc=[None, None]))
    rig.tick(batch(1, [500, 502], loss=[2.0, 2.0]), after_s=1.0)
    rig.end(ENDED)
    loss = rig.page.curves["loss"]
    assert loss.bad_steps == {} and loss.width == 1
    own = {0: [*range(502), 503], 1: [*range(501), 502], ALL_RANKS: [*range(504)]}
    assert {rank: sorted(series) for rank, series in loss.series.items()} == own
    assert loss.series[ALL_RANKS][500] == (2.0, 1.5, 1.0, 2.0), "rank 0 has not gone back to it"
    assert loss.series[1][500] == (1.0, 2.0, 2.0, 2.0)
    assert len(rig.page.curves["acc"].series[1]) == 800
    assert [line[2] for line in rig.page.lines] == ["first"]
    assert rig.arrive("late").curves["loss"].series == loss.series


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────


def test_32_fast_series_stay_below_200_kb_in_every_second() -> None:
    rig = Rig(*running(8))
    before = rig.page.n_bytes
    for tick in range(25):
        if tick % 10 == 0:
            before = rig.page.n_bytes
        steps = range(100 * tick, 100 * tick + 100)
        column = [1.0 / (step + 1) for step in steps]
        rig.tick(
            *(batch(r, steps, a=column, b=column, c=column, d=column) for r in range(8)),
            *(ev.Steps(rig.now_s, r, steps[-1]) for r in range(8)),
        )
        assert rig.page.n_bytes - before < 200_000
    rig.end(ENDED)
    assert_is_complete(rig.page, rig)


def test_metrics_without_a_change_hide_no_others_at_the_end() -> None:
    diverged: dict[str, list[float | None]] = {f"norm {n}": [math.nan] for n in range(240)}
    rig = Rig(*running(), batch(0, [0], **diverged))
    while rig.page.curves.keys() < diverged.keys():
        assert rig.tick() is not None
    rig.end(batch(0, [1], **diverged, lr=[0.5]), ENDED)
    assert set(rig.page.curves["lr"].series[0]) == {1}


def test_spans_come_by_thousands_and_all_of_them_in_the_end() -> None:
    rig = Rig(*running())
    sizes = []
    for tick in range(5):
        message = rig.tick(spans(0, 6000, 9.0 * tick), spans(1, 100, 9.0 * tick))
        assert message is not None
        sizes.append(sum(part["n"] for part in message.content["spans"]))
        assert len(rig.page.spans[1, "spans"]) == 100 * (tick + 1), "a small track is sent at once"
    assert max(sizes) <= 4000
    rig.end(ENDED)
    assert_is_complete(rig.page, rig)


def test_an_endless_stream_of_lines_is_thinned_out_and_its_end_kept() -> None:
    rig = Rig(*running())
    before = rig.page.n_bytes
    for tick in range(100):
        text = "".join(f"{tick} {i} {'x' * 100}\n" for i in range(600))
        message = rig.tick(out(0, text))
        assert message is not None and len(message.content.get("lines", [])) <= 501
    assert rig.page.n_bytes - before < 1_400_000, "10 seconds"
    assert len(rig.page.lines) + rig.page.n_lines_before == 60_000
    _check_gaps(rig.page.lines)
    rig.end(ENDED)
    assert rig.page.lines[-1][2].startswith("99 599 ")
    page = rig.arrive("late")
    assert len(page.lines) == 2000 and len(page.lines) + page.n_lines_before == 60_000
    assert page.lines == rig.page.lines[-2000:]


def _check_gaps(lines: list[list[Any]]) -> None:
    """Each gap between numbered lines has a note with the number of the missing ones."""
    expected = 0
    for _, _, text, _ in lines:
        first, second, *_ = text.split()
        if first == "...":
            expected += int(second.replace(",", ""))
        else:
            assert 600 * int(first) + int(second) == expected
            expected += 1


def test_lines_of_many_ranks_that_are_left_out_have_one_note() -> None:
    rig = Rig(*running(20))
    message = rig.tick(*(out(rank, "line\n" * 600) for rank in range(20)))
    assert message is not None
    notes = [line for line in message.content["lines"] if line[1] == 2]
    assert notes == [[0, 2, "... 11,500 lines of 20 ranks not shown here", 1.0]]


def test_lines_that_were_left_out_on_their_way_are_counted() -> None:
    rig = Rig()
    first, last = "line\n" * 10 + "cut", "".join(f"line {n}\n" for n in range(40))
    rig.tick(*running(1), out(0, first))
    rig.tick(ev.Output(1.0, 0, "stdout", last, 5000, 950))
    # 10 whole lines, the cut one with 949 others behind it, 40 at the end; the note is one of them.
    for page in (rig.page, rig.arrive("late")):
        assert page.n_lines_before + len(page.lines) == 10 + 950 + 40


def test_long_lines_are_shortened_and_say_so() -> None:
    rig = Rig(*running(), out(0, "\x1b[31m" + "y" * 10_000 + "\n"))
    [line] = rig.page.lines
    assert line[2].endswith("characters more") and len(line[2]) < 4100
    assert line[2].count("\x1b[0m") == 1, "its colour ends with it"


# ── many ranks ───────────────────────────────────────────────────────────────────────────────────


def test_of_many_ranks_those_that_stand_out_have_rows() -> None:
    rig = Rig(*running(64), *(ev.Progress(1.0, r, 0, "", 50.0 + r, 200.0) for r in range(64)))
    assert rig.page.summary["shown"] == [0, 1, 2, 3]
    rig.tick(ev.RankExited(2.0, 40, 1), after_s=1.0)
    rig.updates.watch([60, 60, 999, -1])
    rig.tick()
    assert rig.page.summary["shown"] == [0, 1, 2, 3, 40, 60]
    assert rig.page.summary["chosen"] == [60], "a page that was reloaded must know it"
    assert set(rig.page.ranks) == {0, 1, 2, 3, 40, 60}
    assert rig.page.summary["counts"] == {"running": 63, "failed": 1}
    phases, percent, marks = rig.page.summary_columns
    words = rig.page.summary["phases"]
    assert words[phases[40]] == "failed" and words[phases[41]] == "running"
    assert percent[:3] == (25, 25, 26) and marks[40] == 3


def test_of_many_ranks_those_watched_have_curves_and_spans() -> None:
    rig = Rig(*running(32))
    for tick in range(3):
        if tick == 2:
            rig.updates.watch([27])
        steps = range(10 * tick, 10 * tick + 10)
        rig.tick(
            *(batch(r, steps, loss=[float(r)] * 10) for r in range(32)),
            *(spans(r, 10, float(tick)) for r in range(32)),
        )
    rig.tick()
    late = rig.arrive("late")
    for page in rig.pages:
        assert {r: len(s) for r, s in page.curves["loss"].series.items()} == {-1: 30, 0: 30, 27: 30}
        sizes = {r: len(s) for (r, track), s in page.spans.items() if track == "spans"}
        assert sizes == dict.fromkeys((*range(16), 27), 30)
    assert late.summary == rig.page.summary and late.summary_columns == rig.page.summary_columns
    rig.updates.watch_tracks("me", range(16, 32))
    rig.tick()
    assert {r for r, track in rig.page.spans if track == "spans"} == set(range(32))


def test_the_timelines_of_several_pages_go_on() -> None:
    rig = Rig(*running(96))
    rig.updates.watch_tracks("one", range(32, 48))
    rig.updates.watch_tracks("other", range(48, 64))
    rig.arrive("reloaded")
    rig.updates.watch_tracks("other", range(64, 80))

    def told() -> set[int]:
        message = rig.tick(*(spans(r, 1, rig.now_s) for r in range(96)))
        assert message is not None
        return {part["rank"] for part in message.content["spans"] if part["track"] == "spans"}

    assert told() == {*range(16), *range(32, 48), *range(64, 80)}
    for closed in "abcd":
        rig.updates.watch_tracks(closed, range(80, 96))
    assert told() == {*range(16), *range(80, 96)}


def test_of_many_ranks_in_step_none_is_slow() -> None:
    rig = Rig(*running(64), *(ev.Steps(1.0, rank, 100) for rank in range(64)))
    assert rig.page.ranks[0]["why"] == ""


def test_of_many_ranks_that_were_stopped_some_have_rows_that_say_why() -> None:
    rig = Rig(*running(64), *(ev.Steps(1.0, r, 100 - 60 * (r == 9)) for r in range(64)))
    rows = rig.page.ranks
    assert rows[9]["mark"] == "straggler" and rows[9]["why"] == "40 steps, median 100"
    assert rows[0]["why"] == "among the slowest"
    stopped = (ev.RankExited(2.0, rank, None, "SIGTERM", True) for rank in range(64))
    rig.end(*stopped, ev.GangEnded(3.0, "STOPPED", "stopped by you"))
    assert rig.page.summary["shown"] == [0, 1, 2, 9]
    assert rig.page.ranks[9]["phase"] == "stopped"
    assert rig.page.ranks[9]["why"] == "least progress"
    rig.updates.watch([50])
    rig.tick()
    assert rig.page.ranks[50]["why"] == "chosen"


# ── failure, stacks, details ─────────────────────────────────────────────────────────────────────


def test_a_failure_is_reported_with_the_culprits_last_lines() -> None:
    rig = Rig()
    error = ev.ErrorReport("ValueError", "no", (ev.Frame("<cell 7>", 2, "<module>", "go()"),))
    rig.tick(*running(), *(out(1, f"line {i}\n") for i in range(20)), out(0, "other\n"))
    rig.end(
        ev.RankFailed(2.0, 1, error, "running"),
        ev.RankExited(2.0, 1, 1),
        ev.GangEnded(2.1, "FAILED", "rank 1 failed", 1),
    )
    for page in (rig.page, rig.arrive("late")):
        assert page.report is not None
        text = page.report["text"]
        assert text.startswith("rank 1 failed: ValueError: no") and "Cell In[7], line 2" in text
        assert "line 19" in text and "line 9\n" not in text and "other" not in text


def test_stacks_name_the_notebooks_cells() -> None:
    rig = Rig()
    stack = 'Thread 0x7f (most recent call first):\n  File "<cell 7>", line 3 in go'
    rig.tick(*running(), ev.RankStacks(1.0, 1, stack))
    rig.tick(ev.RankStacks(1.5, 0, stack))
    for page in (rig.page, rig.arrive("late")):
        assert page.stacks is not None
        [group] = page.stacks["groups"]
        assert group["ranks"] == [0, 1] and "Cell In[7], line 3, in go" in group["text"]


def test_stacks_of_many_ranks_begin_with_the_rarest() -> None:
    rig = Rig()
    places = dict.fromkeys(range(200), "in all_reduce") | {700: "in load_batch"}
    rig.tick(
        *running(800),
        *(
            ev.RankStacks(1.0, r, f"Thread 0x7f{r:x} (most recent call first):\n{place}")
            for r, place in places.items()
        ),
    )
    assert rig.page.stacks == {
        "groups": [
            {"ranks": [700], "text": "Thread (most recent call first):\nin load_batch"},
            {"ranks": [*range(200)], "text": "Thread (most recent call first):\nin all_reduce"},
        ],
        "n_left_out": 0,
    }
    rig.tick(*(ev.RankStacks(2.0, r, f"in place {r}") for r in range(100)))
    assert rig.page.stacks is not None and len(rig.page.stacks["groups"]) == 64
    assert rig.page.stacks["n_left_out"] == 101 - 64 + 100


def order(**changed: Any) -> dict[str, Any]:
    plain = {"do": "detail", "id": "7", "client": "me", "metric": "loss"}
    return {**plain, "from": 100, "until": 299.5, "buckets": 100, **changed}


def test_detail_answers_the_client_that_asked() -> None:
    rig = Rig(*running(), *(batch(r, range(5000), loss=[float(r)] * 5000) for r in range(2)))
    content, buffers = rig.updates.detail(order())
    asked = {"id": "7", "from": 100, "until": 299.5, "metric": "loss"}
    series = [{"rank": rank, "n": 100} for rank in (-1, 0, 1)]
    tip = {"step": 4999, "mean": 0.5, "end": None}
    head = {"kind": "detail", "to": "me", **asked, "width": 2}
    known = {**head, "tip": tip, "series": series, "at": 0}
    assert content | {"at": 0} == known
    keys, counts, means, _, _ = columns(buffers[0][:4000], 100, "ddddd")
    assert keys == tuple(range(50, 150)) and set(counts) == {4} and set(means) == {0.5}


def test_a_detail_that_cannot_be_given_is_refused_with_the_reason() -> None:
    rig = Rig(*running(), batch(0, range(9), loss=[1.0] * 9))
    with pytest.raises(ValueError, match="no metric named 'lost'"):
        rig.updates.detail(order(metric="lost"))


def test_however_many_buckets_are_asked_for_there_is_a_limit() -> None:
    rig = Rig(*running(), batch(0, range(20_000), loss=[1.0] * 20_000))
    content, _ = rig.updates.detail(order(**{"from": 0, "until": 20_000, "buckets": 10**9}))
    assert content["width"] == 4


# ── what ranks may try ───────────────────────────────────────────────────────────────────────────


def test_whatever_ranks_send_can_be_sent_on() -> None:
    rig = Rig()
    error = ev.ErrorReport(HOSTILE, HOSTILE, (ev.Frame(HOSTILE, 1, HOSTILE, HOSTILE),))
    rig.tick(
        *running(2, title=HOSTILE),
        out(0, HOSTILE),
        batch(0, [1, 2], **{HOSTILE: [1.0, math.nan]}),
        batch(1, [2**63 - 1], **{HOSTILE: [1e308]}),
        ev.Progress(1.0, 0, 0, HOSTILE, math.nan, math.inf, HOSTILE),
        ev.Progress(1.0, 1, 0, HOSTILE, -1e308, -1.0, HOSTILE),
        seconds.spans(1.0, 0, (HOSTILE,), (0.0,), (1.0,), (0,), 0, HOSTILE),
        ev.RankPhase(1.0, 0, "running", HOSTILE),
        ev.CollectiveWait(1.0, 1, HOSTILE, 3, 0.0),
        ev.RankStacks(1.0, 0, HOSTILE),
        ev.Notice(1.0, "error", HOSTILE),
    )
    rig.end(ev.RankFailed(2.0, 0, error, "running"), ev.GangEnded(3.0, "FAILED", HOSTILE, 0))
    page = rig.arrive("late")
    assert page.stacks is not None
    texts = [
        page.gang["title"],
        page.gang["reason"],
        page.gang["notices"][0]["text"],
        page.ranks[0]["doing"],
        page.ranks[1]["doing"],
        page.ranks[0]["bar"]["desc"],
        *page.ranks[0]["metrics"],
        *page.curves,
        *page.names,
        *(track for _, track in page.spans),
        *(line[2] for line in page.lines),
        page.stacks["groups"][0]["text"],
        page.report["text"],
    ]
    for text in texts:
        assert not set(text) & set("\u202e\ud800\x00\x1b") and len(text) < 50_000
    assert set(page.ranks[0]["metrics"]) == set(page.curves), "a row names metrics as curves do"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_updates, "_MOST_SPANS_KEPT", 5000)
    monkeypatch.setattr(page_updates, "_MOST_SPANS_AT_ONCE", 1000)


@pytest.mark.usefixtures("small")
def test_a_page_that_comes_late_gets_the_newest_spans_in_parts() -> None:
    rig = Rig(*running())
    for start_s in (0.0, 9.0, 18.0):
        rig.tick(spans(0, 1500, start_s), spans(1, 1500, start_s))
    rig.tick(), rig.tick()
    assert (
        sum(len(found) for (_, track), found in rig.page.spans.items() if track == "spans") == 9000
    )
    page, sizes = Mirror("late"), []
    for message in rig.updates.full("late"):
        page.apply(message)
        sizes.append(sum(part["n"] for part in message.content["spans"]))
    assert max(sizes) <= 1000 and sum(sizes) == 5000 and page.parts_left == 0
    for rank in (0, 1):
        told = rig.page.spans[rank, "spans"]
        assert page.spans[rank, "spans"] == [one for one in told if one[0] >= page.spans_since_s]
    assert page.spans_since_s > 9


@pytest.mark.usefixtures("small")
def test_of_ranks_that_a_page_turns_to_it_gets_the_newest_spans() -> None:
    rig = Rig(*running(32), *(spans(20, 1500, start_s) for start_s in (0.0, 9.0, 18.0, 27.0)))
    rig.updates.watch_tracks("me", range(16, 32))
    while rig.tick(after_s=0.01) is not None:
        pass
    told = rig.page.spans[20, "spans"]
    assert 4900 < len(told) <= 5000 and told[-1][0] > 28
    assert told[0][0] == pytest.approx(rig.page.spans_since_s)


@pytest.mark.parametrize("end", [[], [ENDED]], ids=["running", "ended"])
@pytest.mark.usefixtures("small")
def test_the_first_page_gets_what_any_page_keeps(end: list[ev.Event], tmp_path: Path) -> None:
    gang = FakeGang(tmp_path)
    stacks = ev.RankStacks(1.0, 1, "in go")
    flood = [spans(0, 1500, start_s) for start_s in (0.0, 9.0, 18.0, 27.0)]
    lines = [out(0, f"line {n}\n") for n in range(2500)]
    gang._events = [*running(), *flood, *lines, stacks, *end]
    live = LiveUpdates(gang, is_raised=False, clock=lambda: 30.0)
    live.update(replay(gang._events), gang._events)
    page = Mirror("first")
    for message in live.start().full("first"):
        page.apply(message)
    assert [line[2] for line in page.lines] == [f"line {n}" for n in range(500, 2500)]
    assert page.n_lines_before == 500
    assert 4900 < len(page.spans[0, "spans"]) <= 5000 and page.spans_since_s > 0
    assert page.stacks is not None and page.stacks["groups"][0]["ranks"] == [1]


def test_what_is_left_of_a_flood_of_spans_comes_in_several_messages() -> None:
    rig = Rig(*running())
    flood = [spans(rank, 50_000, start) for rank in (0, 1) for start in (0.0, 60.0)]
    rig.tick(*flood)
    messages = []
    fresh: list[ev.Event] = [ENDED]
    while (message := rig.tick(*fresh)) is not None:
        messages.append(message)
        fresh = []
    assert len(messages) > 2
    assert max(sum(map(len, message.buffers)) for message in messages) < 1_000_000
    told = sum(len(spans.starts_s) for spans in rig.updates.tracks.tracks().values())
    assert told >= 200_000
    assert sum(len(buffer) for message in messages for buffer in message.buffers) > 15 * 180_000
