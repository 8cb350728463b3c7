"""Finished partitions of a resumed run: none is returned that no task has compared."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.spark import cached_runs
from hydrogen_magic.inference.spark import gang as spark_gang
from hydrogen_magic.inference.spark.cached_runs import CachedRun
from hydrogen_magic.inference.spark.kept_partitions import KeptPartitions
from hydrogen_magic.inference.spark.prepared import _has_hash
from hydrogen_magic.inference.spark.run import SparkRun
from hydrogen_magic.node.prediction import partition_files
from hydrogen_magic.node.prediction.arrow_types import without_nulls
from hydrogen_magic.node.prediction.ddl import spark_schema
from hydrogen_magic.node.prediction.options import InferOptions
from tests import records

PRINTS = {"the cell": "a", "the frame's columns": "c"}


def finish(kept: KeptPartitions, number: int, *streams: Any) -> None:
    """Write a partition of ten rows, as a task does; ``streams``: the values of each, by default of one."""
    said = kept.instructions()
    path = Path(said["folder"], said["rows"], f"{number}.incomplete")
    tables = [pa.table({"y": values}) for values in streams or (range(10),)]
    place = max(partition_files.write(str(path), tables))
    path.rename(path.with_name(f"{number}.10.{number:016x}.{place}.part"))


def compare(kept: KeptPartitions, number: int) -> None:
    """Accept a partition of the earlier run, as a task does."""
    said = kept.instructions()
    folder, name = Path(said["folder"]), said["done"][number]
    (folder / said["earlier"] / name).rename(folder / said["rows"] / name)


def opened(gang: str, *, resume: bool = True, on_error: str = "fail") -> KeptPartitions:
    """Return the partitions of a run that is recorded."""
    records.write(gang, records.launched(gang), records.ENDED)
    kept = KeptPartitions({**PRINTS, "--on-error": on_error}, resume=resume)
    kept.open(gang)
    return kept


def numbers(parts: list[partition_files.Part]) -> list[int]:
    return [part.number for part in parts]


@pytest.fixture
def resumed() -> KeptPartitions:
    first = opened("aaaaaaaa", resume=False)
    finish(first, 0)
    finish(first, 1)
    return opened("bbbbbbbb")


def test_only_compared_partitions_are_returned(resumed: KeptPartitions) -> None:
    assert (numbers(resumed.parts()), numbers(resumed.earlier())) == ([], [0, 1])
    compare(resumed, 1)
    finish(resumed, 2)
    assert numbers(resumed.parts()) == [1, 2]
    text = resumed.end_text()
    assert text.startswith(
        "30 rows in 3 partitions are finished and kept: run the cell with --resume"
    )
    assert "(10 rows in 1 partition were not yet compared" in text
    third = opened("cccccccc")
    assert (numbers(third.parts()), numbers(third.earlier())) == ([], [0, 1, 2])


def test_a_partition_that_two_tasks_have_finished_counts_once(resumed: KeptPartitions) -> None:
    """Their files have different names, since batches that are sized by time end elsewhere."""
    finish(resumed, 2, range(3), [0.0] * 7)
    finish(resumed, 2, range(4), [0.0] * 6)
    assert numbers(resumed.parts()) == [2] and len(resumed.linked()) == 1
    names = [path.name for path in (resumed.folder / "rows").iterdir()]
    assert len(names) == 2
    for name in names:
        resumed.use([name])
        assert [part.path.name for part in resumed.parts()] == [name]
    third = opened("cccccccc")
    assert (numbers(third.parts()), numbers(third.earlier())) == ([], [0, 1, 2])


def test_a_changed_frame_leaves_what_the_earlier_run_has_finished(resumed: KeptPartitions) -> None:
    compare(resumed, 1)
    finish(resumed, 2)
    resumed.undo()
    assert (numbers(resumed.parts()), numbers(resumed.earlier())) == ([], [0, 1])
    with pytest.raises(FileNotFoundError):  # a task that Spark has not ended yet
        finish(resumed, 3)


def test_without_a_shared_disk_an_earlier_run_stays(resumed: KeptPartitions) -> None:
    resumed.give_up()
    assert numbers(resumed.earlier()) == [0, 1]
    resumed.delete()
    assert numbers(resumed.earlier()) == []


def test_a_run_that_succeeds_after_the_disk_was_full_deletes_the_earlier_partitions(
    resumed: KeptPartitions,
) -> None:
    resumed.give_up()
    group: Any = SimpleNamespace(
        _now_s=float,
        _report_disk=lambda now_s, sink: None,
        _emit=lambda sink, events: None,
        _progress=SimpleNamespace(end=lambda now_s, n_rows: []),
        _run=SimpleNamespace(kept=None, widened=[], n_rows=10),
        _kept=resumed,
        _prints=PRINTS,
        _is_stopped=False,
        _n_ranks=0,
    )
    job: Any = SimpleNamespace(exception=lambda: None, result=lambda: "the result")
    sink: Any = None
    spark_gang.TaskAgentGroup._end(group, job, sink)
    assert group.value == "the result" and not resumed.folder.exists()


def test_a_run_in_sparks_cache_is_continued_where_executors_share_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They could not write to it, since it was full."""
    prints = {**PRINTS, "--on-error": "fail"}
    run = CachedRun("aaaaaaaa", prints, None, "app")
    monkeypatch.setattr(cached_runs, "_runs", [run])
    monkeypatch.setattr(spark_gang, "_without_shared_disk", set())
    assert spark_gang._kept(prints, "app", resume=True) == (None, run)
    changed = {**prints, "the cell": "b"}
    for found in (
        spark_gang._kept(prints, "app", resume=False),
        spark_gang._kept(prints, "another app", resume=True),
        spark_gang._kept(changed, "app", resume=True),
    ):
        assert isinstance(found[0], KeptPartitions) and found[1] is None
    spark_gang._without_shared_disk.add("app")
    with pytest.raises(InferError, match="but the cell changed since"):
        spark_gang._kept(changed, "app", resume=True)


