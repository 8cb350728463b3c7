"""``%%infer`` on this machine: order, demand, every way to fail, and set-up that is kept."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pandas as pd
import pytest

import hydrogen_magic as hm
from hydrogen_magic import capture
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.session import sessions
from hydrogen_magic.errors import GangStoppedError, GangTimeoutError, InferError, RankFailedError
from hydrogen_magic.inference import dispatcher, sources
from hydrogen_magic.inference.gang import infer
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.worker.inference import rank_inference
from hydrogen_magic.views.text_table import gang_lines
from tests import infer_ranks, leaks
from tests.gangs import alive, wait_until
from tests.infer_runs import begin, ended, frame
from tests.memory import Memory

pytestmark = pytest.mark.usefixtures("warm_agents")


# ── what comes out ───────────────────────────────────────────────────────────────────────────────


def test_every_row_has_its_own_prediction_in_its_place() -> None:
    df = frame(12_345).sample(frac=1, random_state=0)
    result = ended(begin(df, infer_ranks.doubles, np=3)).result
    pd.testing.assert_frame_equal(result, df.assign(y=df["x"] * 2))


@pytest.mark.parametrize("kind", ["numbers", "mixed", "arrow", "arrays"])
def test_a_batch_that_predict_keeps_stays_what_it_is(kind: str) -> None:
    """Later chunks come through the same memory."""
    df = frame(10_000)
    if kind == "mixed":
        df["text"] = [f"row {n}" for n in df["x"]]
    run = begin(df, infer_ranks.keeps, kind, np=1, only=True, batch_size=250)
    expected = [sum(range(n - n % 250 + 250)) for n in range(0, len(df), 250)]
    assert ended(run).result["so_far"].tolist() == [total for total in expected for _ in range(250)]


def test_more_ranks_than_batches() -> None:
    result = ended(begin(frame(3), infer_ranks.doubles)).result
    assert list(result["y"]) == [0, 2, 4]


def test_a_frame_without_rows() -> None:
    result = ended(begin(frame(0), infer_ranks.doubles)).result
    assert (list(result.columns), str(result["y"].dtype), len(result)) == (["x", "y"], "int64", 0)
    typed = ended(begin(frame(0), infer_ranks.doubles, schema="y bigint")).result
    assert (list(typed.columns), str(typed["y"].dtype), len(typed)) == (["x", "y"], "int64", 0)
    run = ended(begin(frame(0), infer_ranks.never_without_rows, np=1))
    assert list(run.result.columns) == ["x"]
    assert any("set its columns with --schema" in text for text in run.gang.logs.values())


def test_predictions_far_larger_than_the_rows() -> None:
    result = ended(begin(frame(600), infer_ranks.grows, 3_000)).result
    assert [len(row) for row in result["wide"]] == [3_000] * 600
    assert [row[-1] for row in result["wide"]] == [float(x) for x in range(600)]


def test_a_slow_rank_gets_fewer_rows() -> None:
    """Both sleep: otherwise a busy machine would slow down the other one alone."""
    result = ended(begin(frame(5_000), infer_ranks.slow_on, 1, 0.05, 0.005)).result
    rows = Counter(result["rank"])
    assert rows[0] > rows[1] > 0, rows


def test_a_default_timeout_of_sockets_is_for_the_users_own() -> None:
    """It makes the file of a new socket non-blocking, also for the process that gets it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60)
    try:
        run = begin(frame(200), infer_ranks.doubles)
        assert len(ended(run).result) == 200
    finally:
        socket.setdefaulttimeout(before)
    slow = begin(frame(200), infer_ranks.waits_with_a_timeout, 0.05)
    assert len(ended(slow).result) == 200


