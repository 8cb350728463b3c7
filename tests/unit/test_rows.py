"""Rows of ranks as JSON: what is marked, what is foretold, and who holds the gang up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import GangState, replay
from hydrogen_magic.driver.state.stragglers import progress, remaining_s, stragglers
from hydrogen_magic.node.worker.reporting.progress_bars import ProgressBars
from hydrogen_magic.views.widget import rank_rows
from tests import gang_events


def running(np: int, *events: ev.Event) -> GangState:
    return replay([*gang_events.running(np), *events])


def steps(*counts: int, at_s: float = 1.0) -> Iterable[ev.Event]:
    return (ev.Steps(at_s, rank, count) for rank, count in enumerate(counts))


def bar(
    n: float,
    total: float | None,
    *,
    rank: int = 0,
    number: int = 0,
    at_s: float = 10.0,
    closed: bool = False,
    began_at: float = 0.0,
) -> list[ev.Event]:
    """Return a bar that was first seen at 0 s."""
    first = ev.Progress(0.0, rank, number, "train", began_at, total)
    return [first, ev.Progress(at_s, rank, number, "train", n, total, "it", closed)]


def wait(rank: int, since_s: float, name: str = "all_reduce") -> ev.CollectiveWait:
    return ev.CollectiveWait(since_s, rank, name, 7, since_s)


def marks(state: GangState, now_s: float) -> list[str]:
    return rank_rows.marks(state, stragglers(state, now_s), now_s)


# ── who holds the gang up ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((100, 100, 100, 60), {3}),
        ((100, 50), {1}),
        ((100, 99, 98, 97), set()),
        ((3, 1, 3, 3), set()),
        ((100, 100, 0, 100), {2}),
        ((100,), set()),
    ],
)
def test_ranks_clearly_behind_the_middle(counts: tuple[int, ...], expected: set[int]) -> None:
    assert set(stragglers(running(len(counts), *steps(*counts)), 1.0)) == expected


def test_progress_tells_where_nobody_counts_steps() -> None:
    bars = [event for rank, n in enumerate((50, 52, 20)) for event in bar(n, 100, rank=rank)]
    assert set(stragglers(running(3, *bars), 10.0)) == {2}


def test_a_rank_in_the_second_bar_of_an_epoch_is_not_behind() -> None:
    epochs = [event for rank in range(3) for event in bar(0, 3, rank=rank)]
    inner = [
        event for rank, n in enumerate((60, 58, 57)) for event in bar(n, 60, rank=rank, number=1)
    ]
    second = bar(2, 60, rank=0, number=2)
    closed = ev.Progress(10.0, 0, 1, "train", 60, 60, "it", True)
    assert set(stragglers(running(3, *epochs, *inner, closed, *second), 10.0)) == set()


def test_the_rank_that_others_wait_for_in_a_collective() -> None:
    state = running(3, *steps(100, 100, 100), wait(0, 5.0), wait(2, 5.2))
    assert set(stragglers(state, 5.5)) == set(), "keeping step takes no longer"
    assert set(stragglers(state, 6.5)) == {1}
    found = marks(state, 6.5)
    assert found == ["waiting", "straggler", "waiting"]


def test_one_slow_collective_is_nobodys_fault() -> None:
    assert set(stragglers(running(2, wait(0, 1.0), wait(1, 1.0)), 60.0)) == set()
    assert set(stragglers(running(4, wait(0, 1.0)), 60.0)) == set(), "three cannot all be late"


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
def test_never_more_than_half_are_stragglers(counts: list[int]) -> None:
    assert 2 * len(stragglers(running(len(counts), *steps(*counts)), 1.0)) <= len(counts)


def test_a_gang_that_ended_has_no_stragglers() -> None:
    state = running(2, *steps(100, 1), ev.GangEnded(2.0, "FAILED", "", 1))
    assert set(stragglers(state, 2.0)) == set()


# ── how far ──────────────────────────────────────────────────────────────────────────────────────


def test_bars_inside_of_one_another_add_up() -> None:
    epochs, batches = bar(1, 4, number=1), bar(30, 60, number=2)
    [rank] = running(1, *epochs, *batches).ranks
    assert progress(rank) == pytest.approx((1 + 0.5) / 4)
    assert remaining_s(rank, 10.0) == pytest.approx(10 * 2.5 / 1.5)
    assert remaining_s(rank, 12.0) == pytest.approx(10 * 2.5 / 1.5 - 2)


def test_training_and_validation_bars_of_each_epoch_add_up() -> None:
    """Ten epochs of 10 s, each with 8 s of training and 2 s of validation."""
    at_s, events = 0.0, [ev.Progress(0.0, 0, 0, "epochs", 0, 10)]
    found: list[float] = []
    for epoch in range(10):
        for desc, seconds in (("train", 8), ("valid", 2)):
            number = 1 + 2 * epoch + (desc == "valid")
            for n in range(5):
                events.append(ev.Progress(at_s, 0, number, desc, n, 4, "it", n == 4))
                [rank] = running(1, *events).ranks
                done, left_s = progress(rank), remaining_s(rank, at_s)
                if epoch > 0:
                    found.append(done or 0.0)
                    assert (left_s or 0.0) == pytest.approx(100 - at_s)
                at_s += seconds / 4 if n < 4 else 0
        events.append(ev.Progress(at_s, 0, 0, "epochs", epoch + 1, 10))
    assert found == sorted(found), "it never goes back"
    late = remaining_s(rank, at_s + 50)
    assert late is None, "the last epoch takes longer than the others"
    [rank] = running(1, *events).ranks
    assert remaining_s(rank, at_s) is None, "all epochs are finished"


def test_the_bar_that_ends_last_is_shown_at_the_end() -> None:
    """Though it was updated, and not sent yet, when those inside of it began."""
    bars = ProgressBars(0, lambda: 1.0)
    epochs, batches = bars.new(), bars.new()
    bars.update(epochs, "epoch", 2, 3)
    bars.update(batches, "batch", 10, 10, closed=True)
    bars.update(epochs, "epoch", 3, 3, closed=True)
    [rank] = running(1, *bars.take()).ranks
    assert rank.bar is not None and rank.bar.desc == "epoch"


def test_a_resumed_bar_is_as_fast_as_it_was_here() -> None:
    [rank] = running(1, *bar(950, 1000, began_at=900)).ranks
    assert (progress(rank), remaining_s(rank, 10.0)) == (0.95, pytest.approx(10.0))
    assert rank.bar is not None and rank.bar.per_s == pytest.approx(5.0)


def test_a_bar_that_was_reset_is_as_fast_as_it_is_since() -> None:
    again = [ev.Progress(at_s, 0, 0, "train", n, 100) for at_s, n in ((90.0, 2), (100.0, 12))]
    [rank] = running(1, *bar(90, 100, at_s=89.0), *again).ranks
    assert rank.bar is not None and rank.bar.per_s == pytest.approx(1.0)
    assert remaining_s(rank, 100.0) == pytest.approx(88.0)


@pytest.mark.parametrize(
    ("n", "total", "expected"),
    [
        (5, 10, 0.5),
        (20, 10, 1.0),
        (-3, 10, 0.0),
        (5, None, None),
        (5, 0, None),
        (5, -1, None),
        (math.nan, 10, None),
        (5, math.inf, None),
    ],
)
def test_progress_of_one_bar(n: float, total: float | None, expected: float | None) -> None:
    assert progress(running(1, *bar(n, total)).ranks[0]) == expected


def test_a_full_bar_that_was_closed_still_tells_how_far() -> None:
    [rank] = running(1, *bar(10, 10, closed=True)).ranks
    assert progress(rank) == 1.0 and remaining_s(rank, 11.0) is None


def test_too_early_to_say() -> None:
    assert remaining_s(running(1, *bar(1, 100, at_s=0.5)).ranks[0], 0.5) is None
    assert remaining_s(running(1, *bar(0, 100)).ranks[0], 10.0) is None


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_gang_is_as_fast_as_its_slowest_rank() -> None:
    marks = [*steps(0, 0, at_s=1.0), *steps(40, 20, at_s=3.0)]
    bars = [*bar(50, 100, rank=0), *bar(20, 100, rank=1)]
    gang = rank_rows.gang_row(running(2, *marks, *bars), 10.0)
    assert gang["remaining_s"] == 40
    assert rank_rows.gang_row(running(2, *marks), 3.0)["steps_per_s"] == 10.0
    assert gang["steps_per_s"] == pytest.approx(21 / 9, abs=0.01), "no step for 7 s"


def test_the_header_has_the_epoch_of_the_slowest_rank_and_the_rows_their_batches() -> None:
    events: list[ev.Event] = []
    for rank, epoch in enumerate((3, 2, 3)):
        epochs = ev.Progress(1.0, rank, 0, "epoch: ", epoch, 10)
        events += [epochs, ev.Progress(1.0, rank, 1, "train", 40, 60)]
    state = running(3, *events)
    assert rank_rows.gang_row(state, 10.0)["outermost"] == "epoch 2/10"
    assert state.ranks[0].bar is not None and state.ranks[0].bar.desc == "train"
    assert rank_rows.gang_row(running(1, *bar(1, 4)), 10.0)["outermost"] == "", "its row shows it"


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([], "running"),
        ([ev.StopRequested(1.0, "user")], "stopping"),
        ([ev.StopRequested(1.0, "user", kill=True)], "killing"),
        ([ev.GangEnded(1.0, "SUCCEEDED", "")], "done"),
        ([ev.GangEnded(1.0, "STOPPED", "")], "stopped"),
        ([ev.AttemptStarted(1.0, 1)], "starting"),
    ],
    ids=["running", "stop", "kill", "done", "stopped", "again"],
)
def test_the_word_for_the_gang(events: list[ev.Event], word: str) -> None:
    assert rank_rows.gang_row(running(2, *events), 2.0)["state"] == word


def test_rows_that_are_handed_out_tell_how_far_the_gang_is() -> None:
    bar = ev.Progress(1.0, 0, -1, "rows", 600, None, "rows")
    told = ev.RowsDone(2.0, done=1200, total=5000, in_flight=4, failed=0, began_s=0.5)
    gang = rank_rows.gang_row(running(2, bar, told), 2.0)
    text = "1,200 of 5,000 rows · 800 rows/s · 4.8 s left · 4 chunks in flight"
    assert gang["rows"] == {"share": 0.24, "text": text}
    assert gang["remaining_s"] is None, "by all ranks' rows, not by one's bar"
    assert rank_rows.gang_row(running(2), 2.0)["rows"] is None


def test_marks_say_why_a_row_stands_out() -> None:
    state = running(
        4,
        ev.RankHealth(1.0, 1, 5, 0.0, "T"),
        ev.RankExited(1.0, 2, None, "SIGSEGV"),
        ev.RankResult(1.0, 3, 5),
        ev.RankExited(1.0, 3, 0),
    )
    assert marks(state, 2.0) == ["", "stopped", "dead", ""]


def failed(at_s: float, rank: int, kind: str, message: str) -> ev.RankFailed:
    return ev.RankFailed(at_s, rank, ev.ErrorReport(kind, message), "running")


PEER_GONE = ("RuntimeError", "Connection closed by peer [127.0.0.1]:1")


def test_only_ranks_that_failed_by_themselves_are_dead() -> None:
    state = running(
        4,
        failed(1.0, 1, "ValueError", "bad batch"),
        failed(1.1, 0, *PEER_GONE),
        ev.RankExited(1.2, 1, 1),
        ev.RankExited(1.2, 0, 1),
        ev.RankExited(1.3, 2, None, "SIGABRT"),
        failed(1.3, 3, "KeyError", "x"),
        ev.RankExited(1.4, 3, 1),
        ev.GangEnded(2.0, "FAILED", "rank 1 failed", 1),
    )
    found = marks(state, 2.0)
    assert found == ["", "dead", "", "dead"]
    told = [rank_rows.rank_row(r, m, 2.0) for r, m in zip(state.ranks, found, strict=True)]
    assert [row["phase"] for row in told] == ["stopped", "failed", "stopped", "failed"]
    assert told[0]["doing"] == told[2]["doing"] == "stopped"
    head, _ = rank_rows.summary_columns(state, found, (), ())
    assert head["counts"] == {"stopped": 2, "failed": 2}


def test_a_culprit_whose_own_error_looks_like_a_victims_is_dead_all_the_same() -> None:
    ends = (ev.RankExited(1.2, 0, 1), ev.GangEnded(2.0, "FAILED", "rank 0 failed", 0))
    state = running(2, failed(1.1, 0, *PEER_GONE), *ends)
    assert marks(state, 2.0) == ["dead", ""]
    assert rank_rows.rank_row(state.ranks[0], "dead", 2.0)["doing"] == "failed: RuntimeError"


def test_a_row_holds_figures_that_json_cannot_as_words() -> None:
    values = {"a": (math.nan,), "b": (-math.inf,), "c": (0.1234567891,), "d": (7.0,)}
    state = running(1, ev.Metrics(1.0, 0, (1,), (1.0,), values))
    row = rank_rows.rank_row(state.ranks[0], "", 1.0)
    assert row["metrics"] == {"a": "nan", "b": "-inf", "c": 0.123457, "d": 7}
    assert row["doing"] == "running" and row["bar"] is None


def test_a_row_says_what_the_rank_is_doing() -> None:
    state = running(2, wait(0, 1.0), ev.RankPhase(1.0, 1, "loading", "importing torch"))
    doing = [rank_rows.rank_row(rank, "", 13.0)["doing"] for rank in state.ranks]
    assert doing == ["in all_reduce #7, 12 s", "loading: importing torch"]


def test_a_long_activity_is_visibly_cut() -> None:
    state = running(1, ev.RankPhase(1.0, 0, "starting", "importing torch, transformers, datasets"))
    doing = rank_rows.rank_row(state.ranks[0], "", 13.0)["doing"]
    assert doing == "starting: importing torch, transformers, datase…"


def test_memory_of_a_rank_that_has_ended_is_the_last_known() -> None:
    alive = ev.RankHealth(1.0, 0, 5_000, 99.0, "R")
    zombie = ev.RankHealth(2.0, 0, 0, 0.0, "Z")
    state = running(1, alive, zombie)
    assert rank_rows.rank_row(state.ranks[0], "", 2.0)["rss_bytes"] == 5_000


# ── the protocol ─────────────────────────────────────────────────────────────────────────────────


def declared(pattern: str, item: str) -> list[str]:
    """Return the items of a declaration in ``protocol.ts``, in order."""
    source = Path(rank_rows.__file__).parent / "front" / "src" / "protocol.ts"
    found = re.search(pattern, source.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, pattern
    return re.findall(item, found[1], re.MULTILINE)


@pytest.mark.parametrize("name", ["Gang", "Rank", "Bar", "Rows", "Notice", "RankSummary"])
def test_rows_have_the_keys_of_the_protocol(name: str) -> None:
    rows = ev.RowsDone(1.0, 0.0, 1, 2, 0, 0)
    state = running(1, *bar(1, 2), rows, ev.Notice(1.0, "info", "said"))
    gang, rank = rank_rows.gang_row(state, 1.0), rank_rows.rank_row(state.ranks[0], "", 1.0)
    summary, _ = rank_rows.summary_columns(state, [""], [], [])
    sent = {
        "Gang": gang,
        "Rank": rank,
        "Bar": rank["bar"],
        "Rows": gang["rows"],
        "Notice": gang["notices"][0],
        "RankSummary": {**summary, "at": 0},
    }
    keys = declared(rf"^export interface {name} {{\n(.*?)^}}", r"^  (\w+)\??:")
    assert sorted(sent[name]) == sorted(keys)


def test_the_protocol_has_the_marks_phases_and_reasons_of_the_kernel() -> None:
    marks = declared(r"MARKS: readonly Mark\[\] = \[(.*?)\]", r'"(\w*)"')
    assert tuple(marks) == rank_rows.MARKS
    phases = declared(r"^  /\*\* `([\w ]*)`. \*/\n  phase: string", r"\w+")
    assert tuple(phases) == rank_rows._PHASES
    reasons = declared(r"type StopReason =(.*?);", r'"(\w+)"')
    assert reasons == list(ev.STOP_REASONS)
