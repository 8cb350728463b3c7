"""Frames of every kind go out in chunks and come back with their predictions, nothing lost or changed."""

from __future__ import annotations

import datetime as dt
import gc
import gzip
import os
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import arrow_source, sources
from hydrogen_magic.node.prediction import annotations as kinds
from hydrogen_magic.node.prediction import arrow_to_pandas, chunking
from hydrogen_magic.node.prediction.arrow_copies import written
from hydrogen_magic.node.prediction.block_rows import BlockLayout, BlockRows
from hydrogen_magic.node.prediction.column_values import exact_type
from hydrogen_magic.node.prediction.inputs import BatchConverter
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.predictor import Predictor
from hydrogen_magic.node.prediction.schema_unify import MisfitError
from hydrogen_magic.node.prediction.shared_buffers import MAX_IN_FLIGHT, BufferReader, BufferWriter
from tests import infer_data, infer_ranks
from tests.infer_data import write
from tests.records import disk_full_at

ALL = InferOptions()
quick = settings(max_examples=40)


# ── a run without ranks ──────────────────────────────────────────────────────────────────────────


def received(rows: Any) -> Any:
    """Return the rows as they arrive in another process."""
    place, fds = BufferWriter().write(rows)
    reader = BufferReader()
    reader.layout = pickle.loads(pickle.dumps(getattr(rows, "layout", None)))
    return reader.view(place, fds)


def sent(rows: Any) -> pa.Table:
    """Return the rows as they arrive in another process, as a table."""
    if isinstance(rows, BlockRows):
        return pa.Table.from_batches([received(rows).to_batch()])
    sink = written(rows, pa.BufferOutputStream())
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def doubled(chunk: pa.Table) -> pa.Table:
    """Predict every column to be what it is, under another name."""
    fields = [pa.field(f"p_{field.name}", field.type) for field in chunk.schema]
    return pa.Table.from_arrays(chunk.columns, schema=pa.schema(fields))


def counted(chunk: pa.Table) -> pa.Table:
    return pa.table({"n": pa.array(np.full(chunk.num_rows, 1.5))})


def predicted(
    frame: Any,
    predict: Callable[[pa.Table], pa.Table] = doubled,
    options: InferOptions = ALL,
    *,
    batch_size: int = 3,
    seed: int = 0,
    target: Path | None = None,
) -> Any:
    """Return ``frame`` with predictions that arrive in a random order."""
    source = sources.source(frame, target)
    result = source.result(options)
    done, first_row = [], 0
    for chunk in source.chunks(batch_size):
        assert chunk.schema.equals(source.schema)
        done.append((first_row, chunk, sent(predict(sent(chunk)))))
        first_row += chunk.num_rows
    assert source.n_rows in (None, first_row)
    assert all(chunk.num_rows % batch_size == 0 for _, chunk, _ in done[:-1])
    result.begin(done[0][2].schema)
    for first_row, chunk, columns in random.Random(seed).sample(done, len(done)):
        result.put(first_row, columns, chunk)
    whole = result.finish()
    assert result.n_waiting == 0
    result.abort()
    return whole


# ── any Arrow types ──────────────────────────────────────────────────────────────────────────────

KINDS_OF_CELLS = (*infer_data.EVERYTHING, pa.float16(), pa.timestamp("ns", "Europe/Berlin"))
IN_PARQUET = [kind for kind in KINDS_OF_CELLS if kind != pa.null()]


def same(left: pa.Table, right: pa.Table) -> bool:
    """Say whether tables are equal, NaN being itself; lists of NaN too."""
    return bool(left.schema.equals(right.schema)) and infer_data.alike(
        left.to_pylist(), right.to_pylist()
    )


def twice(table: pa.Table) -> pa.Table:
    fields = [*table.schema, *(pa.field(f"p_{f.name}", f.type) for f in table.schema)]
    return pa.Table.from_arrays([*table.columns, *table.columns], schema=pa.schema(fields))