def test_ranks_share_the_cores_and_report_their_rows() -> None:
    run = ended(begin(frame(5_000), infer_ranks.who))
    assert set(run.result["threads"]) == {max(1, len(os.sched_getaffinity(0)) // 2)}
    done = {rank.rank: rank.bar.n for rank in run.gang.ranks if rank.bar is not None}
    assert done == dict(Counter(run.result["rank"]))
    shown = gang_lines(run.gang.snapshot(), run.gang.snapshot().now_s, 120)
    assert any("5,000 of 5,000 rows" in line for line in shown), shown
    events = run.gang.events()
    first = next(event for event in events if isinstance(event, ev.RowsDone))
    assert (first.done, first.in_flight) == (0, 0)
    bars = [event for event in events if isinstance(event, ev.Progress)]
    began_at = {bar.rank: bar.n for bar in reversed(bars)}
    assert began_at == dict.fromkeys(done, 0)  # rates count from there


def test_columns_without_number_are_told_to_every_rank() -> None:
    """More than fits into the socket that they are told by."""
    result = ended(begin(frame(300), infer_ranks.very_wide, 1_000, only=True)).result
    assert result.shape == (300, 1_000) and result.iloc[-1, -1] == 299 + 999


@pytest.mark.exhaustive
def test_twenty_thousand_columns() -> None:
    values = numpy.arange(40 * 20_000, dtype=numpy.float32).reshape(40, 20_000)
    wide = pd.DataFrame(values, columns=[f"c{n}" for n in range(20_000)])
    result = ended(begin(wide, infer_ranks.sums_rows, batch_size=8)).result
    assert result.columns[-1] == "sum"
    pd.testing.assert_frame_equal(result.drop(columns="sum"), wide)
    assert result["sum"].tolist() == values.sum(axis=1, dtype=numpy.float64).tolist()


def test_a_schema_is_looked_at_before_anything_runs() -> None:
    for schema, said in (("y dbl", "dbl"), ("x double", "column 'x'")):
        with pytest.raises(InferError, match=said):
            begin(frame(), infer_ranks.doubles, schema=schema)


def test_what_is_no_exception_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a panic in Polars."""

    class Panic(BaseException):
        pass

    def chunks(self: object, batch_size: int) -> Any:
        raise Panic("index out of bounds")
        yield

    monkeypatch.setattr(sources.source(frame()).__class__, "chunks", chunks)
    with pytest.raises(InferError, match="failed: Panic: index out of bounds"):
        _ = ended(begin(frame(), infer_ranks.doubles)).result


def test_memory_above_frame_and_result_is_some_chunks() -> None:
    df = pd.DataFrame({f"x{n}": numpy.arange(1_000_000) for n in range(10)})
    captured = capture.capture_call(infer_ranks.zeros, (), {})
    options = InferOptions(columns=(), only=True)

    def once() -> int:
        with Memory() as memory:
            result = infer(df, captured, JobSpec(np=2), options, title="test").result
        return memory.peak - memory.before - int(result.memory_usage().sum())

    once()  # processes, imports: also later, if the ranks were not kept
    assert any(once() < 64 << 20 for _ in range(2))  # 80 MB go to the ranks


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────


def test_rows_that_fail_end_the_run_or_are_null_or_have_an_error() -> None:
    """As the user has chosen; the message names the rows and the rank."""
    run = ended(begin(frame(), infer_ranks.fails_at, 7_123, on_error="null"))
    missing = run.result["y"].isna()
    assert missing[7_123]
    assert 0 < missing.sum() <= 100
    notices = [notice.text for notice in run.gang.snapshot().notices]
    assert any(str(missing.sum()) in text and "cannot do 7123" in text for text in notices), notices
    result = ended(begin(frame(), infer_ranks.fails_at, 7_123, on_error="collect")).result
    assert "cannot do 7123" in result["error"][7_123]
    assert result["error"].notna().sum() == result["y"].isna().sum()
    run = ended(begin(frame(), infer_ranks.fails_at, 7_123))
    with pytest.raises(RankFailedError, match=r"7[01]\d\d") as caught:
        _ = run.result
    assert "cannot do 7123" in caught.value.report
    assert run.gang.ranks[caught.value.rank].phase == "failed"


def test_when_every_row_fails_that_is_an_error() -> None:
    run = ended(begin(frame(2_000), infer_ranks.always_fails, on_error="null"))
    with pytest.raises(InferError, match=r"each of the first 2,000 rows.*never"):
        _ = run.result


def test_a_cell_without_predict() -> None:
    run = ended(begin(frame(), infer_ranks.nothing))
    with pytest.raises(RankFailedError, match="predict"):
        _ = run.result


def test_a_retry_loses_no_row(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    run = ended(begin(frame(), infer_ranks.killed_once_at, 7_123, marker, retries=1))
    assert list(run.result["y"]) == [2 * x for x in range(10_000)]
    assert run.gang.snapshot().attempt == 1


def test_an_attempt_after_the_last_row_finds_nothing_to_do() -> None:
    source = sources.source(frame(500))
    options = InferOptions(batch_size=100)
    feed = dispatcher.Dispatcher(source, source.result(options), options, 1)
    for _ in range(2):  # the first one failed as its process ended
        (channel,) = feed.open(1)
        assert rank_inference.serve(channel, infer_ranks.doubles(), feed.options)
        feed.close()
        assert list(feed.value["y"]) == list(range(0, 1_000, 2))


def test_stop_ends_a_run_in_the_middle() -> None:
    run = begin(frame(), infer_ranks.sleeps)
    wait_until(lambda: any("began" in text for text in run.gang.logs.values()))
    run.gang.stop()
    with pytest.raises(GangStoppedError):
        _ = ended(run).result


def test_stop_returns_rows_without_a_single_value() -> None:
    run = begin(frame(), infer_ranks.slow_nulls)
    wait_until(lambda: (rows := run.gang.snapshot().rows) is not None and rows.done > 0)
    run.gang.stop()
    part = ended(run).result
    assert 0 < len(part) < 10_000 and part["y"].isna().all()
    (text,) = [each.text for each in run.gang.snapshot().notices if "missing" in each.text]
    assert f"{len(part):,} of 10,000 rows finished" in text


def test_stop_returns_finished_rows_though_the_source_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pyarrow as pa

    answers, text = threading.Event(), ["t" * 1000] * 500
    monkeypatch.setattr(dispatcher, "_JOIN_S", 0.2)

    def batches() -> Any:
        for _ in range(100):
            yield pa.record_batch({"x": list(range(500)), "text": text})
            time.sleep(0.02)  # progress is reported between chunks
        answers.wait(60.0)

    schema = pa.schema({"x": pa.int64(), "text": pa.string()})
    reader = pa.RecordBatchReader.from_batches(schema, batches())
    run = begin(reader, infer_ranks.doubles)
    wait_until(lambda: (rows := run.gang.snapshot().rows) is not None and rows.done >= 500)
    run.gang.stop()
    ended(run)
    threading.Timer(0.5, answers.set).start()
    # The finished rows of either rank, which may not be the first ones.
    xs, ys = (run.result[name].to_pylist() for name in ("x", "y"))
    assert len(xs) >= 500 and ys == [2 * x for x in xs]
    assert len(run.result) <= 50_000
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name == "hydrogen_magic dispatcher"]
    )


def test_a_timeout_leaves_no_partial_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": range(10_000)}), file, row_group_size=500)
    run = begin(file, infer_ranks.slow_on, 0, 0.2, np=1, timeout=3600.0)
    wait_until(lambda: list(tmp_path.glob(".*.part")))
    run.gang.stop_for("timeout")
    with pytest.raises(GangTimeoutError) as caught:
        _ = ended(run).result
    assert caught.value is not None  # holds what its frames refer to, as a notebook does
    assert not list(tmp_path.glob(".*.part"))


def test_a_frame_that_cannot_be_read_ends_the_run(tmp_path: Path) -> None:
    import pyarrow as pa

    def batches() -> Any:
        yield pa.record_batch({"x": list(range(500))})
        raise OSError("the disk is gone")

    reader = pa.RecordBatchReader.from_batches(pa.schema({"x": pa.int64()}), batches())
    run = ended(begin(reader, infer_ranks.doubles))
    with pytest.raises(Exception, match="the disk is gone"):
        _ = run.result
    assert run.gang.state == "FAILED"


@pytest.mark.parametrize("how", ["fails", "stops", "succeeds", "is refused"])
def test_a_connection_is_free_after_a_run_over_its_query(how: str) -> None:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    query = connection.sql("select range x, repeat('t', 1000) t from range(20_000)")
    if how == "is refused":
        with pytest.raises(InferError, match="nope") as shown:
            begin(query, infer_ranks.doubles, columns=("nope",))
        assert shown.tb is not None  # holds what its frames refer to, as a notebook does
    else:
        function = infer_ranks.sleeps if how == "stops" else infer_ranks.fails_at
        run = begin(query, function, *[8_000 if how == "fails" else -1] * (how != "stops"))
        if how == "stops":
            wait_until(
                lambda: run.gang.snapshot().rows is not None and run.gang.snapshot().rows.in_flight
            )
            with pytest.raises(InferError, match=r"con.cursor\(\).sql"):
                begin(connection.sql("select 1 x"), infer_ranks.doubles)
            run.gang.stop()
        ended(run)
    assert connection.execute("select 1").fetchall() == [(1,)]


# ── set-up that is kept ──────────────────────────────────────────────────────────────────────────


def set_ups(log: Path) -> int:
    """Return how many ranks have run the cell."""
    return log.read_text().count("set up")


def is_dead(pid: int) -> bool:
    """Return whether none of the process's threads runs, so that its parent can reap it."""
    return not alive([pid]) and len(processes._threads(pid)) <= 1


def test_a_second_run_finds_its_ranks_set_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = ended(begin(frame(), infer_ranks.counted, str(log)))
    assert first.gang.state == "SUCCEEDED" and leaks.running_gangs() == []
    again = ended(begin(frame(2_000), infer_ranks.counted, str(log), batch_size=64))
    assert set_ups(log) == 2  # one for each rank
    # Not by the rows: one rank may have predicted all of the first frame.
    assert [rank.pid for rank in again.gang.ranks] == [rank.pid for rank in first.gang.ranks]
    assert list(again.result["y"]) == list(range(2_000))


def test_another_cell_or_file_is_set_up(tmp_path: Path) -> None:
    """Another cell, or one that has read a file that has changed since."""
    log, reads = tmp_path / "log", tmp_path / "reads"
    reads.write_text("2")

    def once(*args: Any) -> pd.DataFrame:
        return ended(begin(frame(300), infer_ranks.counted, str(log), *args, np=1)).result

    results = [once("", 1), once(str(reads))]
    reads.write_text("3")
    results.append(once(str(reads)))
    assert [result["y"][0] for result in results] == [1, 2, 3]
    assert len({result["pid"][0] for result in results}) == set_ups(log) == 3


def test_kept_ranks_end_with_one_of_them_or_before_another_gang(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = ended(begin(frame(), infer_ranks.counted, str(log))).result
    os.kill(first["pid"][0], signal.SIGKILL)
    wait_until(lambda: is_dead(first["pid"][0]))
    again = ended(begin(frame(), infer_ranks.counted, str(log)))
    assert set_ups(log) == 4
    assert list(again.result["y"]) == list(range(10_000))
    pids = {rank.pid for rank in again.gang.ranks}
    assert hm.launch(os.getpid, np=1).result not in pids
    assert not [pid for pid in pids if leaks.command(pid)]


def test_a_file_that_c_code_read_has_changed(tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    for number in (1, 2):
        reads.write_text(str(number))
        assert (
            ended(begin(frame(9), infer_ranks.offset_by_arrow, str(reads), np=1)).result["y"][0]
            == number
        )


def test_a_run_with_a_killed_rank_fails_and_keeps_nothing(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    run = ended(begin(frame(), infer_ranks.killed_once_at, 7_123, marker))
    with pytest.raises(RankFailedError, match="SIGKILL"):
        _ = run.result
    pids = {rank.pid for rank in run.gang.ranks if rank.pid is not None}
    assert not [pid for pid in pids if leaks.command(pid)]
    result = ended(begin(frame(), infer_ranks.killed_once_at, 7_123, marker)).result
    assert list(result["y"]) == [2 * x for x in range(10_000)]


@pytest.mark.parametrize("victim", ["rank", "agent"])
def test_a_death_that_is_reported_late_costs_nothing(tmp_path: Path, victim: str) -> None:
    """The report arrives when the next run, which gets new ranks, has begun."""
    log = tmp_path / "log"
    first = ended(begin(frame(500), infer_ranks.counted, str(log), np=1)).result
    pid = first["pid"][0]
    agent = int(Path(f"/proc/{pid}/stat").read_text().split()[3])
    has_begun = threading.Event()
    local_agents.hub().loop.call_soon_threadsafe(has_begun.wait)
    os.kill(pid if victim == "rank" else agent, signal.SIGKILL)
    wait_until(lambda: is_dead(pid))
    run = begin(frame(500), infer_ranks.counted, str(log), np=1)
    has_begun.set()
    assert list(ended(run).result["y"]) == list(range(500))
    assert set_ups(log) == 2
    assert sessions(), "the new ranks are not kept"
