"""Tracks: spans as columns, phases and waits among them, and where the time goes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.span_tracks import OTHER, SpanTracks
from tests import seconds

Span = tuple[str, float, float, int]
"""Name, start, end, depth."""


def spans(rank: int, *rows: Span, track: str = "spans", skipped: int = 0) -> ev.Spans:
    names, starts, ends, depths = zip(*rows, strict=True) if rows else ((), (), (), ())
    return seconds.spans(0.0, rank, names, starts, ends, depths, skipped, track)


def fed(*events: ev.Event) -> SpanTracks:
    tracks = SpanTracks()
    tracks.feed(events)
    return tracks


def rows(tracks: SpanTracks, rank: int, track: str) -> list[Span]:
    """Return a track as rows, times rounded to what a test writes."""
    if (rank, track) not in tracks.tracks():
        return []
    spans = tracks.tracks()[rank, track]
    columns = zip(spans.names, spans.starts_s, spans.durations_s, spans.depths, strict=True)
    return [
        (tracks.names[name], round(float(start), 4), round(float(start + length), 4), int(depth))
        for name, start, length, depth in columns
    ]


names = st.sampled_from(["forward", "backward", "optimizer", "data wait"])
times = st.integers(0, 10_000).map(lambda n: n / 1000)
one_span = st.tuples(names, times, times, st.integers(0, 3))
batches = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["spans", "profiler"]), st.lists(one_span)),
    max_size=12,
)


@settings(max_examples=60)
@given(batches)
def test_spans_come_out_as_they_went_in(found: list[tuple[int, str, list[Span]]]) -> None:
    tracks = fed(*(spans(rank, *part, track=track) for rank, track, part in found))
    for rank, track in tracks.tracks():
        expected = [
            (name, start, max(start, end), depth)
            for r, t, part in found
            for name, start, end, depth in part
            if (r, t) == (rank, track)
        ]
        assert rows(tracks, rank, track) == expected
        assert tracks.sizes()[rank, track] == len(expected)
    assert len(set(tracks.names)) == len(tracks.names)


@settings(max_examples=40)
@given(st.lists(one_span, min_size=1, max_size=30))
def test_shares_are_the_seconds_of_outermost_spans(found: list[Span]) -> None:
    depths = {d: {row[0] for row in found if row[3] == d} for d in range(4)}
    told = next((d for d in depths if len(depths[d]) > 1), min(row[3] for row in found))
    shares = fed(spans(2, *found)).shares()
    for name in {row[0] for row in found}:
        seconds = sum(max(0.0, e - s) for n, s, e, d in found if n == name and d == told)
        assert shares.get(name, {}).get(2, 0.0) == pytest.approx(seconds, abs=1e-4)


def test_time_goes_to_what_is_inside_of_a_span_that_encloses_everything() -> None:
    steps = [("step", float(k), k + 1.0, 0) for k in range(4)]
    inside = [("forward", k + 0.25, k + 0.5, 1) for k in range(4)]
    tracks = fed(spans(0, *inside, *steps))
    assert tracks.shares() == {"step": {0: 4.0}}, "one name inside says no more than the outer one"
    tracks.feed([spans(0, ("backward", 0.5, 1.0, 1))])
    assert tracks.shares() == {"forward": {0: 1.0}, "backward": {0: 0.5}}
    assert tracks.recorded_s() == {0: 4.0}


def test_the_time_of_names_that_are_shown_alike_is_added() -> None:
    long = "kernel<" + "x" * 200
    tracks = fed(spans(0, (f"{long}1>", 0, 3, 0), (f"{long}2>", 3, 5, 0), ("a\tb", 5, 6, 0)))
    assert [round(s[0], 3) for s in tracks.shares().values()] == [5.0, 1.0]
    assert len({*tracks.names}) == len(tracks.names)


def test_shares_count_no_time_twice() -> None:
    tracks = fed(
        spans(0, ("backward", 0.0, 1.0, 0)),
        spans(0, ("all_reduce", 0.5, 0.9, 0), track="collectives"),
        spans(1, ("all_reduce", 0.0, 0.25, 0), track="collectives"),
        ev.RankPhase(0.0, 1, "running"),
        ev.RankExited(9.0, 1, 0),
    )
    assert tracks.shares() == {"backward": {0: 1.0}, "all_reduce": {1: 0.25}}


def test_phases_follow_one_another_and_what_keeps_a_rank_busy_lies_within() -> None:
    tracks = fed(
        ev.GangLaunched(0.0, "g", "", 1, "local", "torch", 0.0, "", {}),
        ev.AttemptStarted(0.0, 0),
        ev.RankStarted(0.1, 0, 1, "here", "cpu"),
        ev.RankPhase(0.2, 0, "starting", "importing torch"),
        ev.RankPhase(0.9, 0, "starting"),
        ev.RankPhase(1.0, 0, "loading"),
        ev.RankPhase(1.5, 0, "running"),
    )
    assert rows(tracks, 0, "phases") == [
        ("waiting", 0.0, 0.1, 0),
        ("importing torch", 0.2, 0.9, 1),
        ("starting", 0.1, 1.0, 0),
        ("loading", 1.0, 1.5, 0),
    ]
    tracks.feed([ev.RankExited(4.0, 0, 0)])
    assert rows(tracks, 0, "phases")[-1] == ("running", 1.5, 4.0, 0)
    tracks.feed([ev.GangEnded(5.0, "SUCCEEDED", "")])
    assert len(rows(tracks, 0, "phases")) == 5, "what has ended ends once"


def test_phases_of_a_lost_attempt_end_with_it() -> None:
    tracks = fed(
        ev.GangLaunched(0.0, "g", "", 2, "local", "torch", 0.0, "", {}),
        ev.AttemptStarted(0.0, 0),
        ev.RankPhase(1.0, 0, "running"),
        ev.AttemptStarted(5.0, 1),
    )
    assert rows(tracks, 0, "phases") == [("waiting", 0.0, 1.0, 0), ("running", 1.0, 5.0, 0)]
    tracks.feed([ev.GangEnded(6.0, "STOPPED", "")])
    for rank in (0, 1):
        assert rows(tracks, rank, "phases")[-1] == ("waiting", 5.0, 6.0, 0)


def wait(rank: int, at_s: float, name: str, since_s: float = 0.0) -> ev.CollectiveWait:
    return ev.CollectiveWait(at_s, rank, name, 7, since_s)


def test_a_wait_in_a_collective_is_a_span_once_it_has_ended() -> None:
    tracks = fed(wait(0, 3.0, "all_reduce", 2.0), wait(0, 6.0, ""))
    assert rows(tracks, 0, "collectives") == []
    tracks.flush(6.5)
    assert rows(tracks, 0, "collectives") == []
    tracks.flush(7.0)
    tracks.flush(9.0)
    assert rows(tracks, 0, "collectives") == [("all_reduce", 2.0, 6.0, 0)]


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_wait_that_was_recorded_as_a_span_is_there_once(comes: str) -> None:
    span = spans(0, ("all_reduce", 2.0, 6.0, 0), track="collectives")
    waits = [wait(0, 3.0, "all_reduce", 2.001), wait(0, 6.001, "")]
    tracks = fed(span, *waits) if comes == "before" else fed(*waits, span)
    tracks.flush(60.0)
    assert rows(tracks, 0, "collectives") == [("all_reduce", 2.0, 6.0, 0)]


def test_ranks_wait_for_the_last_one_until_gradients_are_reduced() -> None:
    tracks = SpanTracks()
    tracks.feed([ev.GangLaunched(0.0, "3f2a", "", 3, "local", "torch", 1.0, "", {})])
    for step in (0.0, 10.0):
        starts = (step + 1.0, step + 4.0, step + 1.00001)
        tracks.feed(
            spans(rank, ("backward", step, start, 0), (ev.GRADIENTS, start, step + 5.0, 0))
            for rank, start in enumerate(starts)
        )
    tracks.flush(15.0)
    assert rows(tracks, 0, "spans")[2:] == [
        ("waiting for rank 1", 1.0, 4.0, 0),
        (ev.GRADIENTS, 4.0, 5.0, 0),
        ("waiting for rank 1", 11.0, 14.0, 0),
        (ev.GRADIENTS, 14.0, 15.0, 0),
    ]
    assert rows(tracks, 1, "spans")[2:] == [
        (ev.GRADIENTS, 4.0, 5.0, 0),
        (ev.GRADIENTS, 14.0, 15.0, 0),
    ]


def test_a_reduction_of_which_not_all_ranks_tell_names_none() -> None:
    tracks = SpanTracks()
    tracks.feed([ev.GangLaunched(0.0, "3f2a", "", 3, "local", "torch", 1.0, "", {})])
    tracks.feed(spans(rank, (ev.GRADIENTS, 1.0 + rank, 5.0, 0)) for rank in (0, 1))
    tracks.flush(5.5)
    assert rows(tracks, 0, "spans") == [], "rank 2 may still tell of it"
    tracks.flush(7.0)
    assert rows(tracks, 0, "spans") == [(ev.GRADIENTS, 1.0, 5.0, 0)]


def test_the_end_leaves_nothing_open() -> None:
    tracks = fed(
        ev.RankPhase(1.0, 0, "running"),
        wait(0, 3.0, "barrier", 2.0),
        ev.RankPhase(1.0, 1, "running"),
        wait(1, 3.0, "barrier", 2.5),
        ev.RankExited(4.0, 0, None, "SIGKILL"),
        ev.GangEnded(5.0, "FAILED", "because"),
    )
    assert rows(tracks, 0, "phases") == [("running", 1.0, 4.0, 0)]
    assert rows(tracks, 1, "phases") == [("running", 1.0, 5.0, 0)]
    assert rows(tracks, 0, "collectives") == [("barrier", 2.0, 4.0, 0)]
    assert rows(tracks, 1, "collectives") == [("barrier", 2.5, 5.0, 0)]


def test_names_that_come_too_late_for_an_index_share_the_last_one() -> None:
    tracks = SpanTracks()
    for start in range(0, OTHER + 2000, 1000):
        tracks.feed([spans(0, *((f"name {start + i}", 0.0, 1.0, 0) for i in range(1000)))])
    full = tracks.tracks()[0, "spans"]
    assert len(tracks.names) == OTHER + 1 and tracks.names[-1] == "other"
    assert full.names[OTHER - 1] == OTHER - 1
    assert set(full.names[OTHER:].tolist()) == {OTHER}
    assert tracks.shares()["other"] == {0: float(len(full) - OTHER)}


def test_what_hostile_ranks_send_does_no_harm() -> None:
    huge = 2**63 - 1
    tracks = fed(
        spans(0, ("c", 5.0, 1.0, 0), ("e", 1.0, 2.0, huge), ("f", 1.0, 2.0, -huge)),
        spans(0, ("x" * 10**6 + "\x1b[2J\ud800", 0.0, 1.0, 300), skipped=-5),
    )
    found = rows(tracks, 0, "spans")
    kept = [(name[:3], depth) for name, *_, depth in found]
    assert kept == [("c", 0), ("e", 255), ("f", 0), ("xxx", 255)]
    assert found[0] == ("c", 5.0, 5.0, 0), "a span that ends before it starts has no length"
    assert max(map(len, tracks.names)) <= 120
    assert tracks.tracks()[0, "spans"].skipped == 0


def test_skipped_spans_are_counted() -> None:
    tracks = fed(spans(0, ("a", 0.0, 1.0, 0), skipped=3), spans(0, skipped=4))
    assert tracks.tracks()[0, "spans"].skipped == 7


def test_columns_handed_out_stay_as_they_are() -> None:
    tracks = fed(spans(0, ("a", 0.0, 1.0, 0)))
    before = tracks.tracks()[0, "spans"]
    copied = before.starts_s.copy()
    for _ in range(100):
        tracks.feed([spans(0, ("a", random.random(), 2.0, 0))])
    assert np.array_equal(before.starts_s, copied) and len(before) == 1
