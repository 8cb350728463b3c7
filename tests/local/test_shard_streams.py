"""``hm.shard`` of Parquet data in batches: a stream, whose thread reads ahead."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import Counter
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hydrogen_magic as hm
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.data import batch_kinds, parquet_shard, parquet_stream
from tests.documented import covers
from tests.shards import parts, rows_of, write_parquet

pq = pytest.importorskip("pyarrow.parquet")
pa = pytest.importorskip("pyarrow")


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_parquet(tmp_path / "data")


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mix two row groups at a time, so that a few rows make several pools."""
    monkeypatch.setattr(parquet_shard, "_POOL_ROWS", 1)
    monkeypatch.setattr(parquet_shard, "_POOL_GROUPS", 2)


# ── which rows ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("small_pools")
@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_every_row_once_in_equally_many_batches(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the sizes are; and a stream that continues yields what was left."""
    world_size = data.draw(st.integers(1, 5))
    n_rows = data.draw(st.integers(world_size, 60))
    group_rows = data.draw(st.integers(1, 80))  # there may be fewer row groups than ranks
    options: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, 20)),
        "shuffle": data.draw(st.booleans()),
        "drop_last": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 3)),
    }
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table({"x": range(n_rows)}), file, row_group_size=group_rows)
    ranks = parts(str(file), world_size, **options)
    batches = [list(rank) for rank in ranks]
    assert {len(each) for each in batches} == {len(ranks[0])}
    assert all(len(batch) == options["batch_size"] for each in batches for batch in each[:-1])
    seen = Counter(row for each in batches for row in rows_of(each))
    n_left = n_rows % world_size
    if options["drop_last"]:
        assert set(seen.values()) == {1}
        assert len(seen) == n_rows - n_left
    else:
        assert set(seen) == set(range(n_rows))
        assert sum(seen.values()) - n_rows == (world_size - n_left if n_left else 0)

    n_done = data.draw(st.integers(0, len(ranks[0])))
    rank = data.draw(st.integers(0, world_size - 1))
    _take(ranks[0], n_done)
    resumed = parts(str(file), world_size, **options)[rank]
    resumed.load_state_dict(pickle.loads(pickle.dumps(ranks[0].state_dict())))
    assert rows_of(resumed) == rows_of(batches[rank][n_done:]), "by the state of rank 0"
    assert rows_of(resumed) == rows_of(batches[rank]), "the next time it begins at the start"


def _take(stream: Any, n_batches: int) -> None:
    batches = iter(stream)
    for _ in range(n_batches):
        next(batches)
    batches.close()


@covers("""`shuffle_seed=9176`""")
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_seeds_and_epochs_have_orders_of_their_own(parquet: Path, world_size: int) -> None:
    def shares(seed: int, epoch: int = 0) -> list[list[int]]:
        found = parts(parquet, world_size, shuffle=True, seed=seed, batch_size=3)
        for each in found:
            each.set_epoch(epoch)
        return [rows_of(part) for part in found]

    found = shares(1)
    assert found == shares(1) != shares(2)
    assert found != shares(1, epoch=1) != shares(1, epoch=2)
    assert any(rows != sorted(rows) for rows in found)


@pytest.mark.usefixtures("small_pools")
def test_the_rows_of_several_row_groups_are_mixed(parquet: Path) -> None:
    """Row groups alone in a random order would leave two thirds of the neighbours together."""
    rows = rows_of(hm.shard(parquet, batch_size=23, shuffle=True))
    n_together = sum(second - first == 1 for first, second in pairwise(rows))
    assert n_together < 8
    assert sorted(rows) == list(range(23))


def test_an_epoch_that_continues_reads_nothing_of_the_batches_before(
    parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = hm.shard(parquet, batch_size=4)
    read: list[int] = []
    table = parquet_shard.RowGroups._table

    def counted(groups: Any, found: list[Any]) -> Any:
        read.extend(group.number for group in found)
        return table(groups, found)

    monkeypatch.setattr(parquet_shard.RowGroups, "_table", counted)
    part.load_state_dict({**part.state_dict(), "batch": 4})
    assert rows_of(part) == [16, 17, 18, 19, 20, 21, 22]
    assert read == [1, 2, 3], "of four row groups of the last file"


@pytest.mark.parametrize("in_loader", [False, True])
def test_progress_of_an_epoch_that_continues(
    parquet: Path, monkeypatch: pytest.MonkeyPatch, in_loader: bool
) -> None:
    part: Any = hm.shard(parquet, batch_size=4)
    part.load_state_dict({**part.state_dict(), "batch": 4})
    if in_loader:
        data = pytest.importorskip("torch.utils.data")
        part = data.DataLoader(part, batch_size=None)
    shown: list[int] = []
    monkeypatch.setattr(api, "_PROGRESS_S", math.inf)
    monkeypatch.setattr(api.Track, "_report", lambda self, bar, n, closed=False: shown.append(n))
    for _ in range(2):
        list(hm.track(part))
    assert (shown, len(part)) == ([4, 6, 0, 6], 6)


@covers("""`loader.state_dict()`, `loader.load_state_dict(state)`""")
def test_what_an_epoch_does_to_the_place_in_it(parquet: Path) -> None:
    part = hm.shard(parquet, batch_size=5, shuffle=True)
    part.set_epoch(3)
    batches = iter(part)
    first = rows_of([next(batches), next(batches)])
    state = part.state_dict()
    assert (state["epoch"], state["batch"]) == (3, 2)
    again = hm.shard(parquet, batch_size=5, shuffle=True)
    again.load_state_dict(state)
    again.set_epoch(3)  # as the loop does that continues
    assert again.state_dict() == state
    assert again.to_torch().state_dict() == pickle.loads(pickle.dumps(again)).state_dict() == state
    assert sorted(first + rows_of(again)) == list(range(23))
    again.load_state_dict(state)
    again.set_epoch(4)
    assert len(rows_of(again)) == 23


@pytest.mark.parametrize("has_epochs", [True, False])
def test_a_state_of_a_finished_epoch(parquet: Path, has_epochs: bool) -> None:
    """Without ``set_epoch`` nothing tells the next epoch from the finished one, which must not be empty."""
    part = hm.shard(parquet, batch_size=5)
    list(part)
    again = hm.shard(parquet, batch_size=5)
    again.load_state_dict(part.state_dict())
    again = pickle.loads(pickle.dumps(again.to_torch()))
    assert again.state_dict() == part.state_dict()
    if has_epochs:
        again.set_epoch(0)
    assert len(rows_of(again)) == (0 if has_epochs else 23)
    assert len(rows_of(again)) == 23
    batches = iter(part)
    for _ in range(5):
        next(batches)
    again.load_state_dict(part.state_dict())
    assert len(rows_of(again)) == 0, "saved with the last batch"


def test_the_state_is_that_of_the_iteration_that_has_yielded_last(parquet: Path) -> None:
    part = hm.shard(parquet, batch_size=5)
    outer = iter(part)
    next(outer)
    assert len(list(part)) == part.state_dict()["batch"] == 5
    next(outer)
    assert part.state_dict()["batch"] == 2


@covers("""`load_state_dict` with another number of ranks""")
def test_a_state_of_another_stream_is_refused(parquet: Path) -> None:
    state = hm.shard(parquet, batch_size=5, shuffle=True).state_dict()
    other = parts(parquet, 2, batch_size=5, shuffle=True, seed=1)[0]
    changed = "with ranks=1, seed=0, but this one has ranks=2, seed=1"
    with pytest.raises(ValueError, match=rf"{changed}: .*start the epoch again with set_epoch\(\)"):
        other.load_state_dict(state)


def test_a_state_of_rows_that_were_written_otherwise(tmp_path: Path) -> None:
    """As by Spark with other partitions: a shuffle has another order, the file has not."""
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": range(20)}), file, row_group_size=10)
    states = [
        hm.shard(file, batch_size=5, shuffle=shuffle).state_dict() for shuffle in (False, True)
    ]
    pq.write_table(pa.table({"x": range(20)}), file, row_group_size=5)
    hm.shard(file, batch_size=5).load_state_dict(states[0])
    with pytest.raises(
        ValueError, match=r"belongs to a stream with row_groups=.*, but this one has"
    ):
        hm.shard(file, batch_size=5, shuffle=True).load_state_dict(states[1])


# ── in a process ─────────────────────────────────────────────────────────────────────────────────


def test_a_share_as_a_stream_of_tables(parquet: Path) -> None:
    for rank, part in enumerate(parts(parquet, 2, batch_size=5)):
        sizes = [len(table) for table in part]
        assert sizes == [5, 5, 2] and part.n_rows == 12
        assert rows_of(part) == rows_of([parts(parquet, 2)[rank]])
        assert rows_of(pickle.loads(pickle.dumps(part))) == rows_of(part)


def test_workers_of_a_loader_divide_a_stream(
    parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By batches: so there are as many as without workers, which a loader would warn of."""
    import torch.utils.data

    part = hm.shard(parquet, batch_size=5)
    loaded = torch.utils.data.DataLoader(part, batch_size=None)
    assert rows_of(loaded) == list(range(23))
    assert len(loaded) == 5
    rows = []
    for number in range(3):
        worker = SimpleNamespace(id=number, num_workers=3)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda worker=worker: worker)
        rows.append(rows_of(part))
    assert [len(each) for each in rows] == [5, 10, 8]
    assert [row for each in rows for row in each] == list(range(23))