def test_a_run_without_a_folder_gives_up_nothing() -> None:
    """Its disk was full when it began."""
    KeptPartitions(PRINTS, resume=False).give_up()


def test_a_disk_that_gets_full_is_told_from_a_cell_that_fails(tmp_path: Path) -> None:
    path = str(tmp_path / "part")
    rows = pa.table({"y": range(10_000)})
    with records.disk_full_at(1000), pytest.raises(InferError, match=partition_files.NOT_KEPT):
        list(partition_files.write(path, [rows]))

    def fails() -> Iterator[pa.Table]:
        yield rows
        raise OSError(28, "No space left on the cell's own disk")

    with pytest.raises(OSError, match="the cell's own disk"):
        list(partition_files.write(path, fails()))


def test_the_last_stream_says_whether_values_are_known(tmp_path: Path) -> None:
    """By the metadata of the schema alone."""
    unknown = pa.schema([pa.field("y", pa.float64(), metadata={"known": "no"})])
    tables = [pa.table({"y": [float("nan")]}, unknown), pa.table({"y": [0.5]})]
    finish_as = tmp_path / "0.2.0.PLACE.part"
    place = max(partition_files.write(str(finish_as), tables))
    finish_as.rename(tmp_path / f"0.2.0.{place}.part")
    (part,) = partition_files.found(tmp_path)
    assert part.schema.field("y").metadata is None


def test_a_changed_frame_leaves_the_options_of_the_earlier_run() -> None:
    finish(opened("aaaaaaaa", resume=False), 0)
    opened("bbbbbbbb", on_error="collect").undo()
    assert numbers(opened("cccccccc").earlier()) == [0]


@pytest.mark.parametrize("on_error", ["fail", "null", "collect"])
def test_a_value_that_spark_cannot_hold_is_not_just_missing(tmp_path: Path, on_error: str) -> None:
    path = tmp_path / "part"
    rows = pa.table({"y": pa.array([1, 2**63 + 5], pa.uint64()), "error": pa.nulls(2, pa.string())})
    list(partition_files.write(str(path), [rows]))
    of_spark = pa.schema({"y": pa.int64(), "error": pa.string()})
    schemas = {"columns": rows.schema, "of_spark": of_spark}
    config: dict[str, Any] = {name: each.serialize().to_pybytes() for name, each in schemas.items()}
    config |= {"kept": [], "options": {"on_error": on_error}}
    found = partition_files.read(str(path), config)
    if on_error != "collect":
        with pytest.raises(InferError, match="9223372036854775813 in column 'y'") as raised:
            list(found)
        assert ("--resume --on-error collect" in str(raised.value)) == (on_error == "fail")
    else:
        (batch,) = found
        assert batch["y"].to_pylist() == [1, None]
        assert batch["error"][0].as_py() is None and "which is bigint" in batch["error"][1].as_py()


@pytest.mark.parametrize("on_error", ["fail", "null", "collect"])
def test_numbers_and_text_become_text_only_if_errors_are_collected(on_error: str) -> None:
    """If the first batch has no value, each task finds a type of its own."""
    kept = opened("aaaaaaaa", resume=False, on_error=on_error)
    finish(kept, 0, pa.nulls(10))
    finish(kept, 1)
    finish(kept, 2, ["a"] * 10)
    options = InferOptions(on_error=on_error)
    prepared: Any = SimpleNamespace(
        kept=[], session=None, options=options, from_parts=lambda added, paths: added
    )
    run = SparkRun(prepared, kept)
    if on_error != "collect":
        with pytest.raises(InferError, match=r"column 'y' as string, but as int64") as raised:
            run.finished()
        assert ("--resume and --on-error collect" in str(raised.value)) == (on_error == "fail")
        assert "--schema" not in str(raised.value)
    else:
        assert run.finished() == pa.schema({"y": pa.string(), "error": pa.string()})
        assert run.widened == [("y", "int64", "string")]


