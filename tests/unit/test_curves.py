"""Curves: the same buckets whatever the order, and small whatever the run."""

from __future__ import annotations

import math
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.core import events as ev
from hydrogen_magic.views.curve_tips import Tip
from hydrogen_magic.views.curves import ALL_RANKS, CurveChange, Curves
from hydrogen_magic.views.point_buckets import Buckets
from hydrogen_magic.views.widget.json_values import curve_part
from tests.mirror import MirroredCurve

Point = tuple[int, int, float]
"""Rank, step, value."""


def logged(points: Iterable[Point], name: str = "loss") -> list[ev.Event]:
    return [
        ev.Metrics(0.0, rank, (step,), (0.0,), {name: (value,)}) for rank, step, value in points
    ]


def batch(rank: int, steps: Iterable[int], **values: Sequence[float | None]) -> ev.Metrics:
    numbers = tuple(steps)
    columns = {name: tuple(column) for name, column in values.items()}
    return ev.Metrics(0.0, rank, numbers, (0.0,) * len(numbers), columns)


def by_hand(points: Iterable[Point], width: int) -> dict[int, dict[float, list[float]]]:
    """Return rank -> bucket -> values."""
    found: dict[int, dict[float, list[float]]] = {}
    for rank, step, value in points:
        for series in (rank, ALL_RANKS):
            found.setdefault(series, {}).setdefault(step // width, []).append(value)
    return found


def assert_same(buckets: Buckets, expected: dict[float, list[float]]) -> None:
    keys = sorted(expected)
    values = [np.array(expected[key]) for key in keys]
    assert buckets.keys.tolist() == keys
    assert buckets.counts.tolist() == [len(column) for column in values]
    assert buckets.mins.tolist() == [column.min() for column in values]
    assert buckets.maxs.tolist() == [column.max() for column in values]
    means = [column.mean() for column in values]
    scale = max((abs(column).max() for column in values), default=0.0)
    np.testing.assert_allclose(buckets.means, means, rtol=1e-9, atol=1e-12 * scale)


def tell(change: CurveChange, page: MirroredCurve) -> None:
    buffers: list[bytes] = []
    part = curve_part(change, buffers)
    page.apply(part, buffers[part["at"]])


def whole(curves: Curves, metric: str) -> CurveChange:
    """Return all buckets of a metric."""
    return next(change for change in curves.full(None) if change.metric == metric)


steps = st.integers(-40, 40) | st.integers(-30_000, 30_000)
values = st.floats(-1e6, 1e6, width=32)
many_points = st.lists(st.tuples(st.integers(0, 2), steps, values), min_size=1, max_size=60)


@settings(max_examples=60)
@given(many_points, st.data())
def test_buckets_are_what_they_would_be_by_hand(points: list[Point], data: st.DataObject) -> None:
    curves = Curves()
    left = points
    while left:
        n = data.draw(st.integers(1, len(left)))
        curves.feed(logged(left[:n]))
        curves.full(None)
        left = left[n:]
    series = whole(curves, "loss").series
    expected = by_hand(points, whole(curves, "loss").width)
    assert series.keys() == expected.keys()
    for rank, buckets in series.items():
        assert_same(buckets, expected[rank])


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([3, 40, 1000]), st.integers(1, 3))
def test_a_page_that_follows_the_changes_has_the_same_buckets(
    seed: int, most: int, n_ranks: int
) -> None:
    random = np.random.default_rng(seed)
    curves, page = Curves(), MirroredCurve()
    points: list[Point] = []
    for _ in range(12):
        n = int(random.integers(1, 400))
        start = int(random.integers(-2000, 4000)) if random.random() < 0.3 else len(points)
        rank = int(random.integers(n_ranks))
        fresh = [(rank, start + i, float(random.normal())) for i in range(n)]
        points += fresh
        curves.feed([batch(rank, (p[1] for p in fresh), loss=[p[2] for p in fresh])])
        for change in curves.changes(None, most):
            tell(change, page)
    while changes := curves.changes(None, math.inf):
        for change in changes:
            tell(change, page)
    assert page.width == whole(curves, "loss").width
    expected = by_hand(points, page.width)
    for rank, buckets in whole(curves, "loss").series.items():
        assert_same(buckets, expected[rank])
        told = page.series[rank]
        assert sorted(told) == buckets.keys.tolist()
        columns = np.array([told[key] for key in sorted(told)]).T
        kept = (buckets.counts, buckets.means, buckets.mins, buckets.maxs)
        np.testing.assert_allclose(columns, kept, rtol=1e-4, atol=1e-5)


