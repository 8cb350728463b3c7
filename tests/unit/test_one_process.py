"""Whether one process would be faster than the ranks: what is measured, and when it is reported."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from hydrogen_magic.inference.one_process import OneProcessTiming


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Run:
    n_rows: int | None = 72_000
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.timing = OneProcessTiming(2, 4_096, self.n_rows, self.clock)


def alone(n_rows: int | None = 72_000, second_s: float = 0.1) -> Run:
    """Return a run whose rank 1 has predicted two batches alone."""
    run = Run(n_rows)
    assert run.timing.may_send(1, 0) and not run.timing.may_send(0, 0)
    run.timing.answered(1, 0.04, 1_000)
    assert not run.timing.may_send(0, 0)
    run.timing.answered(1, second_s, 4_000)
    assert run.timing.is_over and run.timing.may_send(0, 0)
    return run


def test_a_fast_predict_is_measured_on_a_large_chunk() -> None:
    """Most of the time of a single batch goes into sending it."""
    run = Run()
    assert run.timing.may_send(0, 0)
    for n_batches in (1, 8, 64):
        assert not run.timing.may_send(1, 0)
        run.timing.answered(0, 0.001 + 0.0001 * n_batches, 4_096 * n_batches)
    assert run.timing.may_send(1, 0) and run.timing.row_s == pytest.approx(0.0074 / (64 * 4_096))


def test_other_ranks_do_not_wait_for_more_chunks_than_are_needed() -> None:
    run = Run()
    assert run.timing.may_send(0, 0)
    for seconds, is_over in ((0.04, False), (0.02, False), (0.04, True)):
        run.timing.answered(0, seconds, 4_096)
        assert run.timing.may_send(1, 0) == is_over


def test_a_slow_predict_gets_small_chunks_alone() -> None:
    """If it holds the GIL, it uses one core until the other ranks begin."""
    timing = Run().timing
    assert timing.may_send(0, 0) and timing.most_rows(4_096) == 4_096
    timing.answered(0, 0.02, 4_096)
    assert timing.most_rows(8 * 4_096) == 3 * 4_096 and timing.most_rows(4_096) == 4_096
    timing.answered(0, 0.06, 3 * 4_096)
    assert timing.most_rows(8 * 4_096) == 8 * 4_096


def test_a_small_frame_or_a_parallel_model_is_reported_with_both_times() -> None:
    timing = alone().timing
    assert timing.warning(72_000, 4.5) is None  # not yet done
    text = timing.warning(72_000, 4.5, is_last=True) or ""
    assert text.startswith("2 ranks took 4.5 s; one process would take about 1.8 s")
    assert "--np 1" in text
    assert timing.warning(72_000, 4.6, is_last=True) is None


def test_ranks_that_are_faster_or_hardly_slower_are_not_reported() -> None:
    for elapsed_s in (1.0, 2.7):
        assert alone().timing.warning(72_000, elapsed_s, is_last=True) is None
    run = alone()
    run.timing.cell_s = 2.0  # one process would need it as well
    assert run.timing.warning(72_000, 4.5, is_last=True) is None


def test_a_long_run_is_reported_before_its_end() -> None:
    run = alone(None)
    assert run.timing.warning(10_000, 1.0) is None
    run.clock.now_s += 6.0
    text = run.timing.warning(70_000, 7.0) or ""
    assert text.startswith("2 ranks predict 10,000 rows/s; one process predicted 40,000 rows/s")


def test_other_ranks_do_not_wait_long() -> None:
    for n_rows, limit_s in ((72_000, 0.5), (10_000_000, 5.0), (None, 0.5)):
        run = Run(n_rows)
        assert run.timing.may_send(0, 0)
        run.clock.now_s += limit_s - 0.1
        assert not run.timing.may_send(1, 0)
        run.clock.now_s += 0.2
        assert run.timing.may_send(1, 0)
        run.timing.answered(0, limit_s + 0.1, 4_096)  # no longer alone
        assert run.timing.warning(72_000, 1e6, is_last=True) is None


def test_no_chunk_with_the_threads_of_all_cores_is_left_when_other_ranks_begin() -> None:
    timing = Run().timing
    assert timing.may_send(0, 0) and not timing.may_send(0, 1)
    timing.answered(0, 0.1, 4_096)
    assert timing.may_send(0, 1) and timing.may_send(1, 0)


def test_nobody_waits_for_a_rank_that_left() -> None:
    run = Run()
    assert run.timing.may_send(0, 0) and not run.timing.may_send(1, 0)
    run.timing.left(1)
    assert not run.timing.may_send(1, 0)
    run.timing.left(0)
    assert run.timing.may_send(1, 0)


def test_one_rank_is_not_compared() -> None:
    timing = OneProcessTiming(1, 10, 100)
    assert timing.may_send(0, 1)
    timing.answered(0, 1.0, 10)
    assert timing.warning(100, 100.0, is_last=True) is None