@quick
@given(
    table=infer_data.tables(KINDS_OF_CELLS), batch_size=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_arrow_frames_come_back_with_their_types(
    table: pa.Table, batch_size: int, seed: int
) -> None:
    how: dict[str, Any] = {"batch_size": batch_size, "seed": seed}
    whole = twice(table)
    assert same(predicted(table, **how), whole)
    assert same(predicted(ds.dataset(table), **how), whole)
    assert same(predicted(table.to_reader(max_chunksize=4), **how), whole)
    combined = table.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    batch = predicted(combined[0], **how)
    assert isinstance(batch, pa.RecordBatch)
    assert same(pa.Table.from_batches([batch]), whole)


@quick
@given(table=infer_data.tables(IN_PARQUET), batch_size=st.integers(1, 9))
def test_parquet_comes_back_as_parquet(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, batch_size: int
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    pq.write_table(table, folder / "rows.parquet", row_group_size=4)
    before = pq.read_table(folder / "rows.parquet")
    done = predicted(folder / "rows.parquet", batch_size=batch_size)
    assert done == folder / "rows-inferred.parquet"
    assert same(pq.read_table(done), twice(before))


def test_timestamps_that_spark_writes_to_parquet(tmp_path: Path) -> None:
    """INT96, which PyArrow reads as ns: the first and the last year of Spark overflow there."""
    times = [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)]
    rows = pa.table({"at": pa.array(times, pa.timestamp("us"))})
    pq.write_table(rows, tmp_path / "rows.parquet", use_deprecated_int96_timestamps=True)
    source = sources.source(tmp_path / "rows.parquet")
    assert pa.concat_tables(source.chunks(9)) == rows


def test_files_of_other_file_systems_and_lists(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for country, first in (("de", 0), ("fr", 10)):
        folder = tmp_path / "rows" / f"country={country}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"x": range(first, first + 10)}), folder / "part.parquet")
    memory.put(str(tmp_path / "rows"), "/lake/rows", recursive=True)
    french = tmp_path / "rows" / "country=fr" / "part.parquet"
    try:
        for n, (data, expected) in enumerate(
            (
                ("memory://lake/rows", range(20)),
                ("memory://lake/*/country=fr/", range(10, 20)),
                ("memory://lake/rows/country=de/part.parquet", range(10)),
                ([str(french), f"{tmp_path}/rows/*=de/*"], range(20)),
            )
        ):
            done = predicted(data, target=tmp_path / f"done-{n}")
            found = ds.dataset(done, partitioning="hive").to_table()["x"]
            assert found.to_pylist() == [*expected], data
            with pytest.raises(InferError, match="set one on this machine with --out PATH"):
                predicted(data)
        with pytest.raises(InferError, match="nearest existing folder is memory://lake/rows"):
            sources.source("memory://lake/rows/country=it")
        with pytest.raises(InferError, match="cannot be written to a URL: choose a path"):
            sources.source("memory://lake/rows", "memory://lake/done")
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


@quick
@given(table=infer_data.tables(KINDS_OF_CELLS), batch_size=st.integers(1, 9), is_lazy=st.booleans())
def test_polars_frames_come_back(table: pa.Table, batch_size: int, is_lazy: bool) -> None:
    frame = arrow_source.arrow_as_polars(table)
    if is_lazy:
        lazy = predicted(frame.lazy(), batch_size=batch_size)
        assert isinstance(lazy, pl.LazyFrame)
        done = lazy.collect()
    else:
        done = predicted(frame, batch_size=batch_size)
    assert done.columns == [*frame.columns, *(f"p_{name}" for name in frame.columns)]
    assert done.select(frame.columns).equals(frame)
    again = done.select(pl.col(f"p_{name}").alias(name) for name in frame.columns)
    assert again.schema == frame.schema and again.equals(frame)


# ── pandas ───────────────────────────────────────────────────────────────────────────────────────

N = 17
EVERY_DTYPE = pd.DataFrame(
    {
        "int8": np.arange(N, dtype="int8"),
        "uint64": np.arange(N, dtype="uint64") + (1 << 63),
        "float": np.where(np.arange(N) % 3, np.arange(N) / 7, np.nan),
        "float16": np.arange(N, dtype="float16"),
        "bool": np.arange(N) % 2 == 0,
        "when": pd.date_range("2020-01-01 00:00:00.000000001", periods=N),
        "where": pd.date_range("2020-03-28", periods=N, freq="h", tz="Europe/Berlin"),
        "seconds": pd.Series(pd.date_range("2020", periods=N)).astype("datetime64[s]"),
        "never": pd.Series([pd.NaT] * N, dtype="datetime64[ns]"),
        "long": pd.to_timedelta(np.arange(N), unit="s"),
        "Int64": pd.array([None, *range(2**60, 2**60 + N - 1)], "Int64"),
        "Float32": pd.array([None, *range(N - 1)], "Float32"),
        "boolean": pd.array([None, *[True] * (N - 1)], "boolean"),
        "text": ["", None, *("ä" * n for n in range(N - 2))],
        "string": pd.array([None, *"a" * (N - 1)], "string"),
        "category": pd.Categorical([*"ab" * 8, None], categories=list("bca"), ordered=True),
        "days": pd.Categorical([*pd.date_range("2020-03-28", periods=N, tz="Europe/Berlin")]),
        "arrow": pd.array(range(N), pd.ArrowDtype(pa.int32())),
        "arrow nulls": pd.array([None, *range(N - 1)], pd.ArrowDtype(pa.int64())),
        "arrow time": pd.array([None] * N, pd.ArrowDtype(pa.timestamp("us", "UTC"))),
        "object": pd.Series([b"x", None, *[b"\xff"] * (N - 2)], dtype=object),
        "dates": [dt.date(2020, 1, 1)] * N,
        "decimals": [Decimal("1.25"), None, *[Decimal("10.5")] * (N - 2)],
        "lists": [[n] * (n % 3) for n in range(N)],
        "arrays": [np.arange(3.0) for _ in range(N)],
        "nothing": [None] * N,
    }
)
INDEXES = {
    "dates": pd.date_range("2020", periods=N, name="day"),
    "repeated": pd.Index([7] * N),
    "levels": pd.MultiIndex.from_product([["a"], range(N)], names=["x", "y"]),
    "text": pd.Index([f"row {n}" for n in range(N)]),
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES.keys())
def test_own_columns_of_pandas_and_the_index_are_untouched(index: pd.Index) -> None:
    frame = EVERY_DTYPE.set_index(index)
    before = frame.copy(deep=True)
    done = predicted(frame)
    pd.testing.assert_frame_equal(frame, before)
    pd.testing.assert_frame_equal(done[list(frame)], before)
    for name in frame.select_dtypes(["number", "bool", "datetime", "datetimetz", "timedelta"]):
        wanted = before[name].dtype
        if not isinstance(wanted, pd.api.extensions.ExtensionDtype) or "datetime" in str(wanted):
            pd.testing.assert_series_equal(done[f"p_{name}"], before[name], check_names=False)


def test_predicted_columns_have_natural_dtypes_in_pandas() -> None:
    done = predicted(EVERY_DTYPE, seed=5)
    dtypes = {name: str(done[f"p_{name}"].dtype) for name in EVERY_DTYPE}
    assert dtypes["Int64"] == "Int64" and dtypes["arrow"] == "int32"
    assert dtypes["Float32"] == "float32" and dtypes["boolean"] == "boolean"
    assert dtypes["category"] == "category" and dtypes["object"] == "object"
    assert dtypes["text"] == str(pd.Series(["a"]).dtype)
    assert list(done["p_Int64"]) == list(EVERY_DTYPE["Int64"])
    assert list(done["p_days"]) == list(EVERY_DTYPE["days"])
    assert list(done["p_category"])[:16] == list("ab" * 8) and pd.isna(done["p_category"].iloc[16])
    assert [list(cell) for cell in done["p_lists"]] == list(EVERY_DTYPE["lists"])
    assert list(done["p_decimals"])[:3] == [Decimal("1.25"), None, Decimal("10.5")]
    assert list(done["p_dates"]) == list(EVERY_DTYPE["dates"])
    assert done["p_text"].fillna("-").tolist() == EVERY_DTYPE["text"].fillna("-").tolist()


def batches_of(frame: Any, options: InferOptions = ALL, first_row: int = 0) -> list[pd.DataFrame]:
    """Return all rows as ``predict`` gets them."""
    (chunk,) = sources.source(frame).chunks(100)
    held: list[pd.DataFrame] = []
    predictor = Predictor(lambda batch: held.append(batch) or [0] * len(batch), options)
    predictor.run(received(chunk), first_row)
    return held


def batch_of(frame: pd.DataFrame) -> pd.DataFrame:
    return batches_of(frame)[0]


@pytest.mark.parametrize(
    "index",
    [
        pd.Index(list("abcdef"), name="id"),
        pd.RangeIndex(5, 11),
        pd.RangeIndex(6, name="row"),
        pd.date_range("2026", periods=6, tz="Europe/Berlin"),
        pd.MultiIndex.from_arrays([list("aabbcc"), range(6)], names=["group", None]),
        pd.CategoricalIndex(list("abcabc")),
        pd.Index([1] * 6),
        pd.Index([2**53 + 1, None, 1, 2, 3, 4], dtype="Int64"),
        pd.Index(["a", None, *"bcde"], dtype="string"),
        pd.MultiIndex.from_arrays([pd.array([2**53 + 1, None, 1, 2, 3, 4], "Int64"), range(6)]),
    ],
    ids=lambda index: type(index).__name__,
)
@pytest.mark.parametrize("columns", [["x"], ["s"], ["x", "s", "y"]], ids=str)
@pytest.mark.parametrize(
    "make", [lambda frame: frame, pa.Table.from_pandas], ids=["pandas", "arrow"]
)
def test_a_batch_has_the_index_of_the_frame(
    index: pd.Index, columns: list[str], make: Callable[[pd.DataFrame], Any]
) -> None:
    frame = pd.DataFrame({"x": np.arange(6.0), "s": list("uvwxyz"), "y": range(6)}, index=index)
    batches = batches_of(make(frame[columns]), InferOptions(2))
    pd.testing.assert_frame_equal(pd.concat(batches), frame[columns], check_freq=False)
    assert list(batches[1].index.names) == list(index.names) and len(batches) == 3


def test_a_stored_range_is_the_index_if_it_has_as_many_rows(tmp_path: Path) -> None:
    """PyArrow ignores others: of a table that was filtered, or the first of several files."""
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0]}, pd.RangeIndex(100, 106, 2, name="id"))
    table = pa.Table.from_pandas(frame)
    for name in ("one", "two"):
        frame.to_parquet(tmp_path / f"{name}.parquet")
    for data, labels in (
        (table, [100, 102, 104]),
        (tmp_path / "one.parquet", [100, 102, 104]),
        (table.filter([True, False, True]), [0, 1]),
        (tmp_path, [*range(6)]),
        (ds.dataset(table), [0, 1, 2]),
    ):
        assert pd.concat(batches_of(data, InferOptions(2))).index.tolist() == labels


