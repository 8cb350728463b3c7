"""``hm.dataset`` of Spark DataFrames: by Spark's tasks, and by the session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.views.row_progress import RowProgress
from tests.documented import covers
from tests.gangs import ended, wait_until
from tests.shards import are_all_numbers, read_here, rows_of
from tests.spark_gangs import busy

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("warm_agents")]

CLASSIC = pytest.param("classic", marks=pytest.mark.xdist_group("spark"))
CONNECT = pytest.param("connect", marks=pytest.mark.xdist_group("connect"))
CONNECT_TOO = pytest.param(
    "connect", marks=[pytest.mark.xdist_group("connect"), pytest.mark.exhaustive]
)


@pytest.fixture(params=[CLASSIC, CONNECT])
def spark(request: pytest.FixtureRequest) -> Any:
    """This process's session, classic or Connect."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all see, with a name that URLs write in another way."""
    folder = tmp_path / "shared ü 100%20"
    folder.mkdir()
    return folder


on_classic = pytest.mark.parametrize("spark", [CLASSIC], indirect=True)


@pytest.fixture(autouse=True)
def deleted_afterwards() -> Iterator[None]:
    yield
    folders.delete_all()


def numbers(spark: Any, n_rows: int = 1000) -> Any:
    return spark.range(0, n_rows, 1, 2).selectExpr(
        "id as x", "cast(id % 2 as int) as label", "array(cast(id as float), 1f) as vector"
    )


def check_here(rows: Any) -> None:
    assert [kind for _, kind in rows.columns[:2]] == ["int64", "int32"]
    batches = list(hm.shard(rows, batch_size=64).to_numpy())
    assert sorted(rows_of(batches)) == list(range(1000))
    assert all((batch["vector"][:, 0] == batch["x"]).all() for batch in batches)


@pytest.mark.parametrize("spark", [CONNECT], indirect=True)
def test_a_frame_of_connect_is_read_here(spark: Any, shared: Path) -> None:
    """By this process; ranks read what a classic session has written in the same way."""
    frame = numbers(spark).withColumnRenamed("label", "a.`b")
    for path in (None, shared):
        rows = hm.dataset(frame, path=path)
        check_here(rows)
        assert rows.columns[1][0] == "a.`b"
    assert hm.dataset(numbers(spark).toDF(*frame.columns), path=shared) is rows, "the same plan"


@pytest.mark.parametrize("spark", [CONNECT], indirect=True)
def test_a_frame_of_connect_has_the_rows_of_its_views_and_functions_now(spark: Any) -> None:
    """Spark analyses it at each use, also the frame of the earlier call."""
    from pyspark.sql.connect.functions import udf
    from pyspark.sql.types import LongType

    first = 0

    def frames() -> list[Any]:
        shifted = udf(lambda n: n + first, LongType())("id").alias("x")
        return [spark.sql("select id as x from rows"), spark.range(3).select(shifted)]

    def written(frames: list[Any]) -> list[DatasetHandle]:
        spark.range(first, first + 3).createOrReplaceTempView("rows")
        handles = [hm.dataset(frame) for frame in frames]
        found = [rows_of(hm.shard(rows).to_numpy()) for rows in handles]
        assert found == [[first, first + 1, first + 2]] * 2
        return handles

    spark.range(1).createOrReplaceTempView("rows")
    same = frames()
    of_view, _ = written(same)
    assert written(frames())[0] is of_view
    first = 10
    written(same)
    written(frames())
    spark.catalog.dropTempView("rows")
    assert hm.dataset(spark.range(10, 13).selectExpr("id as x")).n_rows == 3


@pytest.mark.parametrize("spark", [CLASSIC, CONNECT_TOO], indirect=True)
def test_ranks_read_a_frame(spark: Any, shared: Path) -> None:
    """Without a folder it comes to this machine, by Spark's tasks it goes to a shared one.

    Ranks train on it as on any other dataset (``tests/local/test_dataset.py``).
    """
    here, there = (hm.dataset(numbers(spark), path=path) for path in (None, shared))
    check_here(here)
    check_here(there)
    found = ended(hm.launch(read_here, there, np=2, on="spark", gpu=False)).results
    assert are_all_numbers(found, 1000) and [n_rows for n_rows, _, _ in found] == [500, 500]
    assert hm.dataset(numbers(spark), path=shared) is there, "the same plan"
    renamed = hm.dataset(numbers(spark).withColumnRenamed("x", "z"), path=shared)
    assert renamed.columns[0][0] == "z"
    renamed.delete()
    assert len(list(shared.iterdir())) == 1


