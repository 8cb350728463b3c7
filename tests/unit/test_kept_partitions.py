"""Finished partitions of a resumed run: none is returned that no task has compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.spark.kept_partitions import KeptPartitions
from hydrogen_magic.inference.spark.run import SparkRun
from hydrogen_magic.node.prediction import partition_files
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


def opened(gang: str, *, resume: bool = True) -> KeptPartitions:
    """Return the partitions of a run that is recorded."""
    records.write(gang, records.launched(gang), records.ENDED)
    kept = KeptPartitions(PRINTS, resume=resume)
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


@pytest.mark.parametrize("on_error", ["fail", "collect"])
def test_a_value_that_spark_cannot_hold_is_not_just_missing(tmp_path: Path, on_error: str) -> None:
    path = tmp_path / "part"
    rows = pa.table({"y": pa.array([1, 2**63 + 5], pa.uint64()), "error": pa.nulls(2, pa.string())})
    list(partition_files.write(str(path), [rows]))
    of_spark = pa.schema({"y": pa.int64(), "error": pa.string()})
    schemas = {"columns": rows.schema, "of_spark": of_spark}
    config: dict[str, Any] = {name: each.serialize().to_pybytes() for name, each in schemas.items()}
    config |= {"kept": [], "options": {"on_error": on_error}}
    found = partition_files.read(str(path), config)
    if on_error == "fail":
        with pytest.raises(InferError, match="9223372036854775813 in column 'y'"):
            list(found)
    else:
        (batch,) = found
        assert batch["y"].to_pylist() == [1, None]
        assert batch["error"][0].as_py() is None and "which is bigint" in batch["error"][1].as_py()


@pytest.mark.parametrize("on_error", ["fail", "collect"])
def test_numbers_and_text_become_text_only_if_errors_are_collected(on_error: str) -> None:
    """If the first batch has no value, each task finds a type of its own."""
    kept = opened("aaaaaaaa", resume=False)
    finish(kept, 0, pa.nulls(10))
    finish(kept, 1)
    finish(kept, 2, ["a"] * 10)
    options = InferOptions(on_error=on_error)
    prepared: Any = SimpleNamespace(
        kept=[], session=None, options=options, from_parts=lambda added, paths: added
    )
    run = SparkRun(prepared, kept)
    if on_error == "fail":
        with pytest.raises(InferError, match=r"column 'y' as string, but as int64"):
            run.finished()
    else:
        assert run.finished().types == [pa.string()]
        assert run.widened == [("y", "int64", "string")]
