"""A rank of ``%%infer`` that hangs: its rows are done by others, once each, and nobody waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.inference import speculation
from hydrogen_magic.inference.run import InferenceRun
from tests import infer_ranks, leaks
from tests.infer_runs import begin, ended, frame

FLOOR_S = 5.0
"""After which a rank may be called hung here: a chunk takes milliseconds, seconds on a busy machine."""
N_ROWS = 20_000


@pytest.fixture(autouse=True)
def impatient(warm_agents: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "FLOOR_S", FLOOR_S)


def result_of(run: InferenceRun) -> Any:
    """Return the result of a run that succeeds."""
    result = ended(run, 90.0).result
    assert run.gang.state == "SUCCEEDED"
    return result


def warnings(run: InferenceRun) -> str:
    return "\n".join(notice.text for notice in run.gang.snapshot().notices)


@pytest.mark.parametrize(
    ("stopped", "from_row"),
    [
        pytest.param(1, 2_000, marks=pytest.mark.exhaustive),  # in the middle
        (0, 0),  # with the first rows, which say what is predicted
    ],
)
def test_what_a_stopped_rank_had_is_done_by_another(
    tmp_path: Path, stopped: int, from_row: int
) -> None:
    marker = tmp_path / "marker"
    # The rank that stops has a second to be set up: then all rows would be done.
    run = begin(frame(N_ROWS), infer_ranks.waits_for, str(marker), stopped, from_row, 0.005)
    result = result_of(run)
    assert list(result["y"]) == [2 * x for x in range(N_ROWS)]
    said = warnings(run)
    assert f"rank {stopped} has not answered rows " in said
    assert f"rank {stopped} was cancelled: it did not end after all rows were done" in said
    assert not leaks.command(int(marker.read_text()))


def test_an_answer_that_comes_late_is_one_too_many(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    run = begin(frame(200_000), infer_ranks.waits_for, str(marker), 0, 20_000)
    woken = threading.Thread(target=_wake_up, args=(run, marker))
    woken.start()
    result = result_of(run)
    woken.join()
    assert list(result["y"]) == [2 * x for x in range(200_000)]
    assert result["is_woken"].any()
    assert "was cancelled" not in warnings(run)


def _wake_up(run: InferenceRun, marker: Path) -> None:
    """Wake the stopped rank up when what it has begun is with another one, too: both answer now.

    It has rows that it has not begun, so the run goes on after the second answer.
    """
    deadline = time.monotonic() + 90
    while "rank 0 has not answered rows" not in warnings(run) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(int(marker.read_text()), signal.SIGCONT)


def test_a_rank_that_is_stopped_in_its_set_up(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    run = begin(frame(1_000), infer_ranks.stops_in_set_up, str(marker))
    assert list(result_of(run)["y"]) == list(range(0, 2_000, 2))
    assert not leaks.command(int(marker.read_text()))


def test_how_long_is_too_long() -> None:
    known = speculation.SilenceLimit()
    assert known.chunk_s(100) > 60  # nothing says what is usual
    for _ in range(10):
        known.took(2.0, 100)
    known.took(500.0, 100)
    assert known.chunk_s(100) == pytest.approx(20.0)
    assert known.chunk_s(1_000) == pytest.approx(200.0)
    assert known.chunk_s(1) == FLOOR_S
    known.set_up(20.0)
    assert known.set_up_s() == pytest.approx(200.0)