def test_a_frame_without_columns_has_its_index() -> None:
    frame = pd.DataFrame(index=pd.Index([101, 205, 307], name="id"))
    pd.testing.assert_frame_equal(pd.concat(batches_of(frame, InferOptions(2))), frame)
    (chunk,) = sources.source(frame).chunks(3)
    assert (sent(chunk).num_rows, sent(chunk).num_columns) == (3, 0)


def test_an_index_that_arrow_cannot_hold_counts_rows() -> None:
    frame = pd.DataFrame({"x": range(3)}, index=pd.period_range("2026", periods=3, freq="M"))
    (batch,) = batches_of(frame, first_row=7)
    assert list(batch.index) == [7, 8, 9]


def test_predicted_tensors_keep_their_shape_in_pandas() -> None:
    shaped = pa.array(
        [np.arange(6).reshape(2, 3).tolist(), None] * 4, pa.list_(pa.list_(pa.int64(), 3), 2)
    )

    def predict(chunk: pa.Table) -> pa.Table:
        first = chunk["x"][0].as_py()
        return pa.table({"t": shaped.slice(first, chunk.num_rows)})

    done = predicted(pd.DataFrame({"x": range(8)}), predict, InferOptions(only=True))
    assert done["t"][1::2].tolist() == [None] * 4
    assert np.stack(done["t"][::2]).shape == (4, 2, 3)
    done["t"][0][0, 0] = 7
    assert done["t"][2].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", ["uint8", ">f4", "float16"])
def test_arrays_of_several_dimensions_in_pandas(dtype: str) -> None:
    """Such as images, and as predicted tensors."""
    images = [np.full((2, 3), n, dtype).T for n in range(5)]
    frame = pd.DataFrame({"n": range(5), "image": images})
    batches = batches_of(frame, InferOptions(2))
    found = np.stack([image for batch in batches for image in batch["image"]])
    assert np.array_equal(found, np.stack(images)) and found.dtype == np.dtype(dtype).newbyteorder(
        "="
    )
    assert sources.source(frame.iloc[:0]).schema.names == ["n", "image"]
    done = predicted(frame, counted)
    assert all(mine is own for mine, own in zip(done["image"], images, strict=True))


def test_a_rank_can_make_the_same_dtypes_again() -> None:
    batch = batch_of(EVERY_DTYPE)
    own = {"lists", "arrays"}
    plain = [name for name in EVERY_DTYPE if name not in own]
    pd.testing.assert_frame_equal(batch[plain], EVERY_DTYPE[plain])
    nested = pd.DataFrame({"a": pd.array([[1], None], pd.ArrowDtype(pa.list_(pa.int8())))})
    assert batch_of(nested)["a"].tolist()[1] is None, "PyArrow knows no such dtype by name"


def test_nan_is_no_null_and_numbers_are_not_copied() -> None:
    for frame in (
        pd.DataFrame({"a": np.array([1.0, np.nan, 3.0])}),
        pd.DataFrame(np.asfortranarray(np.ones((3, 2)) * np.nan), columns=list("ab")),
        pd.DataFrame(np.ones((3, 2)) * np.nan, columns=list("ab"), copy=False),
    ):
        (chunk,) = sources.source(frame).chunks(10)
        column = sent(chunk)["a"]
        assert column.null_count == 0 and np.isnan(column[1].as_py())
        (block,) = chunk.blocks
        assert np.shares_memory(block, frame["a"].to_numpy())


@pytest.mark.parametrize("annotation", [pd.DataFrame, pa.Table, np.ndarray, pl.DataFrame])
@pytest.mark.parametrize("mix", ["numbers", "all", "interleaved", "text"])
def test_a_batch_has_the_values_of_the_frame_in_its_own_memory(mix: str, annotation: type) -> None:
    n_rows = 30
    labels = np.arange(n_rows, 0, -1)
    frame = pd.DataFrame({f"x{n}": np.arange(n_rows, dtype="f4") + n for n in range(5)}, labels)
    if mix != "numbers":
        for place in (0, 3) if mix == "interleaved" else (5,):
            frame.insert(place, f"n{place}", np.arange(n_rows) * place)
            frame.insert(place, f"t{place}", [f"row {n}" for n in range(n_rows)])
        frame = frame[["t5"]] if mix == "text" else frame
    if annotation is np.ndarray and mix == "text":
        return
    (chunk,) = sources.source(frame).chunks(n_rows)
    before, held = sent(chunk), []

    def predict(batch: Any) -> Any:
        held.append(batch.copy() if isinstance(batch, (pd.DataFrame, np.ndarray)) else batch)
        if isinstance(batch, pd.DataFrame):
            batch.iloc[:, :] = batch.iloc[::-1].to_numpy()
        elif isinstance(batch, np.ndarray):
            batch[:] = 0
        return [0] * len(batch)

    predict.__annotations__["batch"] = annotation
    Predictor(predict, InferOptions(batch_size=7)).run(chunk, 0)
    assert sent(chunk).equals(before)
    if annotation is pd.DataFrame:
        pd.testing.assert_frame_equal(pd.concat(held), frame)
        assert not any(np.shares_memory(batch.index, labels) for batch in held)
    elif annotation is np.ndarray:
        numbers = frame.select_dtypes("number").to_numpy()
        assert np.concatenate(held).tolist() == numbers.tolist()
    else:
        whole = pl.concat(held).to_arrow() if annotation is pl.DataFrame else pa.concat_tables(held)
        assert whole.to_pydict() == frame.to_dict("list")