def test_a_state_of_a_loader_with_other_workers_is_refused(
    parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker mixes its own rows: the first batches of two workers are not those of none."""
    import torch.utils.data

    part = hm.shard(parquet, batch_size=4, shuffle=True)
    part.load_state_dict({**part.state_dict(), "batch": 2})
    assert len(rows_of(pickle.loads(pickle.dumps(part)))) == 15
    worker = SimpleNamespace(id=0, num_workers=2)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: worker)
    with pytest.raises(ValueError, match=r"num_workers=0 of the DataLoader, but .* num_workers=2"):
        list(part)
    part.load_state_dict({**part.state_dict(), "batch": 1})
    assert len(rows_of(part)) == 8, "of the twelve rows of this worker"
    part.load_state_dict(part.state_dict())
    assert rows_of(part) == [], "other workers may have batches of this epoch left"


@pytest.mark.parametrize("batch_size", [8, None])
def test_ranks_that_share_a_row_group_get_rows_of_all_its_parts(
    tmp_path: Path, batch_size: int | None
) -> None:
    """A small table is one row group; its rows may be sorted by their labels."""
    pq.write_table(pa.table({"x": range(400)}), tmp_path / "sorted.parquet")
    options = {} if batch_size is None else {"batch_size": batch_size}
    found = parts(tmp_path / "sorted.parquet", 4, shuffle=True, **options)
    shares = [rows_of(part if batch_size else [part]) for part in found]
    assert sorted(row for share in shares for row in share) == list(range(400))
    for share in shares:
        n_of_each_quarter = [sum(row // 100 == quarter for row in share) for quarter in range(4)]
        assert min(n_of_each_quarter) > 10


@covers(
    """
    `make_batch_reader("file:///dbfs/…", num_epochs=100)`
    `dbfs:/Volumes/…` of Unity Catalog as `remote`
    `StreamingDataLoader(dataset, batch_size=64, num_workers=2)`
    `clean_stale_shared_memory()`, problems of Python 3.11 with shared memory
    """
)
def test_processes_of_a_loader_divide_tensors(parquet: Path) -> None:
    import torch.utils.data

    part = hm.shard(parquet, batch_size=5, shuffle=True).to_torch()
    loader = torch.utils.data.DataLoader(
        part,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    for epoch in range(2):
        part.set_epoch(epoch)
        assert part.state_dict()["batch"] == 0
        assert sorted(rows_of(loader)) == list(range(23))
        with pytest.raises(RuntimeError, match="workers of the DataLoader take the batches"):
            part.state_dict()
    next(iter(part))
    assert part.state_dict()["batch"] == 1


def test_workers_of_a_loader_read_what_another_dataset_wraps(parquet: Path) -> None:
    """From a store whose connections a forked process cannot use."""
    fsspec = pytest.importorskip("fsspec.implementations.asyn_wrapper")
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow import dataset, fs
    from torch.utils.data import DataLoader, IterableDataset

    store = fs.PyFileSystem(fs.FSSpecHandler(fsspec.AsyncFileSystemWrapper(LocalFileSystem())))
    part = hm.shard(dataset.dataset(str(parquet), filesystem=store), batch_size=5)

    class Wrapped(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from part

    loader = DataLoader(Wrapped(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert sorted(rows_of(loader)) == list(range(23))
    with pytest.raises(RuntimeError, match="workers of the DataLoader take the batches"):
        part.state_dict()


@covers("""`workers_count=4`""")
def test_a_stream_reads_a_row_group_ahead(parquet: Path) -> None:
    """The second group is damaged: the rows before it arrive."""
    file = parquet / "year=2025" / "part-0.parquet"
    data = bytearray(file.read_bytes())
    group = pq.ParquetFile(file).metadata.row_group(1)
    start = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    data[start : start + 20] = b"\xff" * 20
    file.write_bytes(data)
    tables = iter(hm.shard(file, batch_size=4))
    assert next(tables)["x"].to_pylist() == [0, 1, 2, 3]
    with pytest.raises(OSError, match="deserialize"):
        next(tables)


def test_a_reader_is_one_item_ahead() -> None:
    made = []

    def items() -> Any:
        for number in range(10):
            made.append(number)
            yield number

    found = parquet_stream._ahead(items())
    assert next(found) == 0
    found.close()  # waits for its thread
    assert made == [0, 1]


def test_an_iteration_that_goes_no_further_has_no_thread(parquet: Path) -> None:
    before = set(threading.enumerate())
    tables = iter(hm.shard(parquet, batch_size=4))
    next(tables)
    deadline = time.monotonic() + 30
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tables.close()


# ── kinds of batches ─────────────────────────────────────────────────────────────────────────────


COLUMNS = {
    "x": pa.array([1, 2, 3], pa.int64()),
    "half": pa.array([0.5, None, 1.5], pa.float64()),
    "flag": pa.array([True, False, True]),
    "list": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32())),
    "nested": pa.array([[[1.0], [2.0]]] * 3, pa.list_(pa.list_(pa.float32()))),
    "text": pa.array(["a", None, "c"]),
    "at": pa.array([0, 1, 2], pa.timestamp("us")),
    "price": pa.array([1, 2, 3], pa.int64()).cast(pa.decimal128(21, 2)),
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    pq.write_table(pa.table(COLUMNS), tmp_path / "mixed.parquet")
    return tmp_path / "mixed.parquet"


@covers("""`batch['features'].to(device), batch['label_index'].to(device)`""")
def test_columns_as_tensors(mixed: Path) -> None:
    import torch

    first, last = hm.shard(mixed, batch_size=2).to_torch()
    assert {name: (v.dtype, tuple(v.shape)) for name, v in first.items() if name != "text"} == {
        "x": (torch.int64, (2,)),
        "half": (torch.float32, (2,)),
        "flag": (torch.bool, (2,)),
        "list": (torch.int32, (2, 2)),
        "nested": (torch.float32, (2, 2, 1)),
        "at": (torch.int64, (2,)),
        "price": (torch.float32, (2,)),
    }
    assert first["text"] == ["a", None]
    assert first["half"][0] == 0.5 and first["half"][1].isnan()
    assert last["list"].tolist() == [[5, 6]] and last["at"].tolist() == [2]
    first["x"][0] = 7  # tensors may be written


def test_columns_as_arrays(mixed: Path) -> None:
    first, _ = hm.shard(mixed, batch_size=2).to_numpy()
    assert first["list"].tolist() == [[1, 2], [3, 4]]
    assert first["half"].dtype == first["price"].dtype == np.float64
    assert first["at"].dtype == np.dtype("datetime64[us]")
    first["x"][0] = 7


@pytest.mark.parametrize("nested", ["struct", "map", "list"])
def test_integers_beside_nulls_inside_of_other_values(tmp_path: Path, nested: str) -> None:
    """No float holds all integers of 64 bits."""
    number = (1 << 53) + 1
    values = {
        "struct": pa.array([{"id": number}, {"id": None}, None]),
        "map": pa.array([[("id", number), ("a", None)]], pa.map_(pa.string(), pa.int64())),
        "list": pa.array([[{"id": number}], [{"id": None}]]),
    }[nested]
    pq.write_table(pa.table({"v": values}), tmp_path / "rows.parquet")
    (batch,) = hm.shard(tmp_path / "rows.parquet", batch_size=4).to_numpy()
    found = batch["v"][0]
    entry = found[0] if nested == "list" else found
    assert dict(entry)["id"] == number and batch["v"].dtype == object
    assert nested != "struct" or (batch["v"][1]["id"] is None and batch["v"][2] is None)


@pytest.mark.parametrize("kind", ["string", "binary", "string_view", "binary_view"])
def test_shuffled_rows_of_text_of_any_size(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyArrow takes no rows of views, nor of a column with 2 GiB of text."""
    monkeypatch.setattr(batch_kinds, "_MOST_TAKEN_BYTES", 10)
    texts = [str(x) * 10 for x in range(8)]
    column = pa.array(texts).cast(getattr(pa, kind)())
    lists = pa.array([[x] for x in range(8)])
    table = pa.table({"x": range(8), "text": column, "list": lists})
    pq.write_table(table, tmp_path / "rows.parquet")
    for part in (
        hm.shard(tmp_path / "rows.parquet", shuffle=True),
        hm.shard(table, shuffle=True),
        *hm.shard(tmp_path / "rows.parquet", shuffle=True, batch_size=8).to_arrow(),
    ):
        found = part.cast(pa.schema([("x", "int64"), ("text", "large_string"), part.field("list")]))
        rows = found.to_pylist()
        assert sorted(row["x"] for row in rows) == list(range(8))
        assert all(r["text"] == texts[r["x"]] and r["list"] == [r["x"]] for r in rows)


def test_columns_as_arrays_of_jax(mixed: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    first, last = hm.shard(mixed, batch_size=2).to_jax()
    assert isinstance(first["list"], jnp.ndarray) and first["list"].shape == (2, 2)
    assert first["text"] == ["a", None] and last["nested"].tolist() == [[[1.0], [2.0]]]


@pytest.mark.parametrize("kind", ["int64", "uint64", "timestamp[us]"])
def test_integers_that_jax_would_truncate(tmp_path: Path, kind: str) -> None:
    jax = pytest.importorskip("jax")
    pq.write_table(pa.table({"x": pa.array([7, 1 << 40], kind)}), tmp_path / "rows.parquet")
    part = hm.shard(tmp_path / "rows.parquet", batch_size=1).to_jax()
    batches = iter(part)
    assert next(batches)["x"].tolist() == [7]
    with pytest.raises(
        ValueError, match=r"column 'x' has integers or times that u?int32 cannot hold"
    ):
        next(batches)
    jax.config.update("jax_enable_x64", True)
    try:
        assert rows_of(part) == [7, 1 << 40]
    finally:
        jax.config.update("jax_enable_x64", False)


@covers(
    """
    `with converter.make_tf_dataset(batch_size=BATCH_SIZE) as dataset`
    `make_petastorm_dataset(reader)`
    """
)
@pytest.mark.tensorflow
def test_columns_as_tensors_of_tensorflow(mixed: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    table = (
        pa.table(COLUMNS).drop_columns(["text"]).append_column("word", pa.array(["a", "b", "c"]))
    )
    pq.write_table(table, mixed)
    first, last = hm.shard(mixed, batch_size=2).to_tf()
    assert first["list"].shape == (2, 2) and first["word"].dtype == tf.string
    assert last["half"].numpy().tolist() == [1.5]
    pq.write_table(pa.table({"text": ["a", None]}), mixed)
    with pytest.raises(ValueError, match=r"column 'text' has values that form no tensor of Tens"):
        list(hm.shard(mixed, batch_size=2).to_tf())


@covers("""`dataset.map(lambda x: (x.features, x.label_index))`""")
@pytest.mark.exhaustive
@pytest.mark.tensorflow
def test_keras_trains_on_tensors_of_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    import keras

    features = pa.array([[1.0, 1.0, 1.0]] * 64, pa.list_(pa.float32()))
    table = pa.table({"features": features, "label_index": np.arange(64) % 2})
    pq.write_table(table, tmp_path / "rows.parquet")
    part = hm.shard(tmp_path / "rows.parquet", batch_size=16).to_tf()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dataset = ((batch["features"], batch["label_index"]) for batch in part)
    history = model.fit(dataset, steps_per_epoch=len(part))
    assert len(history.history["loss"]) == 1


@pytest.mark.tensorflow
def test_tensors_and_datasets_of_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow")
    for data in (tf.range(10), tf.Variable(range(10))):
        found = parts({"x": data, "y": np.arange(10)}, 2, shuffle=True)
        assert sorted(rows_of(found)) == list(range(10))
        assert all(each["x"].numpy().tolist() == each["y"].tolist() for each in found)
    with pytest.raises(TypeError, match=r"call its own shard\(hm.world_size\(\), hm.rank\(\)\)"):
        hm.shard(tf.data.Dataset.range(10))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([1, None]), "'x' is int64 and has nulls"),
        (pa.array([[1, 2], [3, None]]), "'x' is list<.*int64> and has nulls"),
        (pa.array([[[1]], [None]]), "'x' is list<.*int64>> and has nulls"),
        (pa.array([[True], None]), "'x' is list<.*bool> and has nulls"),
        (pa.array([[1], None], pa.list_(pa.int8(), 1)), "'x' is fixed_size_list<.*and has nulls"),
        (pa.array([1, None]).dictionary_encode(), "'x' is int64 and has nulls"),
        (pa.array([[1], [1, 2]]), "'x' has lists of different lengths"),
        (pa.array([[1.0], None]), "'x' has only nulls or empty lists in a row group"),
        (pa.array([None, [1.0]]), "'x' has only nulls or empty lists in a row group"),
    ],
)
def test_columns_that_form_no_tensor(tmp_path: Path, values: Any, said: str) -> None:
    n_rows = 1 if "in a row group" in said else 2
    pq.write_table(pa.table({"x": values}), tmp_path / "rows.parquet", row_group_size=n_rows)
    part = hm.shard(tmp_path / "rows.parquet", batch_size=2)
    assert next(iter(part.to_arrow())).num_rows == 2
    with pytest.raises(ValueError, match=said):
        list(part.to_torch())