def test_a_run_that_a_type_has_ended_goes_on_if_errors_are_collected() -> None:
    """Also a second time, and not back."""
    first = opened("aaaaaaaa", resume=False)
    finish(first, 0)
    resumed = opened("bbbbbbbb", on_error="collect")
    finish(resumed, 1, ["a"] * 10)
    again = opened("cccccccc", on_error="collect")
    assert numbers(again.earlier()) == [0, 1]
    assert again.predicted([], as_text=True) == pa.schema({"y": pa.string(), "error": pa.string()})
    with pytest.raises(InferError, match="but --on-error changed since"):
        opened("dddddddd")


YEAR_9999, FAR_S = dt.datetime(9999, 1, 2), 10**13
STRUCT = pa.struct({"a": pa.int64(), "b": pa.list_(pa.int64())})
BIG, HUGE, SMALL = (decimal.Decimal(text) for text in (f"1{'0' * 37}", f"1{'0' * 74}", "0.01"))


@pytest.mark.parametrize(
    ("streams", "kind", "values"),
    [
        (([1], pa.array([2], pa.uint64())), pa.int64(), [1, 2]),
        (([1], pa.array([2**63 + 5], pa.uint64())), pa.string(), ["1", f"{2**63 + 5}"]),
        ((pa.array([2**63 + 5], pa.uint64()),), pa.decimal128(20, 0), [2**63 + 5]),
        (([2**53 + 1], [0.5]), pa.float64(), [2.0**53, 0.5]),
        (
            (pa.array([0], pa.timestamp("ns")), pa.array([YEAR_9999], pa.timestamp("us"))),
            pa.timestamp("us"),
            [dt.datetime(1970, 1, 1), YEAR_9999],
        ),
        (
            (pa.array([0, FAR_S], pa.timestamp("s")),),
            pa.string(),
            ["1970-01-01 00:00:00", f"<value out of range: {FAR_S}>"],
        ),
        (
            (pa.array([BIG], pa.decimal128(38, 0)), pa.array([SMALL], pa.decimal128(38, 2))),
            pa.string(),
            [f"{BIG}", "0.01"],
        ),
        (([HUGE],), pa.string(), [f"{HUGE}"]),
        (([None], pa.array([1500], pa.time64("us"))), pa.string(), [None, "00:00:00.001500"]),
        ((pa.array([1500], pa.duration("ns")),), pa.duration("us"), [dt.timedelta(0, 0, 1)]),
        (
            (pa.array([[0]], pa.list_(pa.time32("s"))), [["a"]]),
            pa.string(),
            ["[datetime.time(0, 0)]", "['a']"],
        ),
        (([True], [1.5]), pa.float64(), [1.0, 1.5]),
        (([{"a": 1}], [{"b": [2]}]), STRUCT, [{"a": 1, "b": None}, {"a": None, "b": [2]}]),
    ],
)
def test_if_errors_are_collected_no_type_is_one(streams: Any, kind: Any, values: Any) -> None:
    """The values of each stream are those of one partition."""
    kept = opened("aaaaaaaa", resume=False)
    for number, stream in enumerate(streams):
        finish(kept, number, stream)
    options = InferOptions(on_error="collect")
    prepared: Any = SimpleNamespace(
        kept=[], session=None, options=options, from_parts=lambda *given: given
    )
    added, paths = SparkRun(prepared, kept).finished()
    stored = spark_schema(without_nulls(added), as_text=True)
    assert stored == pa.schema({"y": kind, "error": pa.string()})
    config = {"kept": [], "options": asdict(options), "of_spark": stored.serialize().to_pybytes()}
    rows = [
        row
        for path in paths
        for each in partition_files.read(path, config)
        for row in each.to_pylist()
    ]
    assert {row["error"] for row in rows} == {None}
    assert [row["y"] for row in rows] == values


def test_a_partition_may_have_values_that_do_not_fit_its_last_type() -> None:
    kept = opened("aaaaaaaa", resume=False)
    finish(kept, 0, pa.array([2**63 + 5], pa.uint64()), [1])
    assert kept.predicted([], as_text=False).types == [pa.int64()]
    assert kept.predicted([], as_text=True).field("y").type == pa.string()


def test_spark_hashes_what_it_can() -> None:
    text = types.StringType()
    attributes = types.StructType([types.StructField("map", types.MapType(text, text))])
    named = types.StructType([types.StructField("variant_id", types.LongType())])
    assert _has_hash(text) and _has_hash(types.ArrayType(named))
    kinds = [types.ArrayType(attributes), types.VariantType()]
    if hasattr(types, "GeometryType"):  # from Spark 4.1 on
        kinds.append(types.GeometryType(0))
    assert not any(map(_has_hash, kinds))