@pytest.mark.parametrize("dtype", ["f4", "f2", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_of_any_layout_arrive(dtype: str, order: Literal["C", "F"]) -> None:
    """In a new buffer, and in one that is used again."""
    values = np.asarray(np.arange(7 * 3).reshape(7, 3) % 5, dtype, order=order)
    frame = pd.DataFrame(values, columns=list("abc"), copy=False)
    cuts = [frame, frame[::2], frame[::-1], frame[["b"]], frame[2:5], frame[:0], frame[["c", "a"]]]
    with ExitStack() as closing:
        for each in cuts:
            (rows,) = sources.source(each).chunks(10)
            writer, reader = BufferWriter(), BufferReader()
            closing.callback(writer.close)
            reader.layout = pickle.loads(pickle.dumps(rows.layout))
            assert len(vars(reader.layout)) == len(fields(BlockLayout)), (
                "what is computed stays behind"
            )
            for _ in range(MAX_IN_FLIGHT + 1):
                place, fds = writer.write(rows)
                arrived = reader.view(place, fds)
                assert [block.tolist() for block in arrived.blocks] == [each.to_numpy().tolist()]


NOON = dt.datetime(2026, 1, 2, 12)
LARGE = 2**60 + 1
IDS = (
    pa.StructArray.from_arrays(  # Parquet, Spark and Polars have a null for the field of a null row
        [pa.array([LARGE, None, 7])], ["id"], mask=pa.array([False, True, False])
    )
)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[LARGE, None], [LARGE], None]),
        pa.array([{"id": LARGE}, {"id": None}, None]),
        pa.array([{"ids": [LARGE, None]}, {"ids": []}, None]),
        pa.array([[{"id": LARGE}, {"id": None}], [], None]),
        pa.array([[("a", LARGE)], [("b", None)], None], pa.map_(pa.string(), pa.int64())),
        pa.array([[("a", None)], [("b", LARGE)], [], None], pa.map_(pa.string(), pa.int64()))[1:],
        pa.array([[[LARGE, None]], [[1, 2]], None], pa.list_(pa.list_(pa.int64(), 2), 1)),
        pa.array([{"of": {"yes": True}}, {"of": {"yes": None}}, None]),
        pa.array(
            [[{"at": 1}], [{"at": None}], None], pa.list_(pa.struct({"at": pa.timestamp("ns")}))
        ),
        pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.duration("ns"))),
        IDS,
        pa.ListArray.from_arrays(pa.array([0, 2, 2, 3]), IDS),
        pa.FixedSizeListArray.from_arrays(
            pa.array([LARGE, None, 7]), 1, mask=pa.array([False, True, False])
        ),
    ],
    ids=lambda column: str(column.type)[:30],
)
def test_numbers_and_times_stay_exact_inside_nested_types(column: pa.Array) -> None:
    table = pa.table({"x": column})
    result = predicted(pd.DataFrame({"n": range(3)}), lambda chunk: table)
    batch = arrow_to_pandas.whole(table.to_batches()[0], 0)
    for cells in (result["x"], batch["x"]):
        plain = [cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in cells]
        assert repr(plain) == repr(column.to_pylist()), "no float"
    if "[ns" in str(column.type):
        (arrays,) = BatchConverter(kinds.ARRAYS).batches(table.to_batches()[0], 0, ((0, 3),))
        assert arrays["x"].tolist() == column.to_pylist()


@pytest.mark.parametrize(
    "wrap",
    [lambda rows: rows, lambda rows: pa.ListArray.from_arrays([0, None, 2, 3], rows)],
    ids=["struct", "list"],
)
def test_arrays_beside_times_in_nanoseconds_stay_arrays(
    wrap: Callable[[pa.Array], pa.Array],
) -> None:
    at = pa.array([1, 2, None], pa.timestamp("ns"))
    rows = pa.StructArray.from_arrays(
        [at, pa.array([[0.5], [], [1.5]])], ["at", "emb"], mask=pa.array([False, True, False])
    )
    table = pa.table({"x": wrap(rows)})
    (arrays,) = BatchConverter(kinds.ARRAYS).batches(table.to_batches()[0], 0, ((0, 3),))
    batch = arrow_to_pandas.whole(table.to_batches()[0], 0)
    result = predicted(pd.DataFrame({"n": range(3)}), lambda chunk: table)
    for cells in (arrays["x"], batch["x"], result["x"]):
        assert cells[1] is None
        first, last = (cell[0] if isinstance(cell, list) else cell for cell in (cells[0], cells[2]))
        assert first["at"] == pd.Timestamp(1) and last["at"] is None
        assert isinstance(last["emb"], np.ndarray) and last["emb"].tolist() == [1.5]


@pytest.mark.parametrize("stored", ["null", "[]", '{"index_columns": [{"kind": "range"}]}'])
def test_invalid_metadata_of_pandas_hinders_no_other_batches(stored: str) -> None:
    table = pa.table({"x": [1, 2]}).replace_schema_metadata({"pandas": stored})

    def predict(batch: pa.Table) -> Any:
        return batch.select(["x"]).rename_columns(["y"])

    assert predicted(table, predict)["y"].to_pylist() == [1, 2]
    if stored == "null":  # as if there were none
        assert pd.concat(batches_of(table)).x.tolist() == [1, 2]


def test_lists_are_of_one_type_whichever_chunk_has_null_items() -> None:
    def predict(chunk: pa.Table) -> pa.Table:
        rows = [[1, 2], [3, None], [5, 6]][chunk["n"][0].as_py() :][: chunk.num_rows]
        return pa.table({"x": pa.array(rows, pa.list_(pa.int64()))})

    frame, options = pd.DataFrame({"n": range(3)}), InferOptions(only=True)
    done = predicted(frame, predict, options, batch_size=1)
    assert done["x"].tolist() == [[1, 2], [3, None], [5, 6]]


def test_writing_to_a_result_leaves_the_frame_alone() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0]})
    done = predicted(frame, counted)
    done.loc[0, "a"] = 99.0
    done.loc[0, "n"] = 7.0
    assert frame["a"].tolist() == [1.0, 2.0, 3.0] and done["n"].tolist() == [7.0, 1.5, 1.5]


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pd.Series(["a", 1], dtype=object), r"'x'.* str and int"),
        (pd.Series(["a", b"b"], dtype=object), r"'x'.* str and bytes"),
        (pd.Series([True, 2], dtype=object), r"'x'.* bool and int"),
        (pd.Series([2**70, None], dtype=object), r"'x'.* int"),
        (pd.Series([2**53 + 1, 0.5], dtype=object), r"'x'.* int and float"),
        (pd.Series([Path("."), None], dtype=object), r"'x'.* pathlib.*Path"),
        (pd.Series([NOON.date(), NOON], dtype=object), r"'x'.*date.*others have a time"),
        (pd.Series([{"at": NOON.date()}, {"at": NOON}]), r"'x'.*others have a time"),
        (pd.Series([NOON, NOON.astimezone()], dtype=object), r"'x'.*some times have a time zone"),
        (pd.Series([[NOON], [NOON.astimezone()]]), r"'x'.*some times have a time zone"),
        (
            pd.Series([pd.Timestamp(1, unit="ns"), NOON.replace(year=9999)], dtype=object),
            r"'x'.*Timestamp and datetime.datetime",
        ),
        (pd.Series([np.zeros((2, 2)), None]), r"'x'.* numpy.ndarray.*array\.tolist\(\)"),
        (pd.Series([np.zeros((2, 2)), np.zeros((2, 1))]), r"'x'.*array\.tolist\(\)"),
        (pd.Series(pd.interval_range(0, 2)), r"'x'.*interval.*left and \.right"),
        (pd.Series(pd.period_range("2020", periods=2)), r"'x'.*period.*to_timestamp"),
        (pd.cut(pd.Series([1, 2]), 2), r"'x'.*category of interval.*astype\(str\)"),
        (pd.Series([1j, 2j]), r"'x'.*complex128.*real"),
        (pd.Series(pd.array([0, 1], "Sparse[int]")), r"'x'.*Sparse.*to_dense"),
    ],
    ids=str,
)
def test_columns_of_pandas_that_cannot_travel_are_named(column: pd.Series[Any], told: str) -> None:
    with pytest.raises(InferError, match=told):
        sources.source(pd.DataFrame({"ok": [1, 2], "x": column}))


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda at: at, lambda cell: cell),
        (lambda at: [at], lambda cell: cell[0]),
        (lambda at: {"at": at}, lambda cell: cell["at"]),
    ],
    ids=["flat", "list", "struct"],
)
@pytest.mark.parametrize("at", [pd.Timestamp(150, unit="ns"), pd.Timedelta(150, "ns")], ids=str)
def test_objects_keep_their_nanoseconds(
    at: Any, wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]
) -> None:
    frame = pd.DataFrame({"a": pd.Series([wrap(at), None], dtype=object)})
    for cell in (batch_of(frame)["a"][0], predicted(frame)["p_a"][0]):
        assert type(at)(unwrap(cell)) == at