@on_classic
def test_a_write_says_which_job_holds_all_slots(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with busy(spark, 4, tmp_path) as let_go:
        reasons: list[str] = []

        def waits_for(progress: RowProgress, reason: str) -> None:
            reasons.append(reason)
            if reason:
                let_go()

        monkeypatch.setattr(RowProgress, "waits_for", waits_for)
        assert hm.dataset(numbers(spark)).n_rows == 1000
    assert any("holds 4 slots" in reason for reason in reasons)


@pytest.mark.exhaustive
@on_classic
def test_a_frame_is_written_again_on_request(spark: Any, shared: Path) -> None:
    rows = hm.dataset(numbers(spark, 9), path=shared)
    assert hm.dataset(numbers(spark, 10), path=shared) is not rows, "another plan"
    again = hm.dataset(numbers(spark, 9), path=shared, reuse=False)
    assert again is not rows and hm.dataset(numbers(spark, 9), path=shared) is again
    with hm.dataset(numbers(spark, 9), path=shared):
        """It has its rows from another cell, which still needs them."""
    assert any(Path(again.path).glob("*.parquet"))
    for file in Path(rows.path).glob("*.parquet"):
        file.unlink()
    assert hm.dataset(numbers(spark, 9), path=shared).n_rows == 9


@pytest.mark.exhaustive
@on_classic
def test_a_failed_write_leaves_nothing(spark: Any, shared: Path, hydrogen_home: Path) -> None:
    broken = numbers(spark).selectExpr("assert_true(x < 900) as a", "x")
    for path in (None, shared):
        with pytest.raises(HydrogenError, match=r"^hm\.dataset\(\): "):
            hm.dataset(broken, path=path)
        with pytest.raises(ValueError, match="got a frame without rows"):
            hm.dataset(numbers(spark, 0), path=path)
        assert list((hydrogen_home / "datasets").iterdir()) == list(shared.iterdir()) == []


@pytest.mark.exhaustive
@on_classic
def test_an_interrupted_write_leaves_nothing(spark: Any, shared: Path) -> None:
    """Its job is cancelled first, whose tasks would write on."""
    from _thread import interrupt_main

    session = sessions.of(spark.range(1))

    def interrupt() -> None:
        wait_until(lambda: any(shared.glob("*/_temporary/**/*.parquet")))
        interrupt_main()

    slow = spark.range(0, 1 << 34, 1, 2).selectExpr("id", "uuid() as text")
    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        hm.dataset(slow, path=shared)
    helper.join()
    assert list(shared.iterdir()) == []
    tracker = session.spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds())  # its state lags behind


@covers("""`petastorm.spark.converter.fileAvailabilityWaitTimeoutSecs`""")
@pytest.mark.exhaustive
@on_classic
def test_executors_that_write_to_their_own_disks(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = (tmp_path / "disk-of-an-executor").as_uri()
    monkeypatch.setattr(
        "hydrogen_magic.driver.datasets.spark._path_for_spark", lambda folder: elsewhere
    )
    with pytest.raises(
        HydrogenError, match=r"written 1,000 rows to .* sees 0 there: path= has to be"
    ):
        hm.dataset(numbers(spark), path=tmp_path / "shared")


@covers("""`df.selectExpr("toArray(features) AS features")` for vectors of MLlib""")
@pytest.mark.exhaustive
@on_classic
def test_vectors_and_unsupported_columns(spark: Any) -> None:
    from pyspark.ml.linalg import Vectors

    frame = spark.createDataFrame([(1, Vectors.dense([1.0, 2.0]))], ["x", "v"])
    (batch,) = hm.shard(hm.dataset(frame)).to_numpy()
    assert batch["v"].tolist() == [[1.0, 2.0]] and rows_of([batch]) == [1]
    with pytest.raises(TypeError, match=r"hm\.dataset\(\): column 'gap' has type interval"):
        hm.dataset(spark.sql("select make_interval(1) as gap"))
    with pytest.raises(TypeError, match="the DataFrame has more than one column 'a': rename one"):
        hm.dataset(spark.sql("select 1 as a, 2 as a"))


@on_classic
def test_variants_have_the_same_layout_with_a_path(spark: Any, shared: Path) -> None:
    """Spark's writer puts the values of a variant into columns of their own by default."""
    frame = spark.sql("""select parse_json('{"a": 1}') v""")
    found = [hm.shard(hm.dataset(frame, path=path)).to_arrow() for path in (None, shared)]
    (own,), (written,) = found
    assert own.to_pylist() == written.to_pylist() and own.to_pylist()[0]["v"]["value"]


@on_classic
def test_timestamps_keep_their_time_zone(spark: Any, shared: Path) -> None:
    frame = spark.sql("select timestamp'2024-03-10 01:30:00 UTC' t, timestamp_ntz'2024-03-10' n")
    option = "spark.sql.parquet.outputTimestampType"
    before = spark.conf.get(option)
    for path in (None, shared):
        (table,) = hm.shard(hm.dataset(frame, path=path)).to_arrow()
        assert (table.schema.field("t").type.tz is None, table.schema.field("n").type.tz) == (
            False,
            None,
        )
        (row,) = table.to_pylist()
        assert row["t"] == datetime(2024, 3, 10, 1, 30, tzinfo=timezone.utc)
        assert row["n"] == datetime(2024, 3, 10)
    assert spark.conf.get(option) == before