@pytest.mark.parametrize("kind", ["torch", "jax"])
@pytest.mark.parametrize("unit", ["timestamp[us]", "date32", "duration[s]"])
def test_dates_and_times_that_are_null(tmp_path: Path, unit: str, kind: str) -> None:
    """As an integer NaT would be a time before all others."""
    pytest.importorskip(kind)
    pq.write_table(pa.table({"at": pa.array([1, None], unit)}), tmp_path / "rows.parquet")
    part = hm.shard(tmp_path / "rows.parquet", batch_size=1)
    assert np.isnat([batch["at"][0] for batch in part.to_numpy()]).tolist() == [False, True]
    batches = iter(getattr(part, f"to_{kind}")())
    assert next(batches)["at"].tolist() == [1]
    with pytest.raises(ValueError, match=r"column 'at' is .* and has nulls"):
        next(batches)


@pytest.mark.parametrize("batch_size", [4, 3], ids=["of one row group", "of two"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.usefixtures("small_pools")
def test_row_groups_with_lists_of_other_lengths(
    tmp_path: Path, batch_size: int, shuffle: bool
) -> None:
    lists = [[1, 2]] * 8 + [[1, 2, 3]] * 8  # two pools of two row groups
    pq.write_table(pa.table({"x": lists}), tmp_path / "rows.parquet", row_group_size=4)
    part = hm.shard(tmp_path / "rows.parquet", batch_size=batch_size, shuffle=shuffle)
    assert len(list(part)) == len(part)
    with pytest.raises(ValueError, match="'x' has lists of different lengths"):
        list(part.to_numpy())


@pytest.mark.parametrize("kind", ["time32[ms]", "time64[us]", "time64[ns]"])
def test_times_of_day(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table({"x": pa.array([1, 2], kind)}), tmp_path / "rows.parquet")
    part = hm.shard(tmp_path / "rows.parquet", batch_size=2)
    (batch,) = part.to_numpy()
    assert batch["x"].dtype == np.dtype(f"timedelta64[{kind[-3:-1]}]")
    assert rows_of(part.to_torch()) == [1, 2]


def test_timestamps_that_spark_writes(tmp_path: Path) -> None:
    """INT96, which PyArrow reads as ns: the first and the last year of Spark overflow there."""
    times = [datetime(1, 1, 1), datetime(2020, 1, 1), datetime(9999, 12, 31)]
    rows = pa.table({"at": pa.array(times, pa.timestamp("us"))})
    file = tmp_path / "rows.parquet"
    pq.write_table(rows, file, use_deprecated_int96_timestamps=True)
    assert hm.dataset(file).columns == (("at", "timestamp[us]"),)
    assert hm.shard(file) == rows
    (batch,) = hm.shard(file, batch_size=3).to_numpy()
    assert batch["at"].tolist() == times


# ── places ───────────────────────────────────────────────────────────────────────────────────────


def test_globs_urls_and_datasets(parquet: Path) -> None:
    ds, fsspec = pytest.importorskip("pyarrow.dataset"), pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(parquet), "/lake/data", recursive=True)
    try:
        for data in (parquet.as_uri(), "memory://lake/data", "memory://lake/*/year=*/*.parquet"):
            assert rows_of(parts(data, 3)) == rows_of(parts(parquet, 3))
            assert rows_of(hm.shard(data, batch_size=4)) == list(range(23))
        assert rows_of([hm.shard(f"{parquet}/*2026/*.parquet")]) == list(range(10, 23))
        assert rows_of([hm.shard(ds.dataset(parquet, format="parquet"))]) == list(range(23))
        with pytest.raises(FileNotFoundError) as missing:
            hm.shard("memory://lake/date/year=2026")
        assert str(missing.value) == (
            "there is no file or folder memory://lake/date/year=2026; the nearest existing folder is "
            "memory://lake"
        )
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("chosen", [[2, 3], [3], [3, 1], [0]])
def test_a_dataset_of_some_row_groups(tmp_path: Path, chosen: list[int]) -> None:
    """A fragment may be a subset of its file, such as by a filter."""
    ds = pytest.importorskip("pyarrow.dataset")
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "rows.parquet", row_group_size=10)
    whole = ds.dataset(tmp_path / "rows.parquet")
    (file,) = whole.get_fragments()
    parts = [file.subset(row_group_ids=[number]) for number in chosen]
    some = ds.FileSystemDataset(parts, whole.schema, whole.format, whole.filesystem)
    expected = some.to_table()["x"].to_pylist()
    assert rows_of([hm.shard(some)]) == rows_of(hm.shard(some, batch_size=7)) == expected
    with pytest.raises(
        ValueError, match=r"pass its to_table\(\), or the Dataset without the filter"
    ):
        hm.shard(whole.filter(ds.field("x") > 20))