def test_nanoseconds_are_not_searched_for_in_arrays_of_numbers() -> None:
    class Numbers(np.ndarray):
        def __iter__(self) -> Any:
            raise AssertionError("one Python object per number")

    cell = {"at": NOON, "emb": np.arange(3.0).view(Numbers)}
    kind = pa.struct({"at": pa.timestamp("us"), "emb": pa.list_(pa.float64())})
    assert exact_type(kind, [cell]) == kind


def test_names_that_are_not_clear() -> None:
    both = pd.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(InferError, match="more than one column 'a'"):
        sources.source(both)
    with pytest.raises(InferError, match="'1': rename one, since labels are compared as text"):
        sources.source(pd.DataFrame([[1, 2]], columns=[1, "1"]))
    with pytest.raises(InferError, match=r"2 levels.*join"):
        sources.source(pd.DataFrame([[1]], columns=pd.MultiIndex.from_tuples([("a", "b")])))
    with pytest.raises(InferError, match="more than one column 'a'"):
        sources.source(pa.table([[1], [2]], names=["a", "a"]))
    frame = pd.DataFrame({"n": [1], "m": [2]})
    assert list(predicted(frame, counted, InferOptions(columns=("m",)))) == ["m", "n"]
    numbered = pd.DataFrame(np.arange(12.0).reshape(4, 3))
    done = predicted(numbered, counted, InferOptions(columns=("2", "0")))
    assert list(done) == [2, 0, "n"] and done[2].tolist() == numbered[2].tolist()
    with pytest.raises(InferError, match="'zz'"):
        predicted(frame, counted, InferOptions(columns=("zz",)))


# ── every kind ───────────────────────────────────────────────────────────────────────────────────

KINDS: dict[str, Callable[[pa.Table], Any]] = {
    "pandas": lambda table: table.to_pandas(),
    "polars": pl.from_arrow,
    "lazy": lambda table: pl.LazyFrame(pl.from_arrow(table)),
    "table": lambda table: table,
    "batch": lambda table: pa.RecordBatch.from_pylist(table.to_pylist(), table.schema),
    "dataset": ds.dataset,
}


def names(frame: Any) -> list[str]:
    if isinstance(frame, pl.LazyFrame):
        return frame.collect_schema().names()
    return list(frame.schema.names) if hasattr(frame, "num_rows") else list(frame.columns)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_which_columns_come_back(make: Callable[[pa.Table], Any]) -> None:
    table = pa.table({"a": [1, 2, 3, 4], "b": ["x", "y", "z", None], "c": [0.5] * 4})
    assert names(predicted(make(table), counted)) == ["a", "b", "c", "n"]
    some = InferOptions(columns=("c", "a"))
    assert names(predicted(make(table), counted, some)) == ["c", "a", "n"]
    assert names(predicted(make(table), counted, InferOptions(only=True))) == ["n"]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_a_replaced_column_stays_in_its_place(make: Callable[[pa.Table], Any]) -> None:
    def halved(chunk: Any) -> pa.Table:
        return pa.table({"n": [1] * chunk.num_rows, "b": [0.5] * chunk.num_rows})

    table = pa.table({"a": [1, 2], "b": [3, 4], "c": [5, 6]})
    done = predicted(make(table), halved, InferOptions(replace=("b",)))
    assert names(done) == ["a", "b", "c", "n"]
    done = done.collect() if isinstance(done, pl.LazyFrame) else done
    assert next(iter(done["b"])) in (0.5, pa.scalar(0.5))
    with pytest.raises(InferError, match="--replace z: the frame has no column 'z'"):
        sources.source(make(table)).result(InferOptions(replace=("z",)))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_frames_without_rows_or_predictions(make: Callable[[pa.Table], Any]) -> None:
    table = pa.table({"a": pa.array([1, 2], pa.int32()), "b": ["x", "y"]})
    none = pa.Table.from_batches([pa.RecordBatch.from_pylist([], table.schema)])
    assert names(predicted(make(none), counted)) == ["a", "b", "n"]
    assert names(sources.source(make(none)).result(ALL).finish()) == ["a", "b"]


def test_frames_without_columns_keep_their_rows() -> None:
    for frame in (pd.DataFrame(index=range(7)), pa.table({"a": range(7)}).select([])):
        done = predicted(frame, counted)
        assert len(done) == 7 and names(done) == ["n"]


def test_what_pandas_says_of_a_frame_comes_back() -> None:
    frame = pd.DataFrame({"a": [1]})
    frame.attrs["of"] = {"x": 1}
    done = predicted(frame, counted)
    assert done.attrs == {"of": {"x": 1}} and done.attrs["of"] is not frame.attrs["of"]


@pytest.mark.parametrize(
    ("n_columns", "n_bytes"),
    [(2_000, 10_000_000), pytest.param(20_000, 100_000_000, marks=pytest.mark.exhaustive)],
)
def test_many_columns_and_a_cell_that_is_larger_than_a_chunk(n_columns: int, n_bytes: int) -> None:
    wide = pd.DataFrame(np.arange(3.0 * n_columns).reshape(3, n_columns))
    done = predicted(wide, counted).drop(columns="n")
    pd.testing.assert_frame_equal(done, wide, check_column_type=False)
    pd.testing.assert_frame_equal(batch_of(wide), wide)
    table = pa.Table.from_pandas(wide)
    for frame in (table, pl.DataFrame(table)):
        assert len(names(predicted(frame, counted))) == n_columns + 1
    large = pd.DataFrame({"a": ["x" * n_bytes, "y", None, "z"]})
    done = predicted(large, batch_size=1)
    assert [len(cell) for cell in done["p_a"].dropna()] == [n_bytes, 1, 1]


