"""``hm.dataset``: frames that are written once, travel as a handle, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hydrogen_magic as hm
from hydrogen_magic.driver import kernel_end
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.node import data_files
from hydrogen_magic.views.row_progress import RowProgress
from tests import dataset_ranks
from tests.documented import covers
from tests.gangs import ended, failure_of, wait_until
from tests.shards import rows_of, write_parquet

pa = pytest.importorskip("pyarrow")


def frame(n_rows: int = 100) -> pd.DataFrame:
    numbers = np.arange(n_rows)
    columns = {"x": numbers, "y": numbers / 2, "vector": list(np.ones((n_rows, 3), np.float32))}
    return pd.DataFrame(columns, index=[f"row {n}" for n in numbers])


@pytest.fixture
def datasets(hydrogen_home: Path) -> Iterator[Callable[[], list[str]]]:
    """Return the datasets that exist; what a test leaves is deleted, as at the end of a process."""
    yield lambda: [record.name for record in (hydrogen_home / "datasets").glob("*")]
    folders.delete_all()


# ── on ranks ─────────────────────────────────────────────────────────────────────────────────────


@covers(
    """
    `with converter.make_torch_dataloader(batch_size=BATCH_SIZE) as loader`
    `cur_shard=hvd.rank(), shard_count=hvd.size()`
    `num_epochs=1`
    `num_epochs=None`, `steps_per_epoch = len(converter) // (BATCH_SIZE * hvd.size())`
    `transform_spec=TransformSpec(transform_row, edit_fields=…, selected_fields=…)`
    `StreamingDataset(local=…, remote=…, batch_size=64, shuffle=True)`
    """
)
def test_ranks_train_on_a_frame(datasets: Callable[[], list[str]]) -> None:
    with hm.dataset(frame(101)) as rows:
        assert len(pickle.dumps(rows)) < 1_000
        results = ended(hm.launch(dataset_ranks.train, rows, np=2)).results
        assert len(datasets()) == 1
    assert datasets() == []
    assert [length for length, _, _ in results] == [7, 7]
    for epoch in (1, 2):
        assert sorted({row for found in results for row in found[epoch]}) == list(range(101))
        assert sum(len(found[epoch]) for found in results) == 102
    assert results[0][1] != results[0][2], "another order in each epoch"


def test_an_attempt_continues_in_the_epoch(
    tmp_path: Path, datasets: Callable[[], list[str]]
) -> None:
    gang = ended(
        hm.launch(dataset_ranks.fail_once, hm.dataset(frame(100)), tmp_path, np=2, retries=1)
    )
    before = [int(x) for file in tmp_path.glob("seen-?") for x in file.read_text().split()]
    after = [x for found in gang.results for x in found]
    assert (len(before), len(after)) == (48, 52)
    assert sorted(before + after) == list(range(100))


def test_ranks_without_a_handle(tmp_path: Path, datasets: Callable[[], list[str]]) -> None:
    rows = hm.dataset(frame())
    copy = pickle.loads(pickle.dumps(rows))
    rows.delete()
    with pytest.raises(
        FileNotFoundError, match=r"does not exist on this host .*path=…\) with a folder"
    ):
        hm.shard(copy)
    ds = pytest.importorskip("pyarrow.dataset")
    frame().to_parquet(tmp_path / "rows.parquet")
    whole = ds.dataset(tmp_path / "rows.parquet")  # whose module a rank has not imported
    assert ended(hm.launch(dataset_ranks.length, whole, np=1)).result == 100
    error = failure_of(hm.launch(hm.dataset, frame(), np=1))
    assert "hm.dataset() writes a frame of the notebook: call it there" in str(error)


# ── frames ───────────────────────────────────────────────────────────────────────────────────────


def polars() -> Any:
    return pytest.importorskip("polars").DataFrame({"x": range(100)})


FRAMES: dict[str, Callable[[], Any]] = {
    "pandas": frame,
    "polars": polars,
    "polars lazy": lambda: polars().lazy(),
    "arrow": lambda: pa.table({"x": range(100)}),
    "reader": lambda: pa.table({"x": range(100)}).to_reader(max_chunksize=7),
}


@covers(
    """
    `from petastorm.spark import SparkDatasetConverter, make_spark_converter`
    `converter = make_spark_converter(df)`
    `len(converter)`
    `converter.delete()`
    """
)
@pytest.mark.parametrize("kind", FRAMES)
def test_frames(kind: str, datasets: Callable[[], list[str]]) -> None:
    rows = hm.dataset(FRAMES[kind]())
    assert rows.n_rows == 100 and rows.columns[0] == ("x", "int64")
    assert rows_of(hm.shard(rows)) == list(range(100))
    rows.delete()
    rows.delete()
    assert datasets() == []


def test_a_frame_of_pandas_keeps_its_values(datasets: Callable[[], list[str]]) -> None:
    values = frame(3)
    values["gap"] = [1.0, np.nan, 3.0]
    values["image"] = [np.full((2, 4), n, np.uint8) for n in range(3)]
    rows = hm.dataset(values)
    names = ["x", "y", "vector", "gap", "image"]
    assert [name for name, _ in rows.columns] == names, "without its index"
    (batch,) = hm.shard(rows).to_numpy()
    assert batch["vector"].shape == (3, 3)
    assert np.array_equal(batch["image"], np.stack(values["image"]))
    assert np.array_equal(batch["gap"], [1.0, np.nan, 3.0], equal_nan=True)


@covers("""`parquet_row_group_size_bytes=32000000`, `compression_codec="snappy"`""")
def test_row_groups_are_small(datasets: Callable[[], list[str]]) -> None:
    """So that ranks read few rows of others, and a shuffle mixes many."""
    rows = hm.dataset(pa.table({"x": np.arange(3_000_000)}))
    file = pytest.importorskip("pyarrow.parquet").ParquetFile(Path(rows.path) / "rows.parquet")
    groups = [file.metadata.row_group(n) for n in range(file.num_row_groups)]
    assert sum(group.num_rows for group in groups) == 3_000_000
    assert max(group.total_byte_size for group in groups) < 16 << 20


def test_files_that_are_not_parquet(tmp_path: Path, datasets: Callable[[], list[str]]) -> None:
    frame().to_csv(tmp_path / "rows.csv")
    for read in (hm.dataset, hm.shard):
        with pytest.raises(
            ValueError, match=r"rows\.csv cannot be read as Parquet .*hm\.dataset\(pd\."
        ):
            read(tmp_path / "rows.csv")


def test_what_is_no_frame(datasets: Callable[[], list[str]]) -> None:
    with pytest.raises(
        TypeError, match=r"^hm\.dataset\(\) expects a DataFrame, got a dict"
    ) as error:
        hm.dataset({"x": [1]})
    assert "or Parquet data" in str(error.value) and "CSV" not in str(error.value)
    interval = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    for values in (interval, pa.array([[(1, 2, 3)]], pa.list_(interval.type))):
        with pytest.raises(
            TypeError, match=r"column 'y' is .*_interval.* Parquet does not have: cast"
        ):
            hm.dataset(pa.table({"x": [1], "y": values}))
    with pytest.raises(ValueError, match="without rows"):
        hm.dataset(pa.table({"x": pa.array([], pa.int64())}))
    assert datasets() == []


# ── places ───────────────────────────────────────────────────────────────────────────────────────


@covers(
    """
    `spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "file:///dbfs/…")`
    `petastorm.spark.converter.parentCacheDirUrl` in the cluster's configuration
    `dbutils.fs.mkdirs(work_dir)`
    `dataframe_to_mds(df, merge_index=True, mds_kwargs={'out': folder, 'columns': …})`
    `MDSWriter(out=folder, columns={'x': 'ndarray', 'label': 'int'})`
    `'compression': 'zstd'`, `'hashes': ['sha1']` of `mds_kwargs`
    `udf_iterable=…`, a preprocessing function
    """
)
def test_a_folder_of_the_user(tmp_path: Path, datasets: Callable[[], list[str]]) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "notes").touch()
    rows = hm.dataset(frame()[["x", "vector"]], path=tmp_path / "shared")
    assert Path(rows.path).parent == tmp_path / "shared"
    assert [name for name, _ in rows.columns] == ["x", "vector"]
    assert rows_of(hm.shard(rows)) == list(range(100))
    rows.delete()
    assert [file.name for file in (tmp_path / "shared").iterdir()] == ["notes"]


def test_an_object_store(datasets: Callable[[], list[str]]) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    with hm.dataset(frame(), path="memory://lake/tmp") as rows:
        assert rows_of(hm.shard(rows)) == list(range(100))
    assert memory.find("/lake") == []
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def test_data_that_is_there_already(tmp_path: Path, datasets: Callable[[], list[str]]) -> None:
    file = tmp_path / "rows.parquet"
    frame().to_parquet(file)
    with hm.dataset(file) as rows:
        assert rows_of(hm.shard(rows)) == list(range(100))
    assert file.exists() and datasets() == []
    frame(50).to_parquet(file)
    with pytest.raises(RuntimeError, match="has 50 rows on this host, but had 100"):
        hm.shard(rows)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        hm.dataset(tmp_path / "nowhere")
    frame(0).to_parquet(file)
    with pytest.raises(ValueError, match="without rows"):
        hm.dataset(file)


def test_a_list_of_data_that_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "data")
    rows = hm.dataset(["data/year=2025", Path("data/year=2026/*.parquet")])
    monkeypatch.chdir("/")
    assert (rows.n_rows, rows.columns[-1]) == (23, ("year", "int32"))
    assert repr(rows).endswith(f"{tmp_path}/data/year=2025 and 1 more>")
    assert rows_of(hm.shard(pickle.loads(pickle.dumps(rows)))) == list(range(23))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        hm.dataset([tmp_path / "data", tmp_path / "nowhere"])
    with pytest.raises(TypeError, match=r"expects a DataFrame, got a list"):
        hm.dataset([frame(), tmp_path / "data"])


# ── failures and ends ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_private", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("broken"), "^broken$"),
        (
            OSError(errno.ENOSPC, "full"),
            r"does not fit into {}, where .* are free\. .* path=folder",
        ),
        (KeyboardInterrupt("stopped"), "stopped"),
    ],
    ids=repr,
)
def test_a_write_that_fails_leaves_nothing(
    error: BaseException,
    said: str,
    is_private: bool,
    hydrogen_home: Path,
    tmp_path: Path,
    datasets: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add(progress: RowProgress, n_rows: int) -> None:
        assert list(parent.glob("*/rows.parquet" if path else "*/*/rows.parquet")), "it has begun"
        raise error

    path = None if is_private else tmp_path / "shared"
    parent = path or hydrogen_home / "datasets"
    monkeypatch.setattr(RowProgress, "add", add)
    with pytest.raises(type(error), match=said.format(re.escape(str(parent)))):
        hm.dataset(frame(), path=path)
    assert list(parent.iterdir()) == [] and datasets() == []


def _no_space(progress: RowProgress, n_rows: int) -> None:
    raise OSError("No space left")


def test_a_write_that_fails_frees_the_connection(
    datasets: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = pytest.importorskip("duckdb").connect()

    monkeypatch.setattr(RowProgress, "add", _no_space)
    with pytest.raises(OSError, match="No space") as shown:  # holds what its frames refer to
        hm.dataset(connection.sql("select range x, repeat('t', 1000) t from range(50_000)"))
    assert shown.tb is not None and connection.execute("select 1").fetchall() == [(1,)]


def test_a_forked_child_leaves_the_data_to_its_parent(datasets: Callable[[], list[str]]) -> None:
    hm.dataset(frame())
    child = os.fork()
    if not child:
        folders.delete_all()  # as at its exit
        os._exit(0)
    os.waitpid(child, 0)
    assert len(datasets()) == 1


@pytest.fixture
def unreachable(
    datasets: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that makes a store fail with an error, or with None answer again."""
    deleted = data_files.delete_folder

    def fail(error: Exception | None) -> None:
        def delete(path: str) -> None:
            if data_files.is_url(path) and error is not None:
                raise error
            deleted(path)

        monkeypatch.setattr(data_files, "delete_folder", delete)

    return fail