def test_files_of_other_types_or_columns(tmp_path: Path) -> None:
    """A Dataset of PyArrow has the columns of its first file: others would vanish."""
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table({"x": pa.array([1], pa.int32()), "y": pa.nulls(1)}), first)
    pq.write_table(pa.table({"y": ["b"], "x": [1 << 40]}), second)
    assert rows_of(hm.shard(tmp_path, batch_size=1)) == [1, 1 << 40]
    table = hm.shard(tmp_path)
    assert (table["x"].to_pylist(), table["y"].to_pylist()) == ([1, 1 << 40], [None, "b"])
    assert hm.dataset(tmp_path).columns == (("x", "int64"), ("y", "string"))
    for read in (hm.shard, hm.dataset):
        pq.write_table(pa.table({"x": [1], "y": [1]}), first)
        with pytest.raises(ValueError, match=r"b\.parquet has a column of another type"):
            read(tmp_path)
        pq.write_table(pa.table({"x": [1]}), first)
        with pytest.raises(ValueError, match=r"b\.parquet and the files before it differ in 'y'"):
            read(tmp_path)


def test_a_value_that_the_common_type_does_not_hold(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0.5]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [2**53 + 1]}), tmp_path / "b.parquet")
    stream = hm.shard(tmp_path, batch_size=1)
    with pytest.raises(
        ValueError, match=r"b\.parquet cannot be read: column 'x' is int64 in this file "
    ):
        rows_of(stream)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    damaged = bytearray((tmp_path / "a.parquet").read_bytes())
    damaged[4:40] = bytes(36)
    (tmp_path / "a.parquet").write_bytes(damaged)
    with pytest.raises(Exception, match=r"^(?!.*in all files)"):
        rows_of(hm.shard(tmp_path, batch_size=1))


def test_a_column_of_files_and_of_folders(tmp_path: Path) -> None:
    """PyArrow takes a number in a folder's name for an int32."""
    ds = pytest.importorskip("pyarrow.dataset")
    (tmp_path / "year=2026").mkdir()
    pq.write_table(pa.table({"x": [1], "year": [2026]}), tmp_path / "year=2026" / "a.parquet")
    for read in (hm.shard, hm.dataset):
        with pytest.raises(
            ValueError, match=r"both in its files and in the names.* int64 .*pass"
        ) as e:
            read(tmp_path)
    assert f"pyarrow.dataset.dataset('{tmp_path}', format='parquet')" in str(e.value)
    assert hm.shard(ds.dataset(tmp_path, format="parquet")).to_pylist() == [{"x": 1, "year": 2026}]


def test_a_batch_has_a_row(parquet: Path) -> None:
    for size, shown in ((0, "0"), (2.5, r"2\.5"), ("2", "'2'")):
        with pytest.raises(ValueError, match=f"as batch_size, at least 1, got {shown}"):
            hm.shard(parquet, batch_size=size)