def test_numbers_of_one_type_take_as_many_calls_for_thousands_of_columns_as_for_a_few() -> None:
    """In the kernel and on a rank, after its first chunk: then memory limits how fast rows are sent."""

    def calls(n_columns: int) -> Counter[str]:
        frame = pd.DataFrame(np.ones((400, n_columns), dtype="float32")).rename(
            columns="c{}".format
        )
        chunks = sources.source(frame).chunks(100)
        writer, reader = BufferWriter(), BufferReader()
        predictor = Predictor(infer_ranks.sums_rows(), InferOptions(batch_size=100))

        def pass_on() -> pa.Table:
            chunk = next(chunks)
            reader.layout = reader.layout or chunk.layout
            place, fds = writer.write(chunk)
            return predictor.run(reader.view(place, fds), 0).columns

        found: Counter[str] = Counter()

        def count(frame: Any, event: str, value: Any) -> None:
            if event in ("call", "c_call"):
                found[str(value or frame.f_code)] += 1

        assert pass_on()["sum"].to_pylist() == [n_columns] * 100
        gc.disable()  # it calls finalizers of what earlier tests have left
        sys.setprofile(count)
        try:
            columns = pass_on()
        finally:
            sys.setprofile(None)
            gc.enable()
        assert columns.num_rows == 300
        return found

    few, many = calls(30), calls(3_000)
    assert few.total() == many.total(), (many - few).most_common(5)


def test_chunks_hold_about_four_megabytes() -> None:
    frame = pd.DataFrame({f"c{n}": np.arange(500_000, dtype="float32") for n in range(16)})
    sizes = [chunk.nbytes for chunk in sources.source(frame).chunks(4096)]
    assert sizes[0] == 4096 * 64 and max(sizes) <= 4 << 20 and sizes[1] > 3 << 20


def test_a_dictionary_s_size_is_not_the_rows() -> None:
    ids = pd.DataFrame({"id": pd.Categorical([f"somebody-{n:06}" for n in range(100_000)])})
    assert len(list(sources.source(ids).chunks(1_000))) <= 3


def test_text_for_several_chunks_becomes_one_of_a_large_type() -> None:
    """``combine_chunks`` leaves several of more than two gigabytes; a RecordBatch has one."""
    texts, numbers = pa.chunked_array([["a", None], ["b"]]), pa.chunked_array([[1, 2, 3]])
    table = pa.table({"s": texts, "b": texts.cast(pa.binary()), "x": numbers})
    table = table.replace_schema_metadata({"made": "here"})
    found = chunking.with_large_types(table)
    assert found.schema.types == [pa.large_string(), pa.large_binary(), pa.int64()]
    assert found.schema.metadata == table.schema.metadata
    (batch,) = found.to_batches()
    assert batch.to_pydict() == table.to_pydict()


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (pd.Series([1]), "to_frame"),
        (np.zeros((2, 2)), r"numpy\.ndarray.*pd\.DataFrame"),
        ([1, 2], r"a list.*pd\.DataFrame"),
        (None, "NoneType"),
        (Path("/no/where.parquet"), "no file or folder /no/where"),
        (object(), "__arrow_c_stream__"),
        ("nowhere://bucket/rows.parquet", r"Protocol not known: nowhere"),
        ([Path("/no/where"), "/no"], "nearest existing folder is /"),
        (type("GroupedTable", (), {"__getattr__": getattr})(), "before group_by"),
        (pl.DataFrame({"a": [object()]}), "'a'.*Object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_frame(thing: Any, told: str) -> None:
    with pytest.raises(InferError, match=told):
        sources.source(thing)


# ── other libraries ──────────────────────────────────────────────────────────────────────────────


def test_a_duckdb_relation_gives_a_table() -> None:
    duckdb = pytest.importorskip("duckdb")
    relation = duckdb.sql("select i as a, 'row ' || i as b from range(5000) t(i)")
    done = predicted(relation, counted, batch_size=1000)
    assert done.equals(relation.to_arrow_table().append_column("n", [[1.5] * 5000]))


def test_a_query_that_is_refused_blocks_no_connection() -> None:
    duckdb = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    with pytest.raises(InferError, match="more than one column 'a'") as shown:
        sources.source(connection.sql("select 1 a, 2 a"))
    assert shown.tb is not None and connection.execute("select 1").fetchall() == [(1,)]


def test_an_ibis_table_gives_a_table() -> None:
    ibis = pytest.importorskip("ibis")
    table = ibis.memtable(pd.DataFrame({"a": range(5000)})).mutate(b=ibis._.a + 1)
    done = predicted(table, counted, batch_size=1000)
    assert done.column_names == ["a", "b", "n"] and done["b"].to_pylist() == [*range(1, 5001)]


def test_a_hugging_face_dataset_gives_a_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"a": [1, 2, 3], "b": ["x", "y", "z"]}).select([2, 0])
    done = predicted(data.with_transform(dict), counted)
    assert isinstance(done, datasets.Dataset)
    assert done.to_dict() == {"a": [3, 1], "b": ["z", "x"], "n": [1.5] * 2}
    halves = predicted(
        data,
        lambda chunk: pa.table({"a": pa.array([x / 2 for x in chunk["a"].to_pylist()])}),
        InferOptions(replace=("a",)),
    )
    assert halves.to_dict() == {"a": [1.5, 0.5], "b": ["z", "x"]}
    assert halves.column_names == ["a", "b"] and halves.features["a"].dtype == "float64"
    with pytest.raises(InferError, match=r"DatasetDict.*df\['train'\]"):
        sources.source(datasets.DatasetDict({"train": data}))


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def test_text_files_give_parquet_files(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "day=1"
    folder.mkdir(parents=True)
    (folder / "rows.csv").write_text("a,b\n1,x\n2,y\n3,\n")
    done = predicted(folder / "rows.csv", counted, target=tmp_path / "new.parquet")
    rows = {"a": [1, 2, 3], "b": ["x", "y", ""], "n": [1.5] * 3}
    assert pq.read_table(done).to_pydict() == rows
    whole = predicted(tmp_path / "data", counted)
    assert [str(each.relative_to(whole)) for each in whole.rglob("*.*")] == ["day=1/rows.parquet"]
    assert pq.read_table(whole).to_pydict() == {**rows, "day": [1] * 3}
    for name in ("rows.jsonl", "rows.json.gz"):
        text = b'{"a": 1, "b": {"c": [1]}}\n{"a": 2, "b": null}\n'
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
        found = pq.read_table(predicted(path, counted))
        assert found.to_pydict() == {"a": [1, 2], "b": [{"c": [1]}, None], "n": [1.5] * 2}
    write(tmp_path / "rows.csv.parquet", 0, 3)
    found = pq.read_table(predicted(tmp_path / "rows.csv.parquet", counted))
    assert found["a"].to_pylist() == [0, 1, 2]
    lines = [f"first line of {number}\nsecond line" for number in range(60_000)]
    (tmp_path / "lines.csv").write_text("a\n" + "".join(f'"{text}"\n' for text in lines))
    found = pq.read_table(predicted(tmp_path / "lines.csv", counted, batch_size=10_000))
    assert found["a"].to_pylist() == lines, "of more than one block"
    (tmp_path / "drifts.csv").write_text("a\n" + "1\n" * 800_000 + "x\n")
    with pytest.raises(InferError, match=r"drifts\.csv has rows that cannot be read .*types"):
        predicted(tmp_path / "drifts.csv", counted, batch_size=100_000)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        (
            "ragged.csv",
            b"a,b\n" + b"1,2\n" * 300_000 + b"1,2,3\n",
            "cannot be read .*got 3.*read_csv",
        ),
        ("latin.csv", b"na\xefve,b\n1,2\n", "names of columns .*UTF-8.*encoding"),
        ("broken.jsonl", b'{"a": 1}\n' * 200_000 + b'{"a":\n', "cannot be read .*read_json"),
        (
            "late.jsonl",
            b'{"a": 1}\n' * 200_000 + b'{"a": 1, "b": 2}\n',
            r"an object after row \d+,\d+ with a key .*read_json",
        ),
        (
            "long.csv",
            b"a\n" + b"1\n" * 600_000 + b'"%b"\n' % (b"y\n" * 2_000_000),
            "a row of .*1 MiB",
        ),
        ("first.jsonl", b'{"a": "%b"}\n' % (b"y" * 4_000_000), "a row of .*1 MiB.*read_json"),
    ],
    ids=["ragged", "latin", "broken", "late key", "long row", "long first row"],
)
def test_text_files_with_faults_are_named(
    tmp_path: Path, name: str, data: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InferError, match=rf"{name} has .*{told}"):
        sources.source(tmp_path / name)