def test_a_series_never_has_more_than_1024_buckets_and_keeps_its_extremes() -> None:
    curves = Curves()
    column = [0.5] * 100_000
    column[31_337], column[77_777] = 9.0, -9.0
    for start in range(0, 100_000, 500):
        curves.feed([batch(0, range(start, start + 500), loss=column[start : start + 500])])
    buckets = whole(curves, "loss").series[0]
    assert whole(curves, "loss").width == 128 and len(buckets) == math.ceil(100_000 / 128)
    assert buckets.maxs[31_337 // 128] == 9.0 and buckets.mins[77_777 // 128] == -9.0
    assert sum(buckets.counts) == 100_000


def test_points_that_wait_for_a_page_take_little_memory() -> None:
    curves = Curves()
    tracemalloc.start()
    try:
        curves.feed(batch(0, [step], loss=[float(step)]) for step in range(10_000))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2e6  # arrays of one point take 4.5 MB
    buckets = whole(curves, "loss").series[ALL_RANKS]
    assert sum(buckets.counts) == 10_000 and max(buckets.maxs) == 9_999.0


def test_a_short_burst_stays_exact_and_comes_within_a_second() -> None:
    curves = Curves()
    curves.feed([batch(rank, range(300), loss=[1.0] * 300) for rank in range(4)])
    told = [curves.changes(None, 500) for _ in range(10)]
    sizes = [sum(len(b) for c in changes for b in c.series.values()) for changes in told]
    assert max(sizes) <= 500 and sum(sizes) == 5 * 300
    assert whole(curves, "loss").width == 1


def test_fast_logging_widens_buckets_until_messages_keep_up() -> None:
    curves = Curves()
    for tick in range(100):
        curves.feed(
            [batch(rank, range(tick * 100, tick * 100 + 100), a=[1.0] * 100) for rank in range(8)]
        )
        curves.changes(None, 100)
    assert whole(curves, "a").width >= 16
    assert sum(len(b) for c in curves.changes(None, math.inf) for b in c.series.values()) < 6000


def test_newest_steps_are_told_first() -> None:
    curves = Curves()
    curves.feed([batch(0, range(100), loss=[1.0] * 100)])
    [change] = curves.changes(None, 20)
    assert change.series[0].keys.tolist() == [*range(90, 100)]


def test_values_that_are_not_finite_are_in_no_bucket_and_the_first_is_noted() -> None:
    curves = Curves()
    nan, inf = math.nan, math.inf
    curves.feed([batch(0, range(5), a=[1.0, None, nan, inf, 2.0], b=[None, None, 1.0, None, None])])
    curves.feed([batch(1, [3, 1], a=[-inf, nan])])
    assert curves.bad_steps("a") == {0: 2, 1: 3} and curves.bad_steps("b") == {}
    assert whole(curves, "a").series[0].keys.tolist() == [0, 4]
    told = {change.metric: change for change in curves.changes(None, 100)}
    assert told["a"].bad_steps == {0: 2, 1: 3}
    assert len(told["a"].series[1]) == 0, "rank 1 has nothing but a bad step to tell"
    assert curves.changes(None, 100) == []


def test_a_rank_that_turns_nan_is_told_though_nothing_else_of_it_is_new() -> None:
    curves = Curves()
    curves.feed([batch(rank, [0, 1], loss=[1.0, 2.0]) for rank in range(3)])
    curves.changes([0], 1000)
    curves.feed([batch(rank, [2, 3], loss=[math.nan, math.nan]) for rank in (0, 2)])
    [change] = curves.changes([0], 1000)
    assert change.bad_steps == {0: 2, 2: 2}, "rank 2 is named without a line of its own"
    [whole] = curves.full([0])
    assert whole.bad_steps == {0: 2, 2: 2} and set(whole.series) == {ALL_RANKS, 0, 2}


def test_numbers_beyond_what_a_page_can_hold() -> None:
    curves = Curves()
    curves.feed([batch(0, [1, 2, 2**63 - 1], a=[1e308, -1e308, 3.0])])
    buckets = whole(curves, "a").series[0]
    assert buckets.counts.sum() == 3
    assert np.isfinite([buckets.means, buckets.mins, buckets.maxs]).all()
    curves.feed([batch(1, [2**63 - 1], b=[math.nan])])
    assert curves.bad_steps("b") == {1: 2**63}, "as a page rounds it"


def test_names_are_cleaned_and_there_are_not_endlessly_many() -> None:
    curves = Curves()
    curves.feed(logged([(0, 1, 1.0)], name="lo\x1b[31mss\n" + "x" * 10_000))
    assert len(curves.metrics()[0]) <= 200 and curves.metrics()[0].startswith("loss x")
    curves.feed(event for i in range(3000) for event in logged([(0, 1, 1.0)], name=f"m{i}"))
    assert len(curves.metrics()) == 1000


def test_metrics_stand_in_the_order_of_their_first_appearance() -> None:
    curves = Curves()
    curves.feed([batch(0, [1], b=[1.0]), batch(0, [2], a=[1.0], b=[1.0])])
    assert curves.metrics() == ["b", "a"]


def test_a_rank_that_is_looked_at_later_comes_with_all_its_buckets() -> None:
    curves, page = Curves(), MirroredCurve()
    shown: set[int] = {0}
    for start in range(0, 3000, 100):
        if start == 1000:
            shown = {0, 3}
        if start == 1500:
            shown = {0}
        if start == 2000:
            shown, page.series[3] = {0, 3}, {}  # a page that never saw rank 3
        for rank in range(5):
            curves.feed([batch(rank, range(start, start + 100), loss=[float(rank)] * 100)])
        for change in curves.changes(shown, math.inf):
            assert set(change.series) <= {ALL_RANKS, *shown}
            tell(change, page)
    assert set(page.series) == {ALL_RANKS, 0, 3}
    series = whole(curves, "loss").series
    assert set(series) == {ALL_RANKS, *range(5)}
    for rank in page.series:
        assert sorted(page.series[rank]) == series[rank].keys.tolist()


@settings(max_examples=40)
@given(many_points, steps, steps, st.integers(1, 300))
def test_detail_is_made_of_the_points(
    points: list[Point], start: int, until: int, n_buckets: int
) -> None:
    curves = Curves()
    curves.feed(logged(points))
    width, series = curves.detail("loss", start, until, n_buckets)
    first, last = sorted((start // width, until // width))
    assert last - first <= n_buckets + 1
    inside = [point for point in points if first <= point[1] // width <= last]
    expected = by_hand(inside, width)
    for rank, buckets in series.items():
        assert_same(buckets, expected.get(rank, {}))


def n_lines_of(call: Callable[[], object]) -> int:
    """Return how many lines of Python ``call`` executes."""
    n_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal n_lines
        n_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return n_lines


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["rising", "epochs"])
def test_detail_takes_no_step_for_each_point(is_shuffled: bool) -> None:
    """It runs whenever a page zooms, while the kernel receives events."""
    curves = Curves()
    n = 200_000
    column = np.sin(np.arange(n)).tolist()
    numbers = [i % 50_000 for i in range(n)] if is_shuffled else range(n)
    curves.feed([batch(0, numbers, loss=column)])
    assert n_lines_of(lambda: curves.detail("loss", 0, n, 1000)) < n / 100


# ── where the mean of all ranks ends ─────────────────────────────────────────────────────────────


def tip_after(*batches: ev.Event) -> Tip:
    """Return the tip of ``loss``, as a page and a picture are told."""
    curves = Curves()
    curves.feed(batches)
    [change] = curves.changes((), math.inf)
    assert change.tip is not None and change.tip == whole(curves, "loss").tip == curves.tip("loss")
    return change.tip


def of_ranks(*n_steps: int) -> list[ev.Event]:
    """Return what ranks log that have come so far; each logs its own number."""
    return [batch(rank, range(n), loss=[float(rank)] * n) for rank, n in enumerate(n_steps)]


@pytest.mark.parametrize(
    ("n_steps", "tip"),
    [
        ([21] + [20] * 16, Tip(19, 8.0, 20)),
        ([20] * 17, Tip(19, 8.0, None)),
        ([5], Tip(4, 0.0, None)),
        ([9, 8], Tip(7, 0.5, 8)),
        ([9, 8, 8], Tip(7, 1.0, 8)),
        ([9, 9, 1, 8], Tip(7, 4 / 3, 8)),
        ([2000] * 3 + [3000], Tip(1999, 1.5, 2000)),  # of buckets of four steps
    ],
)
def test_the_mean_ends_where_most_ranks_are(n_steps: list[int], tip: Tip) -> None:
    assert tip_after(*of_ranks(*n_steps)) == tip


def test_only_ranks_that_log_a_metric_are_counted() -> None:
    validating = [batch(0, [7], accuracy=[0.5]), batch(1, [1], accuracy=[None])]
    curves = Curves()
    curves.feed([*validating, *of_ranks(9, 9, 9)])
    assert curves.tip("accuracy") == Tip(7, 0.5, None)


def test_ranks_that_log_other_steps_count_with_their_last_value() -> None:
    rare = batch(1, [0, 10, 20], loss=[1.0, 2.0, 3.0])
    assert tip_after(batch(0, range(25), loss=[5.0] * 25), rare) == Tip(20, 4.0, 21)
    often = [batch(rank, range(0, 30, 3), loss=[5.0] * 10) for rank in (0, 2)]
    assert tip_after(*often, rare) == Tip(27, 5.0, None)


def test_a_value_that_is_not_finite_is_part_of_the_mean_and_moves_its_end() -> None:
    curves = Curves()
    curves.feed(of_ranks(3, 3))
    curves.changes((), math.inf)
    for step in (3, 4):
        curves.feed([batch(rank, [step], loss=[math.nan]) for rank in range(2)])
        [change] = curves.changes((), math.inf)
        assert change.tip and (change.tip.step, change.tip.end) == (step, None)
        assert math.isnan(change.tip.mean)
        part = curve_part(change, [])
        assert part["tip"] == {"step": step, "mean": "nan", "end": None}
    curves.feed([batch(0, [5, 5], loss=[1.0, 3.0]), batch(1, [5], loss=[2.0])])
    assert curves.tip("loss") == Tip(5, 2.5, None), "the last value of each rank"


def test_a_rank_is_where_it_logged_last_if_it_counts_again_from_0() -> None:
    again = [batch(rank, [0, 1], loss=[10.0 + rank] * 2) for rank in range(3)]
    assert tip_after(*of_ranks(100, 100, 100), *again) == Tip(1, 11.0, None)
    ahead = batch(0, [2, 3], loss=[9.0, 9.0])
    assert tip_after(*of_ranks(100, 100, 100), *again, ahead) == Tip(1, 11.0, None)


def test_ranks_that_have_not_logged_since_a_restart_do_not_count() -> None:
    """Of an elastic gang, some may never come back."""
    curves = Curves()
    curves.feed([*of_ranks(100, 100, 100, 100), ev.AttemptStarted(1.0, 1)])
    assert curves.tip("loss") == Tip(99, 1.5, None), "as before, as long as nobody logs"
    curves.feed([batch(0, [50, 51], loss=[7.0, 7.0])])
    assert curves.tip("loss") == Tip(51, (7 + 1 + 2 + 3) / 4, 52)
    curves.feed([batch(rank, [50, 51], loss=[7.0, 7.0]) for rank in (1, 2, 3)])
    assert curves.tip("loss") == Tip(51, 7.0, None)
