"""``predict`` over rows: whatever it takes and returns, the same as in one call, or an error that helps."""

from __future__ import annotations

import datetime as dt
import decimal
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.pandas_source import PandasSource
from hydrogen_magic.node.prediction.ddl import name_of, parse_schema, spark_schema
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.predictor import ChunkOutput, Predictor
from hydrogen_magic.node.prediction.schema_unify import fit_table
from hydrogen_magic.node.prediction.shared_buffers import BufferReader, BufferWriter
from tests import infer_data as data

ALL = InferOptions(only=True)
COLLECT = InferOptions(only=True, on_error="collect")


def run(predict: Any, table: pa.Table, sizes: tuple[int, ...] = (7,), **options: Any) -> pa.Table:
    """Return the predicted columns of all of ``table``, sent in chunks of ``sizes`` rows."""
    predictor = Predictor(predict, InferOptions(**{"batch_size": 3, "only": True, **options}))
    outputs = [predictor.run(chunk, first) for first, chunk in data.cuts(table, sizes)]
    assert predictor.schema is not None
    predictor.close()
    return pa.concat_tables(
        [
            predictor.schema.empty_table(),
            *(fit_table(output.columns, predictor.schema) for output in outputs),
        ]
    )


def frame(n_rows: int = 10) -> pa.Table:
    return pa.table({"x": np.arange(n_rows, dtype=np.float32), "n": np.arange(n_rows)})


# ── the same as in one call ──────────────────────────────────────────────────────────────────────


def taking(kind: Any, function: Callable[[Any], Any] = lambda batch: batch) -> Callable[[Any], Any]:
    """Return a predict whose argument is annotated with ``kind``; by default it returns the batch."""

    def predict(batch: Any) -> Any:
        return function(batch)

    predict.__annotations__["batch"] = kind
    return predict