def test_types_of_pandas_are_not_those_of_columns_that_replace_its_own() -> None:
    table = pa.Table.from_pandas(pd.DataFrame({"label": ["a", "b"], "x": [1.0, 2.0]}))

    def relabel(chunk: pa.Table) -> pa.Table:
        return pa.table({"label": [5] * chunk.num_rows})

    for options in (InferOptions(columns=("x",)), InferOptions(replace=("label",))):
        found = predicted(table, relabel, options).to_pandas()
        assert found["label"].tolist() == [5, 5] and found["label"].dtype == np.int64


def test_enums_of_a_lazy_frame_stay_enums() -> None:
    kind = pl.Enum(["low", "high"])
    frame = pl.LazyFrame({"a": ["high", "low"]}, schema={"a": kind})
    done = predicted(frame, counted)
    assert done.collect_schema()["a"] == kind
    assert done.sort("a").collect()["a"].to_list() == ["low", "high"]


def test_files_that_differ_in_the_ends_of_their_names_are_all_in_the_result(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number, name in enumerate(["e.jsonl.1", "e.jsonl.2", "e.jsonl", "e.json"]):
        (data / name).write_text(f'{{"a": {number}}}\n')
    done = predicted(data, counted)
    assert sorted(pq.read_table(done)["a"].to_pylist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("changed", [{"a": [1, 2]}, {"a": [1, 2, 3, 4]}, {"b": [1, 2, 3]}])
def test_a_file_that_changes_during_the_run_ends_it(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    for name in ("one", "two"):
        pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / f"{name}.parquet")
    chunks = sources.source(tmp_path, tmp_path.with_name("new")).chunks(1)
    pq.write_table(pa.table(changed), tmp_path / "two.parquet")
    with pytest.raises(InferError, match=r"two\.parquet was changed during the run"):
        list(chunks)


def test_a_dataset_is_read_as_far_as_somebody_asks(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).random(400_000)
    for country in ("de", "fr"):
        path = tmp_path / f"country={country}" / "part.parquet"
        path.parent.mkdir()
        rows = pa.table({f"x{n}": numbers for n in range(8)})
        pq.write_table(rows, path, 20_000, use_dictionary=False, compression="none")
    data = ds.dataset(tmp_path, partitioning="hive")
    before, most, rows = pa.total_allocated_bytes(), 0, []
    for chunk in sources.source(data).chunks(4_000):
        time.sleep(0.001)
        most = max(most, pa.total_allocated_bytes() - before)
        rows.append(chunk.column("country"))
    assert most < 20 << 20  # of 51 MB; a row group is 1.3 MB
    assert pa.chunked_array([part for each in rows for part in each.chunks]).equals(
        data.to_table()["country"]
    )


def test_datasets_of_every_form_are_read_in_their_order(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", 0, 12)
    pq.write_table(pa.table({"a": range(12, 20), "b": ["x"] * 8}), tmp_path / "1.parquet")
    schema = pa.schema({"a": pa.int64(), "b": pa.string()})
    data = ds.dataset(tmp_path, schema=schema)  # without `b` in the first file
    (tmp_path / "rows.csv").write_text("a\n1\n2\n")
    for each in (
        data,
        data.filter(ds.field("a") > 5),
        ds.dataset([data.to_table(), data.to_table()]),
        ds.dataset([data, data]),
        ds.dataset(tmp_path / "rows.csv", format="csv"),
    ):
        whole = each.to_table()
        done = predicted(each, counted)
        assert done.select(whole.schema.names).equals(whole) and done["n"].null_count == 0


def test_a_folder_is_answered_with_a_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number, n_rows in enumerate([7, 0, 11, 1]):
        write(data / f"part-{number}.parquet", 100 * number, n_rows)
    (data / "_SUCCESS").touch()
    done = predicted(str(data), counted)
    assert done == str(tmp_path / "data-inferred")
    files = sorted(Path(done).iterdir())
    assert [file.name for file in files] == [f"part-{number}.parquet" for number in range(4)]
    assert [pq.read_metadata(file).num_rows for file in files] == [7, 0, 11, 1]
    assert pq.read_table(done)["a"].to_pylist() == pq.read_table(data)["a"].to_pylist()
    assert predicted(data, counted) == tmp_path / "data-inferred-2"
    assert predicted(f"{data}/part-[02].parquet", counted) == f"{data}-inferred-3"


def test_columns_of_hive_folders_are_kept(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number, country in enumerate(["de", "fr"]):
        write(data / f"country={country}" / "part.parquet", number * 10, 3)
    assert sources.source(data).schema.names == ["a", "country"]
    done = pq.read_table(predicted(data, counted), partitioning="hive").to_pydict()
    assert list(done) == ["a", "n", "country"] and done["country"] == ["de"] * 3 + ["fr"] * 3
    only = predicted(data, counted, InferOptions(columns=("a",)))
    assert pq.read_table(only).to_pydict() == {"a": [0, 1, 2, 10, 11, 12], "n": [1.5] * 6}


def test_what_pandas_wrote_is_read_by_pandas(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"a": pd.array([1, None, 3], "Int64")}, index=pd.Index([5, 6, 7], name="i")
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    done = pd.read_parquet(predicted(tmp_path / "rows.parquet", counted))
    pd.testing.assert_frame_equal(done[["a"]], frame)
    assert done["n"].tolist() == [1.5] * 3


def test_each_file_of_a_folder_keeps_its_own_index(tmp_path: Path) -> None:
    """Also if it is written again, since a later one has a wider type."""
    frames = [pd.DataFrame({"x": range(n, n + 10)}, pd.RangeIndex(n, n + 10)) for n in (5, 20)]
    data = tmp_path / "data"
    data.mkdir()
    for number, frame in enumerate(frames):
        frame.to_parquet(data / f"{number}.parquet")
    source = sources.source(data)
    result = source.result(ALL)
    (chunk,) = source.chunks(20)
    for first_row, kind in ((0, pa.int64()), (10, pa.float64())):
        result.begin(pa.schema({"n": kind}))
        rows = chunk.slice(first_row, 10)
        result.put(first_row, pa.table({"n": pa.array([1] * 10, kind)}), rows)
    done = result.finish()
    for number, frame in enumerate(frames):
        found = pd.read_parquet(done / f"{number}.parquet")
        pd.testing.assert_frame_equal(found, frame.assign(n=1.0))


def test_other_metadata_than_that_of_pandas_stays(tmp_path: Path) -> None:
    table = pa.Table.from_pandas(pd.DataFrame({"a": pd.Categorical(list("aba")), "b": [1, 2, 3]}))
    table = table.replace_schema_metadata({**table.schema.metadata, b"geo": b"{}"})
    pq.write_table(table, tmp_path / "rows.parquet")
    path = predicted(tmp_path / "rows.parquet", counted, InferOptions(columns=("b",)))
    assert list(pd.read_parquet(path)) == ["b", "n"]
    assert pq.read_schema(path).metadata[b"geo"] == b"{}"


def test_nothing_is_written_over_and_nothing_left(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.parquet", 0, 10)
    taken = write(tmp_path / "taken.parquet", 5, 1)
    with pytest.raises(InferError, match="already exists"):
        predicted(rows, counted, target=taken)
    for data in (rows, tmp_path):
        source = sources.source(data)
        result = source.result(ALL)
        first, *rest = source.chunks(3)
        result.begin(counted(first).schema)
        early = rest[0].slice(0, 2)
        result.put(first.num_rows, counted(early), early)
        assert result.n_waiting == 1
        result.put(0, counted(first), first)
        assert result.n_waiting == 0
        with pytest.raises(InferError, match="are missing"):
            result.finish()
        result.abort()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.parquet", "taken.parquet"]
    assert predicted(rows, counted, target=tmp_path / "new.parquet") == tmp_path / "new.parquet"
    assert [path for path in tmp_path.parent.iterdir() if path.name.endswith(".part")] == []


def test_a_target_that_cannot_be_is_refused_before_anything_runs(tmp_path: Path) -> None:
    data = tmp_path / "data"
    rows = write(data / "rows.parquet", 0, 10)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    for frame, target, said in (
        (rows, tmp_path / "none" / "new.parquet", f"there is no folder {tmp_path / 'none'}"),
        (rows, tmp_path, f"is a folder.*such as {tmp_path / 'rows.parquet'}"),
        (data, data / "scored", r"scored is among the data .*data/\*\*"),
        (data / "*.parquet", data / "new.parquet", r"new.parquet is among the data .*\*.parquet"),
        (data / "**" / "*.parquet", data / "new", r"new is among .*\*.parquet"),
        (tmp_path / "*", tmp_path / "new", r"new is among .*\*"),
        (data / ".." / "data" / "*.parquet", data / "new.parquet", r"new.parquet is among"),
        (data / "*.parquet", data / ".." / "data" / "new.parquet", r"new.parquet is among"),
        (rows, locked / "new.parquet", "locked is not writable: choose another path with --out$"),
    ):
        if target.parent == locked and os.geteuid() == 0:
            continue  # root may write anywhere
        with pytest.raises(InferError, match=said):
            sources.source(frame, target).result(ALL)
    assert predicted(data, counted, target=tmp_path / "scored") == tmp_path / "scored"


def test_a_column_without_a_value_can_be_written(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.parquet", 0, 10)

    def empty(chunk: pa.Table) -> pa.Table:
        n_rows = chunk.num_rows
        records = pa.array([{"error": None}] * n_rows, pa.struct({"error": pa.null()}))
        tags = pa.array([[]] * n_rows, pa.list_(pa.null()))
        return pa.table({"nothing": pa.nulls(n_rows), "tags": tags, "records": records})

    done = pq.read_table(predicted(rows, empty))
    assert done["tags"].to_pylist() == [[]] * 10 and done["nothing"].null_count == 10
    assert done["records"].to_pylist() == [{"error": None}] * 10


def test_a_part_of_hive_s_has_no_result_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "country=de" / "part.parquet", 0, 3)
    with pytest.raises(InferError, match=r"another partition: choose a path with --out PATH"):
        predicted(tmp_path / "country=de", counted)
    done = predicted(tmp_path / "country=de", counted, target=tmp_path / "new")
    assert pq.read_table(done)["a"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize("is_folder", [False, True])
def test_another_cell_may_change_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    write(tmp_path / "data" / "rows.parquet", 0, 10)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    source = sources.source("data" if is_folder else "data/rows.parquet")
    result = source.result(ALL)
    monkeypatch.chdir(tmp_path / "elsewhere")
    (chunk,) = source.chunks(100)
    result.begin(counted(chunk).schema)
    result.put(0, counted(chunk), chunk)
    assert pq.read_table(result.finish()).num_rows == 10
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert predicted("data/rows.parquet", counted) == "data/rows-inferred" + (
        ".parquet" if is_folder else "-2.parquet"
    )


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, is_folder: bool) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = write(folder / "rows.parquet", 0, 5_000)
    frame, target = (folder, tmp_path / "new") if is_folder else (rows, folder / "new.parquet")
    said = rf"cannot be written to .*{target.name}: .*too large"
    with disk_full_at(4096), pytest.raises(InferError, match=said):
        predicted(frame, doubled, batch_size=1_000, target=target)
    assert [path.name for path in tmp_path.rglob("*")] == ["rows", "rows.parquet"]


def test_files_that_differ_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 3)
    pq.write_table(pa.table({"b": [1]}), tmp_path / "b.parquet")
    with pytest.raises(InferError, match=r"b\.parquet and the files before it differ in 'a', 'b'"):
        sources.source(tmp_path)
    pq.write_table(pa.table({"a": ["text"]}), tmp_path / "b.parquet")
    with pytest.raises(InferError, match=r"b\.parquet has a column of another type"):
        sources.source(tmp_path)
    pq.write_table(pa.table({"a": pa.nulls(2)}), tmp_path / "b.parquet")
    assert pq.read_table(predicted(tmp_path, counted))["a"].to_pylist() == [0, 1, 2, None, None]
    (tmp_path / "notes.txt").write_text("no data")
    with pytest.raises(InferError, match=r"notes\.txt"):
        sources.source(tmp_path)
    with pytest.raises(InferError, match="there are no files"):
        sources.source(tmp_path / "*.csv")


def test_what_parquet_cannot_hold_is_named(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.parquet", 0, 3)
    interval = pa.array([pa.MonthDayNano([1, 2, 3])] * 3)
    with pytest.raises(MisfitError, match="'span'"):
        predicted(rows, lambda chunk: pa.table({"span": interval[: chunk.num_rows]}))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