def test_an_owner_deletes_data_elsewhere_before_it_ends(datasets: Callable[[], list[str]]) -> None:
    """Of a notebook that has ended: the owner of a gang that outlived it was the last to need it."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    rows = hm.dataset(frame(), path="memory://lake/tmp")
    with folders.kept([str(rows.path)]):
        folders._forget()
        folders.prune(waits=True)
        assert memory.find("/lake") and len(datasets()) == 1
    assert memory.find("/lake") == [] and datasets() == []


@pytest.mark.parametrize(
    "error", [ImportError("adlfs"), OSError(), pa.ArrowException(), ValueError()]
)
def test_a_store_that_does_not_answer_delays_nothing_else(
    error: Exception,
    datasets: Callable[[], list[str]],
    unreachable: Callable[..., Any],
    hydrogen_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    rows = hm.dataset(frame(), path="memory://lake/tmp")
    here = hm.dataset(frame())
    unreachable(error)
    with pytest.raises(type(error)):
        rows.delete()
    folders.delete_all()  # as at the end of a process
    assert len(datasets()) == 1 and not os.path.exists(str(here.path))
    folders._forget()
    (hydrogen_home / "datasets" / "stray").touch()
    kernel_end.clean_up_abandoned()
    hm.dataset(frame()).delete()
    assert len(datasets()) == 2 and memory.find("/lake")
    monkeypatch.setattr(RowProgress, "add", _no_space)
    with pytest.raises(OSError, match="No space left"):
        hm.dataset(frame(), path="memory://lake/tmp")
    folders.delete_all()
    folders._forget()
    assert len(datasets()) == 3
    with pytest.raises((ImportError, OSError)):
        hm.dataset(frame(), path="s4://lake/tmp")
    assert len(datasets()) == 3, "nothing can be there"
    unreachable(None)

    def is_clean() -> bool:
        kernel_end.clean_up_abandoned()  # again: a thread of an earlier call may still run
        return datasets() == ["stray"]

    wait_until(is_clean)
    assert not memory.find("/lake")


def wait_for_pruning() -> None:
    for thread in threading.enumerate():
        if thread.name == "hydrogen_magic datasets":
            thread.join()


WRITES = """
import sys
import pyarrow as pa
import hydrogen_magic as hm
hm.dataset(pa.table({"x": range(9)}), path=sys.argv[1])
hm.dataset(pa.table({"x": range(9)}))
print("written", flush=True)
sys.stdin.read()
"""


def test_a_process_leaves_nothing(tmp_path: Path, datasets: Callable[[], list[str]]) -> None:
    """At its end; and if it is killed, until the next one writes a dataset, or can start gangs."""
    shared = tmp_path / "shared"

    def started() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITES, str(shared)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert "written\n" in process.stdout, "maybe after a line of progress"
        return process

    with started() as first, started() as second, started() as third:
        assert len(datasets()) == 6
        first.communicate()
        assert len(datasets()) == 4
        ends: list[Callable[[], Any]] = [lambda: hm.dataset(frame()).delete()]
        ends.append(kernel_end.clean_up_abandoned)
        for n_left, process, clean_up in zip((2, 1), (second, third), ends, strict=True):
            clean_up()
            wait_for_pruning()
            assert len(datasets()) == 2 * n_left, "those of processes that run"
            process.kill()
            process.wait()
            assert len(datasets()) == len(list(shared.iterdir())) * 2 == 2 * n_left
            clean_up()
            wait_for_pruning()
            assert len(datasets()) == len(list(shared.iterdir())) * 2 == 2 * (n_left - 1)