def echo_stream(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yield from batches


def echo_reading_ahead(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    last = None
    for batch in batches:
        if last is not None:
            yield last
        last = batch
    if last is not None:
        yield last


NUMBERS = (*data.WHOLE, *data.FLOATS)
FOR_TORCH = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.float32())
BY_VALUE = (pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.binary(), data.DECIMAL)
BY_VALUE = (*BY_VALUE, pa.date32(), pa.timestamp("us"), data.BERLIN, data.NESTED[0], data.NESTED[2])
FOR_PANDAS = (*data.FLAT, *data.ENCODED, data.NESTED[0], data.NESTED[2])
FOR_NUMPY = (*NUMBERS, pa.bool_(), pa.date32(), pa.timestamp("us"), pa.timestamp("ms"))

FOR_SERIES = (pa.float64(), pa.string(), *data.TIMES, data.DECIMAL)


def by_name(column: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return taking(pa.Table, lambda rows: {name: column(rows[name]) for name in rows.column_names})


OF_ARROW = (
    taking(pa.Table),
    taking(pa.RecordBatch),
    echo_stream,
    echo_reading_ahead,
)
OF_PYTHON = (by_name(pa.ChunkedArray.to_pylist), taking(pa.Table, pa.Table.to_pylist))
SAME: dict[str, tuple[tuple[Any, ...], tuple[pa.DataType, ...], bool, bool]] = {
    # predicts, types that they can carry, may there be nulls, is NaN null on the way
    "table, record batch, stream, reading ahead": (OF_ARROW, data.EVERYTHING, True, False),
    "pandas": ((lambda batch: batch,), FOR_PANDAS, True, True),
    "polars": ((taking(pl.DataFrame),), (*data.FLAT, *data.SHAPED, *data.NESTED), True, False),
    "arrays": ((taking(dict[str, np.ndarray]),), (*FOR_NUMPY, *data.SHAPED), False, False),
    "tensors": ((taking(dict[str, torch.Tensor]),), (*FOR_TORCH, *data.SHAPED), False, False),
    "lists, records": (OF_PYTHON, BY_VALUE, True, False),
    "series": ((by_name(pa.ChunkedArray.to_pandas),), FOR_SERIES, True, True),
}


@pytest.mark.parametrize(("predicts", "kinds", "nulls", "nan_is_null"), SAME.values(), ids=SAME)
@given(draw=st.data())
@settings(max_examples=40)
def test_what_comes_out_is_what_went_in(
    predicts: tuple[Any, ...],
    kinds: tuple[pa.DataType, ...],
    nulls: bool,
    nan_is_null: bool,
    draw: Any,
) -> None:
    """Values, order and types, wherever chunks and batches are cut. To draw a table takes longest."""
    table = draw.draw(data.tables(kinds, nulls=nulls).filter(len))
    sizes = tuple(draw.draw(st.lists(st.integers(1, 11), min_size=1, max_size=4)))
    batch_size = draw.draw(st.integers(1, 8))
    for predict in predicts:
        found = run(predict, table, sizes, batch_size=batch_size)
        assert_same(found, table, kinds, nan_is_null)


def assert_same(
    found: pa.Table, table: pa.Table, kinds: tuple[pa.DataType, ...], nan_is_null: bool
) -> None:
    assert found.column_names == table.column_names
    if kinds is data.EVERYTHING:
        assert found.schema == table.schema
    for name in table.column_names:
        assert data.alike(
            found[name].to_pylist(), table[name].to_pylist(), nan_is_null=nan_is_null
        ), name
        if found[name].null_count < len(table):
            assert same_kind(found.field(name).type, table.field(name).type)


def same_kind(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether types hold the same values: text may be large, decimals wider, times finer."""
    if pa.types.is_time(one) and pa.types.is_time(other):
        return True
    if pa.types.is_dictionary(one) and pa.types.is_dictionary(other):
        return same_kind(one.value_type, other.value_type)
    plain = [str(kind).replace("large_", "").partition("<")[0] for kind in (one, other)]
    return plain[0] == plain[1] or (
        pa.types.is_decimal(one) and one.scale == other.scale and one.precision >= other.precision
    )


LARGE = 2**53 + 1
LISTS = [[LARGE, None], None, [5], [6, 7]]
ENCODINGS = (
    pa.array(LISTS, pa.list_view(pa.int64())),
    pa.array(LISTS, pa.large_list_view(pa.int64())),
    pa.array([[cell] for cell in LISTS], pa.list_(pa.list_view(pa.int64()), 1)),
    pa.array([{"of": cell} for cell in LISTS], pa.struct({"of": pa.list_view(pa.int64())})),
    pa.ListArray.from_arrays([0, 2, 2, 4], pa.array([LARGE, None, 5, LARGE]).dictionary_encode()),
    pa.RunEndEncodedArray.from_arrays([1, 2, 4], pa.array([LARGE, None, 7])),
    pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0], pa.int8())),
    pa.array(["a", None, "b"], pa.string_view()),
    pa.array([b"a", None, b"\xff"], pa.binary_view()),
    pa.array([["a", None], None, []], pa.list_(pa.string_view())),
    pa.DictionaryArray.from_arrays(pa.nulls(4, pa.int8()), pa.nulls(0)),
    pa.DictionaryArray.from_arrays([0, 1, None, 2], LISTS[1:]),
    pa.DictionaryArray.from_arrays([0, 1, None, 2], pa.array(["a", None, "b"])),
)


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame, pa.Table])
@pytest.mark.parametrize("column", ENCODINGS, ids=lambda column: str(column.type))
def test_values_of_rare_encodings_are_exact(column: pa.Array, kind: type) -> None:
    found = run(taking(kind, lambda rows: {"y": rows["x"]}), pa.table({"x": column}))["y"]
    assert repr(found.to_pylist()) == repr(column.to_pylist())
    found.unify_dictionaries().drop_null()  # as for a result
    assert not any(word in str(found.type) for word in ("view", "run", "dictionary", "extension"))


TEXTS = pa.array(["a", "b", "a"])
CATEGORIES = TEXTS.dictionary_encode()
TIMES = pa.array([1, None, 86_399_999_999_999], pa.time64("ns"))
IS_NULL = pa.array([True, False, False])
REBUILT = (
    (pa.RunEndEncodedArray.from_arrays([1, 2, 3], TIMES), TIMES),
    (
        pa.StructArray.from_arrays([CATEGORIES, TIMES], ["of", "of"], mask=IS_NULL),
        pa.StructArray.from_arrays([TEXTS, TIMES], ["of", "of"], mask=IS_NULL),
    ),
    (
        pa.MapArray.from_arrays([0, 2, 3], TEXTS, CATEGORIES).slice(1),
        pa.MapArray.from_arrays([0, 1], TEXTS[2:], TEXTS[2:]),
    ),
    (
        pa.ListViewArray.from_arrays(
            [2, 9, 0], [1, 0, 3], TIMES, mask=pa.array([False, True, False])
        ),
        pa.ListArray.from_arrays([0, None, 1, 4], TIMES.take(pa.array([2, 0, 1, 2]))),
    ),
)


@pytest.mark.parametrize(("column", "plain"), REBUILT, ids=lambda column: str(column.type))
def test_rare_encodings_are_rebuilt_from_their_parts(column: pa.Array, plain: pa.Array) -> None:
    found = run(taking(pa.Table, lambda rows: {"y": rows["x"]}), pa.table({"x": column}))["y"]
    assert found.combine_chunks().equals(plain)


def test_categories_inside_structs_and_lists_stay_in_polars() -> None:
    lists = pa.ListArray.from_arrays([0, 1, 2, 3], CATEGORIES)
    table = pa.table({"x": pa.StructArray.from_arrays([CATEGORIES, lists], ["a", "b"])})
    found = run(taking(pl.DataFrame, lambda rows: [str(rows.schema["x"])] * len(rows)), table)
    expected = str(pl.Struct({"a": pl.Categorical, "b": pl.List(pl.Categorical)}))
    assert found["prediction"].to_pylist() == [expected] * 3


# ── what predict takes ───────────────────────────────────────────────────────────────────────────


def test_numbers_side_by_side_and_shapes() -> None:
    images = np.arange(10 * 12, dtype=np.uint8).reshape(10, 3, 4)
    table = frame().append_column("image", pa.FixedShapeTensorArray.from_numpy_ndarray(images))
    seen: list[Any] = []

    def matrix(batch: np.ndarray) -> Any:
        seen.append((batch.dtype, batch.shape[1:]))
        return batch.sum(axis=1)

    def image(batch: torch.Tensor) -> Any:
        seen.append((batch.dtype, tuple(batch.shape[1:])))
        return batch.sum(dim=(1, 2))

    assert run(matrix, frame())["prediction"].to_pylist() == [2.0 * n for n in range(10)]
    assert run(image, table)["prediction"].to_pylist() == images.sum(axis=(1, 2)).tolist()
    assert set(seen) == {(np.dtype("float64"), (2,)), (torch.uint8, (3, 4))}


def test_lists_of_one_length_are_a_tensor_and_ragged_ones_say_why_not() -> None:
    def predict(batch: torch.Tensor) -> Any:
        return batch.sum(dim=1)

    even = pa.table({"e": pa.array([[1.0, 2.0], [3.0, 4.0]])})
    assert run(predict, even)["prediction"].to_pylist() == [3.0, 7.0]
    with pytest.raises(InferError, match=r"rows 0 to 1 .*column 'e' is list<.*different lengths"):
        run(predict, pa.table({"e": [[1.0], [2.0, 3.0]]}))


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        *itertools.product(
            [[LARGE, None], [[LARGE], None], [[LARGE], [None]], [[[LARGE]], [None]]],
            [dict[str, np.ndarray], np.ndarray, torch.Tensor],
        ),
        (LISTS, dict[str, np.ndarray]),
    ],
    ids=str,
)
def test_integers_that_nulls_would_round_are_refused(column: list[Any], kind: Any) -> None:
    with pytest.raises(InferError, match=r"'ids' is int64 with nulls.* that no float can hold"):
        run(taking(kind, len), pa.table({"ids": column}))


def test_a_module_gets_floats_where_its_parameters_are_and_leaves_training() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.9), torch.nn.Linear(2, 1)).double()
    found = run(module, frame())
    with torch.no_grad():
        rows = torch.arange(10, dtype=torch.float64)
        expected = module.eval()(torch.stack([rows, rows], dim=1))
    assert found.schema == pa.schema([("prediction", pa.float64())])
    assert found["prediction"].to_pylist() == expected[:, 0].tolist()


def test_a_module_of_doubles_gets_all_digits() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.flatten() * self.one

    class WithDict(Scaled):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["x"] * self.one

    values = [2.0**24 + 1, 0.1]
    for module in (Scaled(), WithDict()):
        assert run(module, pa.table({"x": values}))["prediction"].to_pylist() == values


def test_a_module_can_be_trained_after_it_has_predicted() -> None:
    class Caching(torch.nn.Module):
        scale: torch.Tensor | None = None

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.scale = torch.ones(1) if self.scale is None else self.scale
            return layer(rows) * self.scale

    layer = torch.nn.Linear(2, 1)
    module = torch.nn.Sequential(Caching(), torch.nn.Dropout().eval())
    run(module, frame())
    assert [each.training for each in module.modules()] == [True, True, False]
    module(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None


def test_a_module_that_looks_up_gets_whole_numbers() -> None:
    module = torch.nn.Embedding(10, 4)
    table = pa.table({"token": np.arange(10, dtype=np.int16)})
    assert run(module, table).schema.types[0] == pa.list_(pa.list_(pa.float32(), 4), 1)


class Doubling:
    def __call__(self, batch: pl.DataFrame) -> pl.Series:
        return batch["x"] * 2

    def method(self, batch: pa.Table) -> Any:
        return {"y": [2 * value for value in batch["x"].to_pylist()]}


@pytest.mark.parametrize("predict", [Doubling(), Doubling().method], ids=["instance", "method"])
def test_instances_and_methods(predict: Any) -> None:
    assert run(predict, frame())[0].to_pylist() == [2.0 * n for n in range(10)]


def test_annotations_as_text_need_no_import_of_theirs() -> None:
    """A cell that begins with ``from __future__ import annotations`` names libraries in text only."""
    names: dict[str, Any] = {}
    text = (
        "def predict(batches: 'Iterator[pa.Table]'):\n  for b in batches: yield b['n'].to_numpy()"
    )
    exec(text, names)
    assert run(names["predict"], frame())["prediction"].to_pylist() == list(range(10))


@pytest.mark.parametrize(
    ("predict", "message"),
    [
        (None, "the cell defines no predict"),
        (5, "predict is a int, which cannot be called"),
        (Doubling, r"create an instance in the cell, predict = Doubling\(\)"),
        (lambda: 1, "cannot be called with one argument"),
        (lambda batch, model: 1, "cannot be called with one argument"),
    ],
)
def test_what_is_no_predict(predict: Any, message: str) -> None:
    with pytest.raises(InferError, match=message):
        Predictor(predict, ALL)


def test_what_no_batch_can_be() -> None:
    def wrong(batch: pd.Series) -> Any:
        return batch

    async def late(batch: pd.DataFrame) -> Any:
        return batch

    def rows(batch: pd.DataFrame) -> Any:
        yield from batch["x"]

    for predict, message in ((wrong, "Series"), (late, "async"), (rows, "Iterator")):
        with pytest.raises(InferError, match=message):
            Predictor(predict, ALL)


class Library:
    """As libraries have it: any of several kinds, or one that only their authors can read."""

    def either(self, rows: list[int] | np.ndarray | pd.DataFrame) -> Any:
        return rows["x"].to_numpy()  # type: ignore[call-overload]

    def own(self, rows: ArrayLike) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return rows["x"].to_numpy()


@pytest.mark.parametrize("name", ["either", "own"])
def test_a_library_s_method_gets_pandas(name: str) -> None:
    found = run(getattr(Library(), name), frame())
    assert found["prediction"].to_pylist() == list(range(10))


def test_two_columns_of_one_name() -> None:
    table = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])

    def by_place(batch):  # type: ignore[no-untyped-def]
        return batch.iloc[:, 0] * batch.iloc[:, 1]

    found = run(by_place, table)
    assert found[0].to_pylist() == [3, 8]
    with pytest.raises(InferError, match="more than one column 'a'"):
        run(taking(pl.DataFrame), table)


# ── iterators ────────────────────────────────────────────────────────────────────────────────────


def test_an_iterator_is_set_up_once_and_cleaned_up() -> None:
    told: list[str] = []

    def predict(batches: Iterator[pd.DataFrame]) -> Iterator[Any]:
        told.append("up")
        try:
            for batch in batches:
                yield batch["x"] * 2
        finally:
            told.append("down")

    assert run(predict, frame(20), (4,))["x"].to_pylist() == [2.0 * n for n in range(20)]
    assert told == ["up", "down"]


def test_an_iterator_answers_each_batch_once() -> None:
    def first_only(batches: Iterator[pa.Table]) -> Iterator[Any]:
        yield next(batches)["x"]

    def twice(batches: Iterator[pa.Table]) -> Iterator[Any]:
        for batch in batches:
            yield batch["x"]
            yield batch["x"]

    with pytest.raises(InferError, match=r"rows 3 to 5 .*returned before"):
        run(first_only, frame(), (10,))
    with pytest.raises(InferError, match="more than one output"):
        run(twice, frame(), (10,))


@pytest.mark.parametrize("on_error", ["fail", "null", "collect"])
def test_an_iterator_that_skips_a_batch_loses_step_with_the_others(on_error: str) -> None:
    """Later outputs were taken for those of earlier batches."""

    def skip(batches: Iterator[pa.Table]) -> Iterator[Any]:
        yield from (batch["x"] for batch in batches if batch["n"][0].as_py() != 3)

    with pytest.raises(InferError, match=r"at rows 9 to 11 .*, or before: predict returned before"):
        run(skip, frame(12), (12,), on_error=on_error)
    if on_error != "fail":  # the output of the last batch, a shorter one, does not fit
        with pytest.raises(InferError, match=r"or before: predict returned before"):
            run(skip, frame(10), (10,), on_error=on_error)


def permuted(labels: Any) -> pd.DataFrame:
    x = np.arange(len(labels), dtype=np.float64)[::-1]
    return pd.DataFrame({"x": x, "n": x * 2}, index=labels)


def test_default_labels_say_nothing_of_the_batch_s() -> None:
    """The batch has the numbers from 0 as labels, in the order of a shuffled frame."""
    rows = pa.Table.from_pandas(permuted([2, 0, 1]))

    def new_frame(batch: pd.DataFrame) -> Any:
        return pd.DataFrame({"y": batch["n"].to_numpy()})

    def by_label(batch: pd.DataFrame) -> Any:
        return batch["n"].sort_index()

    assert run(new_frame, rows)["y"].to_pylist() == [4.0, 2.0, 0.0]
    assert run(by_label, rows)["n"].to_pylist() == [4.0, 2.0, 0.0]


def test_equal_labels_in_another_order_are_refused() -> None:
    rows = pa.Table.from_pandas(permuted([0, 0, 1, 1]))
    for keep in (lambda batch: batch["n"], lambda batch: batch["n"].reset_index(drop=True)):
        assert run(keep, rows).column(0).to_pylist() == [6.0, 4.0, 2.0, 0.0]
    with pytest.raises(InferError, match="some of their labels are equal"):
        run(lambda batch: batch["n"].sort_values(), rows)


def test_columns_after_the_one_of_an_index_keep_their_values() -> None:
    indexed = pa.Table.from_pandas(
        pd.DataFrame({"x": [1.0, 2.0]}, index=pd.Index([5, 6], name="i"))
    )
    rows = indexed.append_column("k", pa.array([1, None])).append_column("s", pa.array([0.5, None]))

    def predict(batch):  # type: ignore[no-untyped-def]
        return {"k": batch["k"].fillna(7), "s": batch["s"].fillna(9.0)}

    assert run(predict, rows).to_pydict() == {"k": [1, 7], "s": [0.5, 9.0]}


# ── what it returns ──────────────────────────────────────────────────────────────────────────────

Returning = Callable[[pd.DataFrame], Any]


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (lambda b: b["x"].to_numpy(), pa.float32()),
        (lambda b: b["x"].to_numpy().reshape(-1, 1), pa.float32()),
        (lambda b: torch.tensor(b["x"].to_numpy(), requires_grad=True).to(torch.bfloat16), pa.float32()),
        (lambda b: torch.tensor(b["x"].to_numpy()).squeeze(), pa.float32()),
        (lambda b: b["x"].tolist(), pa.float64()),
        (lambda b: float(b["x"].iloc[0]) if len(b) == 1 else b["x"].tolist(), pa.float64()),
        (lambda b: pl.Series(b["x"].to_numpy()), pa.float32()),
        (lambda b: b["n"].array.astype("Int64"), pa.int64()),
        (lambda b: pa.array(b["x"]), pa.float32()),
        (lambda b: pd.DataFrame(b["x"].to_numpy()), pa.float32()),
    ],
)  # fmt: skip
def test_one_column_without_a_name(returned: Returning, kind: pa.DataType) -> None:
    """Ten rows in batches of three leave a batch of one row, where squeezing takes a dimension off."""
    found = run(lambda batch: returned(batch), frame(), (10,))
    assert found.schema == pa.schema([("prediction", kind)])
    assert found["prediction"].to_pylist() == list(range(10))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("bfloat16", pa.float32()), ("float8_e4m3fn", pa.float32()), ("int4", pa.int8())],
)
def test_types_of_jax_that_arrow_lacks(kind: str, expected: pa.DataType) -> None:
    dtype = getattr(pytest.importorskip("ml_dtypes"), kind)
    found = run(lambda batch: np.minimum(batch["x"].to_numpy(), 7).astype(dtype), frame())
    assert found.schema.field("prediction").type == expected
    assert found["prediction"].to_pylist() == [*range(8), 7, 7]


def test_an_embedding_is_one_column() -> None:
    def predict(batch: np.ndarray) -> Any:
        pairs = np.repeat(batch[:, :1], 4, axis=1).reshape(-1, 2, 2).squeeze()
        return {"e": pairs, "version": "a", "empty": np.zeros((len(batch), 2, 0))}

    found = run(predict, frame())
    assert found.schema.field("e").type == pa.list_(pa.list_(pa.float64(), 2), 2)
    assert found["e"].to_pylist() == [[[n, n], [n, n]] for n in range(10)]
    assert set(found["version"].to_pylist()) == {"a"}
    assert found["empty"].to_pylist() == [[[], []]] * 10


@pytest.mark.parametrize(
    ("buffer", "made"),
    [
        (np.zeros(3, np.float32), lambda x: x),
        (np.zeros(3, np.int64), pa.array),
        (np.zeros(3, np.int64), pl.Series),
        (np.zeros(3, np.int64), lambda x: pl.DataFrame({"y": x})),
        (np.zeros(3, np.int64), lambda x: pd.Series(x, copy=False)),
        (pd.array([0, 0, 0], "Int64"), lambda x: pd.Series(x, copy=False)),
    ],
    ids=["numpy", "arrow", "polars", "polars frame", "pandas", "array of pandas"],
)
def test_a_buffer_filled_again_for_every_batch(buffer: Any, made: Callable[[Any], Any]) -> None:
    def predict(batch: np.ndarray) -> Any:
        buffer[: len(batch)] = batch[:, 0].astype(int)
        return made(buffer[: len(batch)])

    assert run(predict, frame()).column(0).to_pylist() == list(range(10))


def test_pandas_rows_go_by_their_labels_if_they_are_the_batch_s() -> None:
    def by_label(batch):  # type: ignore[no-untyped-def]
        return batch[["n"]].sort_values("n", ascending=False)

    def by_place(batch):  # type: ignore[no-untyped-def]
        return batch[["n"]].set_axis(range(100, 100 + len(batch)))

    def by_count(batch):  # type: ignore[no-untyped-def]
        own = pd.DataFrame({"n": batch["n"].to_numpy()})
        return own.sort_values("n", ascending=False)

    def turned(batch):  # type: ignore[no-untyped-def]
        return pd.DataFrame({"n": batch["n"].to_numpy()})[::-1]

    for predict in (by_label, by_place, by_count, turned):
        assert run(predict, frame())["n"].to_pylist() == list(range(10)), predict


NOON = dt.datetime(2026, 1, 2, 12)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda b: None, "predict returned None"),
        (lambda b: b["x"].iloc[1:], r"2 rows in column 'x' \(pandas.*Series\) for the 3 rows"),
        (lambda b: b.iloc[1:], r"2 rows \(pandas.*DataFrame\) for the 3 rows"),
        (lambda b: 0.5, r"a single value \(float\) for the 3 rows"),
        (lambda b: {"a": 0.5}, r"a single value \(float\) for the 3 rows"),
        (lambda b: {}, "no columns: return at least one"),
        (lambda b: (b["x"].to_numpy(), b["n"].to_numpy()), "a tuple of 2 arrays"),
        (lambda b: {1, 2, 3}, "a set, which has no order"),
        (lambda b: {"a": [1, "b", None]}, "column 'a' .* no common type .*: convert them"),
        (lambda b: {"a": [2**70, 1, None]}, "column 'a' .* no common type .*: convert them"),
        (lambda b: {"a": [NOON.date(), NOON, None]}, "column 'a' .*others have a time"),
        (lambda b: {"a": [{"at": [NOON, NOON.astimezone()]}] * 3}, "some times have a time zone"),
        (lambda b: {"a": np.ones(3, complex)}, "column 'a' .*complex"),
        (
            lambda b: pl.DataFrame({"a": [Doubling()] * 3}),
            "column 'a' .*of Object.* no common type",
        ),
        (lambda b: {"a": pd.period_range("2026", periods=3, freq="D")}, r"column 'a' .*period\[D"),
        (lambda b: {"a": pd.interval_range(0, 3)}, "column 'a' .*interval"),
        (lambda b: pa.table([[1] * 3, [2] * 3], names=["a", "a"]), "two columns 'a'"),
    ],
)
def test_what_is_no_prediction(returned: Returning, message: str) -> None:
    with pytest.raises(InferError, match=rf"rows 0 to 2 \(counted from 0\): .*{message}"):
        run(lambda batch: returned(batch), frame())


# ── one schema ───────────────────────────────────────────────────────────────────────────────────


def by_batch(*columns: Any) -> Callable[[Any], Any]:
    """Return a predict that returns ``columns`` for one batch after the other."""
    waiting = list(columns)
    return lambda batch: {"y": waiting.pop(0)}


@pytest.mark.parametrize(
    "rows",
    [
        [None, 1.5],
        [[], None, ["a"]],
        [
            {"z": {"x": 0.5, "t": None}},
            {"z": {"x": None, "t": [None, None]}},
            {"z": {"x": None, "t": ["a"]}},
        ],
    ],
)
def test_a_first_batch_of_nulls_fixes_no_type(rows: list[Any]) -> None:
    found = run(by_batch(*([row] for row in rows)), frame(len(rows)), batch_size=1)
    found.validate(full=True)
    assert found["y"].to_pylist() == rows


WIDER = [
    ([1, 2, 3], pd.Series([0.5, None, 1.0]), pa.float64()),
    (np.ones(3, np.float32), np.ones(3), pa.float64()),
    (np.ones(3, np.int8), np.ones(3, np.uint8), pa.int16()),
    ([True] * 3, [2] * 3, pa.int64()),
    ([None] * 3, ["a"] * 3, pa.string()),
    ([math.nan] * 3, ["a", math.nan, "b"], pa.string()),
    ([math.nan] * 3, [[1], None, []], pa.list_(pa.int64())),
    ([math.nan, None, math.nan], [NOON, None, NOON], pa.timestamp("us")),
    ([[1]] * 3, [[0.5], None, []], pa.list_(pa.float64())),
    ([{"k": 1}] * 3, [{"k": 0.5, "l": "a"}] * 3, pa.struct({"k": pa.float64(), "l": pa.string()})),
    (np.ones((3, 2)), np.ones((3, 4)), pa.list_(pa.float64())),
    (pa.array(list("abc")).dictionary_encode(), ["d"] * 3, pa.string()),
    (decimal.Decimal("1.5"), 1.5, pa.float64()),
    *(
        (*(pa.array(values, kind(zone)) for zone in ("Asia/Tokyo", "+02:00")), kind("UTC"))
        for values, kind in (
            ([0, 1, 2], lambda zone: pa.timestamp("us", zone)),
            (
                [[{"at": n}] for n in range(3)],
                lambda zone: pa.list_(pa.struct({"at": pa.timestamp("us", zone)})),
            ),
        )
    ),
]


@pytest.mark.parametrize(("one", "other", "kind"), WIDER, ids=lambda each: str(each)[:20])
def test_types_become_wide_enough_for_all_rows(one: Any, other: Any, kind: pa.DataType) -> None:
    """In whatever order they come."""
    parts = [each if hasattr(each, "__len__") else [each] * 3 for each in (one, other)]
    found = [run(by_batch(*order), frame(6)) for order in (parts, parts[::-1])]
    assert [each.schema.types for each in found] == [[kind], [kind]]
    halves = found[0]["y"].to_pylist(), found[1]["y"].to_pylist()
    assert halves[0][:3] == halves[1][3:] and halves[0][3:] == halves[1][:3]


def test_predicted_categories_have_no_order() -> None:
    """Arrow would append those of later rows: lo, hi, mid."""
    orders = ["lo", "hi"], ["lo", "mid", "hi"]
    columns = [pd.Categorical(["hi", "lo", "hi"], order, ordered=True) for order in orders]
    found = run(by_batch(*columns), frame(6))["y"]
    assert found.to_pylist() == ["hi", "lo", "hi"] * 2
    assert not found.type.ordered


@pytest.mark.parametrize("wrap", [lambda row: row, lambda row: [row]], ids=["struct", "list"])
def test_structs_get_all_fields_in_the_order_of_the_first_rows(wrap: Callable[[Any], Any]) -> None:
    rows = [
        {"a": 1, "b": 2},
        {"b": 20, "a": 10},
        {"c": 2**60 + 1},
        {"b": 0.5, "c": None},
        {},
    ]
    found = run(by_batch(*([wrap(row)] for row in rows)), frame(5), batch_size=1)
    names = ("a", "b", "c")
    assert found["y"].to_pylist() == [wrap({name: row.get(name) for name in names}) for row in rows]
    kind = pa.struct({"a": pa.int64(), "b": pa.float64(), "c": pa.int64()})
    assert found.schema.types == [kind if wrap(0) == 0 else pa.list_(kind)]


def test_values_inside_nested_types_are_checked() -> None:
    whole, date = dt.datetime(2026, 1, 2, 3), dt.date(2026, 1, 2)
    for schema, fits, too_wide in (
        ("y struct<a: int, b: int>", {"a": 1}, {"a": 0.5}),
        ("y struct<a: float, b: int>", {"a": 0.1}, {"a": 1e300}),
        ("y struct<of: array<float>>", {"of": [1.0, math.inf]}, {"of": [1.0, math.inf, 1e300]}),
        ("y struct<a: date, b: int>", {"a": date}, {"a": whole}),
        ("y struct<a: string, b: int>", ("x", 1), ("x", 0.5)),
        ("y map<string, int>", [("x", 1), ("z", None)], [("x", 1), ("z", 0.5)]),
        ("y map<string, float>", [("x", 0.1)], [("x", 1e300)]),
        ("y array<map<string, int>>", [[("x", 1)], None, []], [[("x", 0.5)]]),
        ("y struct<a: map<string, int>>", {"a": [("x", 1)]}, {"a": [("x", 0.5)]}),
        ("y map<string, int>", {"x": 1, "z": None}, {"x": 1, "z": 0.5}),
        ("y array<map<string, int>>", [{"x": 1}, {}], [{"x": 1}, {"y": 0.5}]),
    ):
        found = run(by_batch([fits, None, fits]), frame(3), schema=schema)
        assert found["y"].is_valid().to_pylist() == [True, False, True]
        with pytest.raises(InferError, match="but --schema declares"):
            run(by_batch([too_wide] * 3), frame(3), schema=schema)
    pairs = [[("x", 1)], None, []]
    for values in (pairs, [{"x": 1}, None, {}], pd.Series([{"x": 1}, None, {}])):
        found = run(by_batch(values), frame(3), schema="y map<string, int>")
        assert found["y"].to_pylist() == pairs


def test_nan_is_a_number_beside_numbers() -> None:
    nan = [math.nan] * 3
    for columns in ((nan, [1.5] * 3, nan), (nan, [None] * 3, [1] * 3), (nan, nan, nan)):
        found = run(by_batch(*columns), frame(9), (9,))["y"]
        assert found.type == pa.float64() and str(found.to_pylist()[:3]) == str(nan)
        with pytest.raises(InferError, match="as string, but as double for other rows"):
            run(by_batch([0.5] * 3, *columns, ["a"] * 3), frame(15), (15,))
    found = run(by_batch(nan, ["a"] * 3), frame(6), schema="y string")
    assert found["y"].to_pylist() == [None] * 3 + ["a"] * 3


@pytest.mark.parametrize(
    ("values", "kind", "shown"),
    [
        ([pd.Timestamp(1, unit="ns"), None], pa.timestamp("ns"), ".000000001"),
        ([[pd.Timestamp(1, unit="ns")], []], pa.list_(pa.timestamp("ns")), ".000000001"),
        (
            [np.array([pd.Timestamp(1, unit="ns")], object), None],
            pa.list_(pa.timestamp("ns")),
            ".000000001",
        ),
        (
            [{"at": pd.Timedelta(1, unit="ns")}, {}],
            pa.struct({"at": pa.duration("ns")}),
            "'at': 1}",
        ),
        ([pd.Timedelta(1, unit="ns"), pd.NaT], pa.duration("ns"), ".000000001"),
        ([pd.NaT, pd.Timestamp(2026, 1, 2)], pa.timestamp("us"), "2026-01-02"),
        (
            [np.datetime64("2026-01-02T03"), np.datetime64("NaT")],
            pa.timestamp("s"),
            "2026-01-02 03",
        ),
        ([np.timedelta64(5, "D"), np.timedelta64("NaT", "D")], pa.duration("s"), "5 days"),
    ],
)
def test_times_of_a_list_are_exact(values: list[Any], kind: pa.DataType, shown: str) -> None:
    for column in (values, np.array([*values, None], object)[:-1], pd.Series(values, dtype=object)):
        found = run(by_batch(column), frame(2))["y"]
        assert found.type == kind and shown in str(found.to_pandas().tolist())


def test_types_without_a_common_one_are_refused() -> None:
    for columns, kinds in (
        (([1] * 3, ["a"] * 3), "as string, but as int64 for other rows"),
        (([[1]] * 3, [["a"]] * 3), "as list<.*string>, but as list<.*int64> for other rows"),
        (([b"a"] * 3, ["a"] * 3), "as string, but as binary for other rows"),
    ):
        with pytest.raises(InferError, match=rf"rows 3 to 5 .*column 'y' {kinds}"):
            run(by_batch(*columns), frame(6))


DAY = dt.datetime(2026, 1, 2)


@pytest.mark.parametrize(
    "values",
    [
        [DAY, -1, None],
        [DAY, 0.5, None],
        [DAY.date(), 3, None],
        [dt.timedelta(1), 0, None],
        [dt.time(3), 5, None],
        [[DAY, 0], [DAY], []],
        [{"at": DAY}, {"at": np.int64(7)}, None],
        ["a", b"b", None],
        [b"a", "b", None],
    ],
)
def test_values_that_arrow_would_take_for_others(values: list[Any]) -> None:
    """It takes numbers after a time for times since 1970, and texts beside bytes for bytes."""
    for column in (values, pd.Series(values, dtype=object)):
        with pytest.raises(InferError):
            run(by_batch(column), frame(3))
        found = run(by_batch(column), frame(3), on_error="collect")["y"]
        assert "197" not in str(found.to_pylist()) and found.null_count <= 1
    fits = [DAY, math.nan, None]
    assert run(by_batch(fits), frame(3))["y"].null_count == 2
    if not isinstance(values[0], dict):
        with pytest.raises(InferError, match="no common Arrow type"):
            next(iter(PandasSource(pd.DataFrame({"x": values})).chunks(batch_size=3)))


def test_a_dict_is_no_list_and_a_list_no_struct() -> None:
    """Whatever type earlier rows had: their keys and places would be taken for values."""
    for first, second in (
        ([["a"]] * 3, [["b"], {"error": "timeout"}, ["c"]]),
        ([{"lo": 1, "hi": 2}] * 3, [{"lo": 1, "hi": 2}, [9, 8], None]),
    ):
        with pytest.raises(InferError):
            run(by_batch(first, second), frame(6))


def test_a_prediction_is_no_error_because_of_its_type_where_errors_are_collected() -> None:
    for columns, texts in (
        (([1] * 3, ["a", None, "b"]), ["1"] * 3 + ["a", None, "b"]),
        ((["a"] * 3, [1.5] * 3), ["a"] * 3 + ["1.5"] * 3),
        (([[1]] * 3, ["a"] * 3), ["[1]"] * 3 + ["a"] * 3),
        (
            ([1] * 3, pl.Series([dt.timezone.utc, 1, None], dtype=pl.Object)),
            ["1"] * 3 + ["UTC", "1", None],
        ),
    ):
        found = run(by_batch(*columns), frame(6), on_error="collect")
        assert found["y"].to_pylist() == texts
    mixed = Predictor(lambda b: {"y": ["a" if n % 2 else n for n in b["n"]]}, COLLECT).run(
        frame(4), 0
    )
    assert mixed.columns.to_pydict() == {"y": ["0", "a", "2", "a"], "error": [None] * 4}


@pytest.mark.parametrize("on_error", ["fail", "null", "collect"])
def test_types_that_are_fixed_cost_only_the_values_that_do_not_fit(on_error: str) -> None:
    """Neither other rows of their batch, nor other batches, nor a second call; and nothing is rounded."""
    late = [[1.0], [2.0]], [2**53 + 1] * 2
    batches = iter([([[0.5]] * 2, [1, 2]), (["n/a"] * 2, [0.5, 3.0]), late])

    def predict(batch):  # type: ignore[no-untyped-def]
        return dict(zip("yz", next(batches), strict=True))

    predictor = Predictor(predict, InferOptions(batch_size=2, on_error=on_error))
    first = pa.schema({"y": pa.list_(pa.float64()), "z": pa.int64()})
    predictor.adopt(first)
    predictor.target = (
        first.append(pa.field("error", pa.string())) if on_error == "collect" else first
    )
    output = predictor.run(frame(6), 0)
    found = output.columns.to_pydict()
    assert found["y"] == [[0.5], [0.5], None, None, [1.0], [2.0]]
    assert found["z"] == [1, 2, None, 3, 2**53 + 1, 2**53 + 1]
    assert not output.failures and output.misfits.keys() == {2, 3}
    if on_error == "collect":
        assert [text is not None for text in found["error"]] == [n in (2, 3) for n in range(6)]
        assert "0.5 in column 'z'" in found["error"][2] and "'n/a'" in found["error"][2]
    else:
        assert found.keys() == {"y", "z"}


def test_columns_that_change_halfway() -> None:
    waiting = [{"a": [1] * 3}, {"b": [1] * 3}]
    with pytest.raises(InferError, match=r"rows 3 to 5 .*without 'a' and with 'b'"):
        run(lambda batch: waiting.pop(0), frame(6))


def test_a_schema_that_was_asked_for() -> None:
    table = frame(3)
    for values in ([1.0, 2.0, None], np.array([1.0, 2.0, math.nan])):
        found = run(by_batch(values), table, schema="y int")
        assert found.schema.types == [pa.int32()] and found["y"].to_pylist() == [1, 2, None]
    found = run(by_batch([[1], [], None]), table, schema="y array<float>")
    assert found["y"].to_pylist() == [[1.0], [], None]
    with pytest.raises(InferError, match=r"'y' as double, but --schema declares int32.*1\.5"):
        run(by_batch([1.5] * 3), table, schema="y int")
    with pytest.raises(InferError, match=r"'y' as double, but --schema declares float .*range"):
        run(by_batch([1e300] * 3), table, schema="y float")
    with pytest.raises(InferError, match="give the times a time zone, or declare timestamp_ntz"):
        run(by_batch(pd.date_range("2026", periods=3)), table, schema="y timestamp")
    with pytest.raises(InferError, match=r"without 'y' and with 'k', but --schema declares 'y': "):
        run(lambda batch: [{"k": 1}] * len(batch), table, schema="y struct<k: int>")


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3.0),
        np.arange(3.0)[:, None],
        [0.0, 1.0, 2.0],
        pd.Series([0.0, 1.0, 2.0], name="other"),
        pa.array([0.0, 1.0, 2.0]),
    ],
)
def test_one_column_gets_the_only_name_of_the_schema(value: Any) -> None:
    found = run(lambda batch: value, frame(6), schema="score double")
    assert found.to_pydict() == {"score": [0.0, 1.0, 2.0] * 2}
    with pytest.raises(InferError, match="without 'score' and with 'other'"):
        run(lambda batch: {"other": value}, frame(6), schema="score double")


@pytest.mark.parametrize(
    "options", [ALL, InferOptions(on_error="collect")], ids=["fail", "collect"]
)
def test_ranks_agree_by_adopting_what_one_found(options: InferOptions) -> None:
    schema = Predictor(by_batch([1.5] * 3), options).run(frame(3), 0).columns.schema
    predictor = Predictor(by_batch([1, 2, 3]), options)
    predictor.adopt(schema)
    assert predictor.run(frame(3), 0).columns.schema == schema
    with pytest.raises(InferError, match="without 'z' and with 'y'"):
        predictor.adopt(pa.schema([("z", pa.int64())]))


def test_names_that_the_frame_has() -> None:
    def predict(batch):  # type: ignore[no-untyped-def]
        return batch["x"] * 2

    for on_error in ("fail", "null"):
        with pytest.raises(InferError, match=r"'x' that differs from the frame's.*--replace x"):
            run(lambda batch: {"x": predict(batch)}, frame(), only=False, on_error=on_error)
    for same in (predict, lambda batch: batch["x"], taking(pl.DataFrame, predict)):
        assert run(same, frame(), only=False).column_names == ["prediction"]
        predictor = Predictor(same, InferOptions())
        predictor.find_columns(frame().schema)
        assert predictor.schema is not None and predictor.schema.names == ["prediction"]
    assert run(predict, frame(), only=False, replace=("x",)).column_names == ["x"]
    assert run(predict, frame(), only=False, columns=("n",)).column_names == ["x"]
    with pytest.raises(InferError, match="which --on-error collect adds"):
        run(lambda b: {"error": b["x"]}, frame(), on_error="collect")


def test_a_function_predicts_the_columns_of_its_schema() -> None:
    """Whatever the names of its arguments are."""
    options: dict[str, Any] = {"only": False, "of_function": True}
    for change in (lambda x: x * 2, lambda x: x.clip(upper=6), lambda x: x):
        expected = change(frame()["x"].to_pandas()).tolist()
        for predict, schema in (
            (lambda b: change(b["x"]), "x float"),  # noqa: B023
            (lambda b: b.assign(x=change(b["x"]), y=1), "x float, y bigint"),  # noqa: B023
        ):
            found = run(predict, frame(), schema=schema, **options)
            assert found.column_names == schema.replace(",", "").split()[::2]
            assert found["x"].to_pylist() == expected
    added = run(lambda b: b.assign(y=1), frame(), schema="y bigint", **options)
    assert added.column_names == ["y"], "the others are those of the frame"
    with pytest.raises(InferError, match="'x' that differs from the frame's: do not change that"):
        run(lambda b: b.assign(x=0.5, y=1), frame(), schema="y bigint", **options)


OWN = pd.DataFrame(
    {
        "id": [1, 2, 3, 4],
        "x": [1.0, np.nan, 3.0, 4.0],
        "text": ["a", None, "c", "d"],
        "kind": pd.Categorical(list("abab")),
        "maybe": pd.array([1, None, 3, 4], "Int64"),
    }
)


@pytest.mark.parametrize(
    "predict",
    [
        lambda batch: batch.assign(score=1.5),
        lambda batch: batch.insert(0, "score", 1.5) or batch,
        lambda batch: batch.assign(score=1.5).sort_values("id", ascending=False),
        lambda batch: {"x": batch["x"], "kind": batch["kind"], "score": 1.5},
        taking(pa.Table, lambda batch: batch.append_column("score", [[1.5] * len(batch)])),
        taking(pl.DataFrame, lambda batch: batch.with_columns(score=pl.lit(1.5))),
        taking(dict[str, np.ndarray], lambda batch: {**batch, "score": 1.5}),
        taking(dict[str, torch.Tensor], lambda batch: {**batch, "score": 1.5}),
        taking(torch.Tensor, lambda batch: {"id": batch[:, 0].long(), "score": 1.5}),
        taking(np.ndarray, lambda batch: {"id": batch[:, 0], "score": [1.5] * len(batch)}),
    ],
)
def test_columns_that_are_returned_unchanged_are_the_frame_s(predict: Any) -> None:
    (chunk,) = PandasSource(OWN).chunks(batch_size=4)
    output = Predictor(predict, InferOptions(batch_size=2)).run(chunk, 0)
    assert output.columns.to_pydict() == {"score": [1.5] * 4}


def test_a_changed_column_needs_an_option_whatever_on_error_is() -> None:
    def predict(batch: pd.DataFrame) -> Any:
        batch.loc[batch["id"] == 3, "x"] = 0.0
        return batch.assign(score=1.5)

    (chunk,) = PandasSource(OWN).chunks(batch_size=4)
    for on_error in ("fail", "null"):
        with pytest.raises(InferError, match=r"column 'x' that differs .*--replace x"):
            Predictor(predict, InferOptions(batch_size=2, on_error=on_error)).run(chunk, 0)
    options = InferOptions(batch_size=2, replace=("x",))
    output = Predictor(predict, options).run(chunk, 0)
    assert output.columns.to_pydict() == {"x": [1.0, None, 0.0, 4.0], "score": [1.5] * 4}
    with pytest.raises(InferError, match="--replace id: predict returned no column 'id'"):
        Predictor(lambda batch: {"y": batch["x"]}, InferOptions(replace=("id",))).run(chunk, 0)
    text = taking(dict[str, torch.Tensor], lambda batch: {"text": list("aaaa")})
    with pytest.raises(InferError, match=r"column 'text' that differs"):
        Predictor(text, InferOptions()).run(chunk, 0)
    with pytest.raises(InferError, match=r"without a change: add a column"):
        Predictor(lambda batch: batch, InferOptions()).run(chunk, 0)


def test_maps_and_structs_of_lists_that_are_returned_unchanged_are_the_frame_s() -> None:
    """Their values alone show no type: pairs are tuples, and a list in a dict is an array."""
    pairs = pa.array([[("a", 1), ("b", 2)], [], None], pa.map_(pa.string(), pa.int32()))
    nested = pa.array([{"d": [1.0, 2.0]}, {"d": [3.0]}, None])
    rows = pa.RecordBatch.from_pydict({"id": [1, 2, 3], "pairs": pairs, "nested": nested})
    output = Predictor(lambda batch: batch.assign(n=1), InferOptions()).run(rows, 0)
    assert output.columns.to_pydict() == {"n": [1] * 3}
    with pytest.raises(InferError, match=r"column 'id' that differs .*--replace id"):
        Predictor(lambda batch: batch.assign(id=batch["id"] + 1, n=1), InferOptions()).run(rows, 0)


@pytest.mark.parametrize(
    "changed", [[0.5, 0.0, 0.7, 0.9], [7, 0, 8, 9], ["a", "b", "c", "d"], [True, True, True, False]]
)
def test_a_column_of_another_type_is_a_change(changed: list[Any]) -> None:
    """Each number that is not zero would become True, and a price its own by rounding."""
    flags = pd.DataFrame({"ok": [True, False, True, True], "price": [decimal.Decimal("1.23")] * 4})
    (chunk,) = PandasSource(flags).chunks(batch_size=4)
    for name, value in (("ok", changed), ("price", [1.2312] * 4)):
        with pytest.raises(InferError, match=f"column '{name}' that differs"):
            Predictor(lambda b, n=name, v=value: b.assign(**{n: v}, y=1), InferOptions()).run(
                chunk, 0
            )


def test_no_rows() -> None:
    def predict(batch: pa.Table) -> Any:
        raise AssertionError("called without rows")

    assert Predictor(predict, ALL).run(frame(0), 0) == ChunkOutput(pa.table({}))
    declared = Predictor(predict, InferOptions(schema="y double"))
    assert declared.run(frame(0), 0).columns.schema == pa.schema([("y", pa.float64())])


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def failing_at(*rows: int) -> Callable[[Any], Any]:
    def predict(batch):  # type: ignore[no-untyped-def]
        if batch["n"].isin(rows).any():
            raise ValueError("bad number")
        return {"y": batch["n"] * 2}

    return predict


def test_a_failing_batch_names_its_rows_and_shows_the_first() -> None:
    long = frame().append_column("text", pa.array(["ä" * 1000] * 10))
    long = long.append_column("list", pa.array([list(range(5000))] * 10))
    with pytest.raises(InferError, match="predict failed on rows 3 to 5 ") as caught:
        run(failing_at(4), long)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None
    batch, shown = str(caught.value).splitlines()[1:3]
    assert batch == "the batch: pd.DataFrame of 3 rows"
    assert "x=3.0, n=3, text='äää" in shown and "list=<list<" in shown and len(shown) < 240


@pytest.mark.parametrize(
    "cell",
    [
        pa.array([10**14], pa.timestamp("s")),
        pa.array([253402299000], pa.timestamp("s", "Europe/Berlin")),
        pa.array([0], pa.timestamp("s", "Nowhere/Town")),
        pa.array([10**7], pa.int32()).view(pa.date32()),
        pa.array([2**62], pa.int64()).view(pa.duration("s")),
        pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers()),
    ],
    ids=lambda cell: str(cell.type),
)
def test_a_row_that_python_cannot_show_hides_nothing(cell: pa.Array) -> None:
    def predict(batch: pa.Table) -> Any:
        raise ValueError("boom")

    with pytest.raises(
        InferError, match=r"boom\nthe batch: pa\.Table of 1 row\nthe first row: n=1, x="
    ):
        run(predict, pa.table({"n": [1], "x": cell}))


def test_a_stop_iteration_of_predict_is_its_error() -> None:
    with pytest.raises(InferError, match=r"predict failed on rows 0 to 2 .* StopIteration"):
        run(lambda batch: next(iter(())), frame(6))


def test_an_error_with_half_an_emoji_costs_its_row_alone() -> None:
    def predict(batch: Any) -> Any:
        if 4 in batch["x"].tolist():
            raise ValueError("bad \ud800")
        return {"y": batch["x"]}

    found = Predictor(predict, COLLECT).run(pa.table({"x": [3, 4, 5]}), 0)
    assert found.columns.to_pydict() == {
        "y": [3, None, 5],
        "error": [None, r"ValueError: bad \ud800", None],
    }


@pytest.mark.parametrize("on_error", ["null", "collect"])
def test_only_the_guilty_rows_are_lost(on_error: str) -> None:
    predictor = Predictor(failing_at(0, 37, 38), InferOptions(batch_size=16, on_error=on_error))
    output = predictor.run(frame(50), 1000)
    expected = [None if n in (0, 37, 38) else 2 * n for n in range(50)]
    assert output.columns["y"].to_pylist() == expected
    assert [failure.first_row for failure in output.failures] == [1000, 1037, 1038]
    assert output.failures[1].row == "x=37.0, n=37"
    if on_error == "collect":
        errors = output.columns["error"].to_pylist()
        assert errors[37] == "ValueError: bad number" and errors[36] is None
    assert output.columns.column_names == ["y", "error"][: 1 + (on_error == "collect")]


def test_rows_beside_many_guilty_ones_are_predicted() -> None:
    guilty = {*range(2048), *range(2050, 4096, 40)}
    output = Predictor(failing_at(*guilty), InferOptions(on_error="null")).run(frame(4096), 0)
    expected = [None if n in guilty else 2 * n for n in range(4096)]
    assert output.columns["y"].to_pylist() == expected


def test_rows_that_all_fail_cost_a_bounded_number_of_calls() -> None:
    calls: list[int] = []

    def predict(batch: pa.Table) -> Any:
        calls.append(len(batch))
        raise ValueError("never")

    output = Predictor(predict, InferOptions(on_error="null")).run(frame(4096), 0)
    assert len(calls) < 270
    assert output.columns.num_rows == 4096 and output.columns.num_columns == 0
    assert sum(f.last_row - f.first_row + 1 for f in output.failures) == 4096


def test_an_iterator_goes_on_after_the_rows_that_failed() -> None:
    def predict(batches: Iterator[pd.DataFrame]) -> Iterator[Any]:
        for batch in batches:
            yield failing_at(4)(batch)

    output = Predictor(predict, InferOptions(batch_size=3, on_error="null")).run(frame(), 0)
    assert output.columns["y"].to_pylist() == [None if n == 4 else 2 * n for n in range(10)]


def test_a_stop_is_no_failure_of_rows() -> None:
    def predict(batch: pa.Table) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Predictor(predict, InferOptions(on_error="null")).run(frame(), 0)


# ── types as text ────────────────────────────────────────────────────────────────────────────────


def test_types_as_text_and_those_of_spark() -> None:
    text = (
        "`a b` bigint, m map<string,struct<x:double,`y-z`:array<decimal(10,2)>>>, t timestamp,"
        " u timestamp_ntz, d date, raw binary, ok boolean, s smallint, b tinyint, f float"
    )
    row = pa.struct([("x", pa.float64()), ("y-z", pa.list_(pa.decimal128(10, 2)))])
    nested = [("a b", pa.int64()), ("m", pa.map_(pa.string(), row))]
    times = [("t", pa.timestamp("us", "UTC")), ("u", pa.timestamp("us")), ("d", pa.date32())]
    plain = [("raw", pa.binary()), ("ok", pa.bool_()), ("s", pa.int16()), ("b", pa.int8())]
    parsed = parse_schema(text)
    assert parsed == pa.schema([*nested, *times, *plain, ("f", pa.float32())])
    assert spark_schema(parsed) == parsed
    assert parse_schema("x: LONG, y Array<Str>").types == [pa.int64(), pa.list_(pa.string())]
    given = pa.schema([("e", pa.list_(pa.uint8(), 3)), ("k", pa.dictionary(pa.int8(), pa.utf8()))])
    assert spark_schema(given) == parse_schema("e array<smallint>, k string")
    assert [parse_schema(f"y {name_of(kind)}").types for kind in parsed.types] == [
        [kind] for kind in parsed.types
    ]
    lacking = pa.schema([("t", pa.time64("ns")), ("d", pa.duration("ns")), ("u", pa.uint64())])
    with pytest.raises(InferError, match=r"column 't' has type time64.*--on-error collect"):
        spark_schema(lacking)
    kinds = [pa.string(), pa.duration("us"), pa.decimal128(20, 0)]
    assert spark_schema(lacking, as_text=True).types == kinds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score", "has its end instead of a type"),
        ("score doubel", "did you mean double"),
        ("a int b int", "has 'b' instead of ','"),
        ("a array<int", "has its end instead of '>'"),
        ("a int, a int", "has two columns 'a'"),
        ("a decimal(40,2)", "at most 38 digits"),
        (" ", "has no column"),
        ("a " + "array<" * 60, "more than 50 levels deep"),
    ],
)
def test_text_that_is_no_schema(text: str, message: str) -> None:
    with pytest.raises(InferError, match=message):
        parse_schema(text)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("on_error", ["fail", "null"])
def test_what_predict_writes_into_a_batch_stays_there(on_error: str) -> None:
    """Numbers of a chunk that lies in memory shared with the kernel."""
    table = pa.table({f"x{n}": np.arange(n, n + 64, dtype=np.float32) for n in range(5)})
    told, fds = (writer := BufferWriter()).write(table)
    chunk = (reader := BufferReader()).view(told, fds)
    held = []

    def predict(batch: pd.DataFrame) -> Any:
        held.append(batch)
        values = torch.from_numpy(batch.to_numpy())
        total = values.sum(dim=1).clone()
        values -= 1000.0  # through what pandas says is read-only
        if on_error == "null" and total[-1] == 15 * 5 + 10:
            raise ValueError("the sixteenth row")
        return {"total": total}

    predictor = Predictor(predict, InferOptions(only=True, batch_size=16, on_error=on_error))
    output = predictor.run(chunk, 0)
    assert chunk.equals(table)
    expected = np.sum([table[name].to_numpy() for name in table.column_names], axis=0).tolist()
    if on_error == "null":
        expected[15] = None
        assert [failure.row for failure in output.failures] == [
            "x0=15.0, x1=16.0, x2=17.0, x3=18.0, x4=19.0"
        ]
    assert output.columns["total"].to_pylist() == expected
    for part in (writer, reader):
        part.close()
    del chunk, output
    gc.collect()
    held[0].iloc[0, 2] = -1.0  # whoever keeps a batch may go on with it
    assert held[0]["x4"].tolist()[:2] == [4.0 - 1000, 5.0 - 1000]


ARRAYS = dict[str, np.ndarray]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (pa.Table, lambda batch: batch["e"].chunk(0).flatten().to_numpy()),
        (pl.DataFrame, lambda batch: batch["e"].explode().to_numpy()),
        (pd.DataFrame, lambda batch: np.concatenate([batch["e"].iloc[0]])),
        (ARRAYS, lambda batch: batch["e"]),
        (ARRAYS, lambda batch: batch["s"][0]["of"]),
        (ARRAYS, lambda batch: batch["r"][-1]),
    ],
    ids=["table", "polars", "pandas", "arrays", "structs", "ragged"],
)
def test_what_is_written_through_torch_is_not_predicted_again(
    kind: Any, part: Callable[[Any], Any]
) -> None:
    """A batch that fails is tried again in parts, from the rows as they were."""
    numbers = np.arange(8.0)
    table = pa.table(
        {
            "x": numbers,
            "e": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 2)), 2),
            "r": [[n] * (n + 1) for n in range(8)],
            "s": [{"of": [float(n)]} for n in range(8)],
            "text": list("abcdefgh"),
        }
    )

    def predict(batch: Any) -> Any:
        x = torch.from_numpy(batch["x"] if kind == ARRAYS else batch["x"].to_numpy())
        x += 1
        torch.from_numpy(part(batch)).add_(1)
        if (x == 6).any():
            raise ValueError("row 5")
        return {"y": x}

    before = table.to_pylist()
    found = run(taking(kind, predict), table, (4, 4), on_error="null")
    assert found["y"].to_pylist() == [1, 2, 3, 4, 5, None, 7, 8]
    assert table.to_pylist() == before


@pytest.mark.parametrize("shape", ["one", "two", "listed", "ragged"])
def test_arrays_may_be_written(shape: str) -> None:
    numbers = pa.array(np.arange(6.0))
    columns: dict[str, Any] = {"x": numbers}
    if shape == "two":
        columns["y"] = numbers
    elif shape == "listed":
        columns["x"] = pa.FixedSizeListArray.from_arrays(numbers, 2)
    elif shape == "ragged":
        columns["x"] = [[1.0], [1.0, 2.0], []]

    def into_array(batch: np.ndarray) -> list[int]:
        batch[batch > 2] = 0
        return [int(batch.max())] * len(batch)

    def into_arrays(batch: dict[str, np.ndarray]) -> list[int]:
        parts = list(batch["x"] if shape == "ragged" else batch.values())
        for part in parts:
            part[part > 2] = 0
        return [int(max(part.max(initial=0) for part in parts))] * len(batch["x"])

    for predict in (into_arrays,) if shape == "ragged" else (into_array, into_arrays):
        assert set(run(predict, pa.table(columns)).column(0).to_pylist()) <= {0, 1, 2}


LABELS = (
    pd.Index([False, True]),
    pd.CategoricalIndex(["b", "a"]),
    pd.Index([b"b", b"a"]),
    pd.period_range("2026-01", periods=2, freq="M"),
    pd.Index([1.5, None]),
    pd.date_range("2026-01-01", periods=2, tz="Europe/Berlin"),
)


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [1.5, 2.5, 3.5], "b": [4.5, 5.5, float("nan")]}),
        pd.DataFrame(np.arange(6, dtype=np.int16).reshape(3, 2)),  # labels 0 and 1
        pd.DataFrame({"a": [1, 2, 3]}).rename_axis(columns="of"),
        pd.DataFrame({"a": pd.array([1, 2, 3], "Int64")}),
        pd.DataFrame({"a": pd.array([1, 2, 3], "int64[pyarrow]")}),
        pd.DataFrame({"a": [1, 2, 3], "b": [1.0, 2.0, 3.0]}),
        pd.DataFrame({"a": [True, False, True]}),
        *(pd.DataFrame(np.arange(6.0).reshape(3, 2), columns=labels) for labels in LABELS),
    ],
    ids=[
        *("floats", "int labels", "named labels", "nullable", "arrow", "mixed", "truth"),
        *(f"{labels.dtype} labels" for labels in LABELS),
    ],
)
def test_labels_dtypes_and_attrs_of_pandas_come_through(frame: pd.DataFrame) -> None:
    frame = frame.copy()
    frame.attrs["means"] = {"a": 2.0}
    held: list[pd.DataFrame] = []

    def predict(batch: pd.DataFrame) -> Any:
        held.append(batch)
        return [0] * len(batch)

    (chunk,) = PandasSource(frame).chunks(batch_size=3)
    predictor = Predictor(predict, InferOptions(batch_size=2))
    predictor.run(chunk, 0)
    assert [batch.attrs for batch in held] == [frame.attrs] * 2
    pd.testing.assert_frame_equal(pd.concat(held), frame)


@pytest.mark.parametrize("on_error", ["fail", "null"])
@pytest.mark.parametrize(
    "form",
    [
        lambda x: {"x": x},
        lambda x: {"x": torch.tensor(x)},
        lambda x: {"x": x[:, None]},
        lambda x: {"x": np.stack([x, -x], axis=1), "y": x.astype(np.int16)},
        lambda x: {"y": np.asfortranarray(np.stack([x, x + 1, x + 2], axis=1))[:, ::-1]},
        lambda x: torch.tensor(x[:, None] * np.float32([1, 2])),
        lambda x: x.astype(">f4"),
        lambda x: np.ma.masked_greater(x, 30),
        lambda x: x if x[0] < 20 or x[0] == 32 else pd.Series(x),
    ],
    ids=[
        "dict", "tensor", "column", "lists and numbers", "strided", "unnamed", "other end first",
        "masked", "now and then",
    ],
)  # fmt: skip
def test_numbers_come_out_as_in_one_call(form: Callable[[Any], Any], on_error: str) -> None:
    """Batches of them are put in their places where they fit there, and converted where not."""
    table = pa.table({"x": np.arange(48, dtype=np.float32)})

    def predict(batch: dict[str, np.ndarray]) -> Any:
        if on_error == "null" and (batch["x"] == 21).any():
            raise ValueError("twenty-one")
        return form(batch["x"].copy())

    options = InferOptions(only=True, batch_size=4, on_error=on_error)
    predictor = Predictor(predict, options)
    outputs = [predictor.run(table.slice(start, 16), start) for start in range(0, len(table), 16)]
    once = Predictor(lambda batch: form(batch["x"].to_numpy()), InferOptions(only=True))
    whole = once.run(table.slice(0, 20), 0).columns, once.run(table.slice(20), 20).columns
    expected = pa.concat_tables(whole)
    found = pa.concat_tables([output.columns for output in outputs])
    assert found.schema == expected.schema
    for name in expected.column_names:
        values = expected[name].to_pylist()
        if on_error == "null":
            values[21] = None
        assert found[name].to_pylist() == values


@pytest.mark.parametrize("column", [[1.0] * 40, list("ab") * 20], ids=["numbers", "text"])
def test_what_a_batch_s_labels_are_called_is_its_own(column: list[Any]) -> None:
    def predict(batch: pd.DataFrame) -> Any:
        found = batch.columns.name is None and batch.index.name is None
        batch.columns.name = batch.index.name = "mine"
        return [found] * len(batch)

    assert set(run(predict, pa.table({"x": column}), (20,)).column(0).to_pylist()) == {True}
