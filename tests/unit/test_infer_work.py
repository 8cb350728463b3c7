"""The chunk queue: which rows are next, whose columns count, and that each row is done once."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hydrogen_magic import capture
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import chunk_queue as works
from hydrogen_magic.inference import fingerprints, gang, sources
from hydrogen_magic.inference.chunk_queue import Chunk, ChunkQueue
from hydrogen_magic.inference.dispatcher import _MAX_GAPS, Dispatcher
from hydrogen_magic.inference.kept_parts import KeptAnswer
from hydrogen_magic.inference.parquet_result import Layout, ParquetResult, ResultFile
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.predictor import Predictor
from tests import infer_ranks

DOUBLES = pa.schema({"y": pa.float64()})


def next_of(book: ChunkQueue) -> Chunk:
    chunk = book.next()
    assert chunk is not None
    return chunk


class Rows:
    """A source of whole numbers, cut as it likes."""

    def __init__(self, n_rows: int, cut: int = 100) -> None:
        self.n_rows: int | None = n_rows
        self.schema = pa.schema({"x": pa.int64()})
        self._cut = cut
        self._total = n_rows

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        for start in range(0, max(1, self._total), self._cut):
            end = min(self._total, start + self._cut)
            yield pa.table({"x": pa.array(range(start, end), pa.int64())})


class Result:
    """Keeps what it is given."""

    n_waiting = 0

    def __init__(self, *, is_bounded: bool = False) -> None:
        self.is_bounded = is_bounded
        self.schema: Any = None
        self.parts: dict[int, pa.Table] = {}

    def begin(self, schema: pa.Schema) -> None:
        self.schema = schema

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table) -> None:
        assert first_row not in self.parts
        assert set(columns.schema.names) == set(self.schema.names)
        assert rows["x"].to_pylist()[:1] == [first_row]
        self.parts[first_row] = columns

    def finish(self) -> list[Any]:
        return [value for row in sorted(self.parts) for value in self.parts[row]["y"].to_pylist()]

    def abort(self) -> None:
        self.parts.clear()


def work(n_rows: int, n_ranks: int = 2, batch_size: int = 10) -> tuple[ChunkQueue, Result]:
    result = Result()
    return ChunkQueue(Rows(n_rows), result, InferOptions(batch_size=batch_size), n_ranks), result


def doubled(chunk: Chunk, kind: pa.DataType | None = None) -> pa.Table:
    values = pa.array([2 * x for x in chunk.table["x"].to_pylist()])
    return pa.table({"y": values.cast(kind or pa.float64())})


def texts(chunk: Chunk) -> pa.Table:
    return pa.table({"y": ["a"] * chunk.n_rows})


def nothing(chunk: Chunk) -> pa.Table:
    return pa.table({"y": pa.nulls(chunk.n_rows)})


@pytest.mark.parametrize("seed", range(5))
def test_of_two_answers_the_first_counts(seed: int) -> None:
    chance = random.Random(seed)
    book, result = work(1_234)
    in_hand: list[Chunk] = []
    n_late = 0
    while not book.is_done:
        if (chunk := book.next()) is not None:
            in_hand.append(chunk)
            if chance.random() < 0.5 and (again := book.second(chunk)) is not None:
                in_hand.append(again)
        taken = in_hand.pop(chance.randrange(len(in_hand)))
        if chance.random() < 0.1:
            book.give_back(taken)
        else:  # int32 is what those say who were not told yet
            kind = pa.float64() if taken.knows_columns or not taken.number else pa.int32()
            n_late += not book.answer(taken, doubled(taken, kind), ())
    assert n_late
    for late in in_hand:
        assert book.second(late) is None
        assert not book.answer(late, doubled(late), ())
        book.give_back(late)  # does nothing
    assert book.finish() == [2.0 * x for x in range(1_234)]
    assert (book.rows, book.in_flight) == (1_234, 0)
    assert result.schema == DOUBLES


def test_chunks_are_whole_batches_that_get_smaller() -> None:
    book, _ = work(1_000)
    first = next_of(book)
    book.answer(first, doubled(first), ())
    sizes = [chunk.n_rows for chunk in iter(book.next, None)]
    assert all(size % 10 == 0 for size in sizes)
    assert first.n_rows + sum(sizes) == 1_000
    assert sizes[0] > sizes[-1] == 10


def test_the_columns_are_those_of_the_first_rows_not_of_the_first_answer() -> None:
    book, result = work(200)
    first, second = next_of(book), next_of(book)
    book.answer(second, texts(second), ())
    assert result.schema is None
    book.answer(first, doubled(first), ())
    assert result.schema == DOUBLES
    again = next_of(book)
    assert again.number == second.number  # to be made with those columns
    book.answer(again, doubled(again), ())
    assert sorted(result.parts) == [first.first_row, second.first_row]


def test_columns_that_stay_different_are_an_error() -> None:
    book, _ = work(200)
    first, second = next_of(book), next_of(book)
    book.answer(first, doubled(first), ())
    book.answer(second, texts(second), ())
    again = next_of(book)
    with pytest.raises(InferError, match=r"rows \d+ to \d+ .*y string instead of y double"):
        book.answer(again, texts(again), ())


def test_a_wider_type_that_comes_late_is_the_one_of_all_rows() -> None:
    for kinds in ((pa.int64(), pa.float64()), (pa.float64(), pa.int64())):
        book, result = work(1_000)
        while (chunk := book.next()) is not None:
            book.answer(chunk, doubled(chunk, kinds[chunk.first_row > 500]), ())
        assert book.is_done and result.schema == DOUBLES
        assert book.widened == ({"y": ("int64", "double")} if kinds[0] == pa.int64() else {})
        assert book.finish() == [2.0 * x for x in range(1_000)]


LATE = {
    "times": (
        pa.array([253402214400_000_000], pa.timestamp("us")),
        pa.array([0], pa.timestamp("ns")),
    ),
    "integers": (pa.array([2**63 + 5], pa.uint64()), pa.array([-1])),
    "decimals": (
        pa.array([Decimal(10) ** 36], pa.decimal128(38, 0)),
        pa.array([Decimal("0.000001")], pa.decimal128(38, 6)),
    ),
}
PAIRS: dict[str, tuple[Any, Any]] = {
    **LATE,
    "one number of two": (pa.array([5]), [2**70]),
    "complex": (pa.array([5]), np.array([[1j, 2]])),
    "date and time": ([dt.date(2020, 1, 1)], [dt.datetime(2020, 1, 1, 12)]),
    "large text": (pa.array([1.5]), pa.array(["a"], pa.large_string())),
    "text views": (pa.array([1.5]), pa.array(["a"], pa.string_view())),
    "bytes": (["a"], [b"\xff"]),
    "lists": ([[1]], [["a"]]),
    "no UTF-8": ([1], ["\ud800"]),
    "only in memory": ([1], pa.array([pa.MonthDayNano([1, 2, 3])])),
}
"""Values without a common type, and some that do not fit into it."""


def value_of(column: Any) -> Any:
    value = column[0]
    return (
        value.as_py() if isinstance(value, pa.Scalar) else getattr(value, "tolist", lambda: value)()
    )


def collected(folder: Path, kind: str, columns: list[Any], *, are_known: bool) -> Any:
    """Return the result of one row per column with collected errors.

    ``are_known``: whether a rank predicts after the columns of the earlier rows are known.
    """
    frame = pa.table({"x": range(len(columns))})
    if kind == "parquet":
        (folder / "rows").mkdir()
        for name, rows in (("a", frame.slice(0, 1)), ("b", frame.slice(1))):
            pq.write_table(rows, folder / "rows" / f"{name}.parquet")
    source = sources.source(frame if kind == "memory" else folder / "rows")
    options = InferOptions(batch_size=1, on_error="collect", only=True)
    book = ChunkQueue(source, source.result(options), options, len(columns))
    ranks = [Predictor(lambda rows: columns[rows["x"].iloc[0]], options) for _ in columns]
    chunks = [] if are_known else [next_of(book) for _ in columns]
    for rank in ranks:
        chunk = chunks.pop(0) if chunks else next_of(book)
        if chunk.knows_columns:
            rank.adopt(book.schema)
        output = rank.run(chunk.table, chunk.first_row)
        assert not output.failures
        book.answer(chunk, output.columns, output.failures)
    assert book.next() is None
    result = book.finish()
    return result if kind == "memory" else pq.read_table(result)


@pytest.mark.parametrize("are_known", [True, False], ids=["in turn", "at once"])
@pytest.mark.parametrize("kind", ["memory", "parquet"])
@pytest.mark.parametrize("is_reversed", [False, True], ids=["", "reversed"])
@pytest.mark.parametrize("pair", PAIRS)
def test_if_errors_are_collected_no_type_is_one(
    pair: str, is_reversed: bool, kind: str, are_known: bool, tmp_path: Path
) -> None:
    """Whether the rank or the kernel sees both types first, and after rows have been written."""
    early, late = reversed(PAIRS[pair]) if is_reversed else PAIRS[pair]
    columns = [early, late, early]
    table = collected(tmp_path, kind, columns, are_known=are_known)
    assert table["error"].null_count == 3
    shown = [str(value_of(column)).replace("\ud800", "\\ud800") for column in columns]
    assert table["prediction"].to_pylist() == shown


def test_a_file_that_cannot_have_wider_types_is_as_it_was(tmp_path: Path) -> None:
    """Of two columns, the one whose written rows do not fit is text, and later rows follow."""
    early, late = LATE["integers"]
    columns = [{"y": early, "z": [1]}, {"y": late, "z": [1.5]}, {"y": early, "z": [2]}]
    table = collected(tmp_path, "parquet", columns, are_known=True)
    assert table["y"].to_pylist() == [str(2**63 + 5), "-1", str(2**63 + 5)]
    assert table["z"].to_pylist() == [1.0, 1.5, 2.0]


NUMBER, TEXT, DATE = pa.array([5]), pa.array(["a"]), pa.array([dt.date(2026, 1, 1)])
MISSING = {
    "text of pandas": [NUMBER, pd.Series([None], dtype="str"), NUMBER],
    "numbers of pandas": [TEXT, pd.Series([float("nan")]), TEXT],
    **{
        f"{kind} before {late.type}": [pa.nulls(1, kind), pa.nulls(1, pa.float64()), late]
        for kind in (pa.float64(), pa.int64(), pa.timestamp("us"))
        for late in (TEXT, DATE, pa.nulls(1, pa.string()))
    },
}
"""Batches, those with a value of one type."""


@pytest.mark.parametrize("on_error", ["fail", "collect"])
@pytest.mark.parametrize("name", MISSING)
def test_a_column_of_missing_values_has_the_type_of_other_rows(name: str, on_error: str) -> None:
    """pandas gives it a type, which is no reason to refuse rows, nor to make others text."""
    *_, last = waiting = MISSING[name][:]
    options = InferOptions(batch_size=1, on_error=on_error)
    expected = [None if pd.isna(value_of(batch)) else value_of(batch) for batch in waiting]
    predictor = Predictor(lambda batch: waiting.pop(0), options)
    column = predictor.run(pa.table({"x": [0, 1, 2]}), 0).columns["prediction"]
    assert column.to_pylist() == expected
    assert last.null_count or column.type == last.type


@pytest.mark.parametrize("on_error", ["fail", "collect"])
def test_a_column_of_nan_alone_has_the_type_of_other_rows(on_error: str) -> None:
    """Whatever rows come first, and in which chunks they are."""
    options = InferOptions(batch_size=1, only=True, on_error=on_error)
    nan, text = float("nan"), "a"
    for order in ([nan, text, nan], [text, nan, nan], [nan, nan, text], [nan, nan, nan]):
        source = sources.source(pa.table({"x": [0, 1, 2]}))
        book = ChunkQueue(source, source.result(options), options, 1)
        for value in order:
            columns = {"y": pa.array([value])}
            if on_error == "collect":
                columns["error"] = pa.nulls(1, pa.string())
            book.answer(next_of(book), pa.table(columns), ())
        table = book.finish()
        kind = pa.string() if text in order else pa.float64()
        assert table.schema.field("y") == pa.field("y", kind)
        assert table.schema.field("y").metadata is None
        missing = "None" if text in order else "nan"
        shown = [str(value) for value in table["y"].to_pylist()]
        assert shown == [text if value == text else missing for value in order]
        assert not book.widened, "of a type that no value had"


@pytest.mark.parametrize(("early", "late"), LATE.values(), ids=LATE)
def test_values_that_do_not_fit_a_later_type(early: pa.Array, late: pa.Array) -> None:
    """Of another rank, and of the same one."""
    frame = pa.table({"x": [0, 1, 2]})
    source = sources.source(frame)
    options = InferOptions(batch_size=1, only=True)
    book = ChunkQueue(source, source.result(options), options, 1)
    book.answer(next_of(book), pa.table({"y": early}), ())
    with pytest.raises(InferError, match=r"column 'y' as .* for other rows"):
        book.answer(next_of(book), pa.table({"y": late}), ())
    waiting = [early, late, late]
    predictor = Predictor(lambda batch: waiting.pop(0), options)
    with pytest.raises(InferError, match=r"rows 0 to 2 .*column 'prediction' as "):
        predictor.run(frame, 0)


@pytest.mark.parametrize("on_error", ["fail", "null", "collect"])
def test_kept_rows_that_failed_are_as_the_continued_run_asks(on_error: str) -> None:
    columns = pa.table({"y": pa.array([0, None, None, 6])})
    failure = {"first_row": 11, "last_row": 12, "reason": "why", "row": "x=11"}
    kept: Any = SimpleNamespace(
        next_row=lambda row: 10 if row <= 10 else None,
        length=lambda row: 4,
        read=lambda row, rows: KeptAnswer(columns, [failure]),
    )
    result, options = Result(), InferOptions(batch_size=10, on_error=on_error)
    book = ChunkQueue(Rows(14, cut=10), result, options, 1, kept)
    first = next_of(book)
    made = doubled(first, pa.int64())
    if on_error == "collect":
        made = made.append_column("error", pa.nulls(10, pa.string()))
    book.answer(first, made, ())
    assert book.can_resume
    book.resume()
    if on_error == "fail":
        assert next_of(book).first_row == 10, "predicted again, so that the failure ends the run"
        return
    found = result.parts[10]
    assert book.n_failed_rows == 2
    errors = found["error"].to_pylist() if on_error == "collect" else []
    assert errors in ([], [None, "why", "why", None])


def test_a_run_whose_rows_are_all_kept_needs_no_rank() -> None:
    kept: Any = SimpleNamespace(
        next_row=lambda row: 0 if row == 0 else None,
        length=lambda row: 20,
        read=lambda row, rows: KeptAnswer(pa.table({"y": range(20)}), []),
    )
    book = ChunkQueue(Rows(20, cut=10), Result(), InferOptions(batch_size=10), 1, kept)
    book.resume()
    assert book.is_done and book.finish() == [*range(20)]


def test_a_run_with_other_columns_to_replace_is_not_continued() -> None:
    """Without ``--replace`` the kept answers lack the columns that ``predict`` did not change."""
    found = [
        fingerprints.of_options(InferOptions(replace=names), ()) for names in ((), ("x",), ("z",))
    ]
    for wanted, known in itertools.permutations(found, 2):
        with pytest.raises(InferError, match="but --replace changed since"):
            fingerprints.matching(wanted, [("a run", None, known)])


@pytest.mark.parametrize(
    "make", [lambda frame: frame, pa.Table.from_pandas], ids=["pandas", "arrow"]
)
def test_a_run_over_a_frame_with_other_attrs_is_not_continued(
    make: Callable[[pd.DataFrame], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``predict`` gets them with each batch."""
    begun: list[Mapping[str, str]] = []

    def refused(prints: Mapping[str, str], *target: Any, **options: Any) -> None:
        begun.append(prints)
        raise InferError("nothing is started")

    monkeypatch.setattr(gang, "KeptParts", refused)
    captured = capture.capture_call(infer_ranks.doubles, (), {})
    for attrs in ({}, {"factor": 1}, {"factor": 100}, {"factor": 100}):
        frame = pd.DataFrame({"x": range(3)})
        frame.attrs = attrs
        with pytest.raises(InferError, match="nothing is started"):
            gang.infer(make(frame), captured, JobSpec(np=1), InferOptions(), title="")
    *others, wanted = begun
    for known in others[:2]:
        with pytest.raises(InferError, match="but the frame's attrs changed since"):
            fingerprints.matching(wanted, [("a run", None, known)])
    assert fingerprints.matching(wanted, [("a run", "the run", others[2])]) == "the run"


def test_a_full_disk_leaves_the_rows_of_an_earlier_run() -> None:
    reported: list[str] = []
    for kept_text in ("", "5 finished rows kept"):
        kept = SimpleNamespace(give_up=lambda: None, text=partial(str, kept_text))
        feed: Any = SimpleNamespace(_kept=kept, _notice=lambda level, text: reported.append(text))
        Dispatcher._keep_nothing(feed, OSError("full"))
    assert ["--resume is not possible" in text for text in reported] == [True, False]


def test_a_type_that_the_first_rows_do_not_show_is_a_later_ones() -> None:
    book, result = work(100)
    chunks = [next_of(book) for _ in range(4)]
    book.answer(chunks[0], nothing(chunks[0]), ())
    book.answer(chunks[1], None, ({"reason": "no"},))  # all failed, and no columns known
    book.answer(chunks[2], doubled(chunks[2]), ())
    assert result.schema == DOUBLES
    assert result.parts[0].schema == DOUBLES and result.parts[0]["y"].null_count == chunks[0].n_rows
    assert next_of(book).number == 1
    assert book.n_failed_rows == 0  # counted when it is answered for good


@pytest.mark.parametrize(
    ("empty", "full"),
    [
        ([[]] * 10, [["a"]] * 10),
        ([{"k": None}] * 10, [{"k": 1}] * 10),
        ([[{"k": []}]] * 10, [[{"k": ["a"]}]] * 10),
    ],
    ids=["list", "struct", "deeper"],
)
def test_a_part_of_a_type_that_the_first_rows_do_not_show_is_a_later_ones(
    empty: list[Any], full: list[Any]
) -> None:
    book, result = work(20, n_ranks=1)
    first, second = next_of(book), next_of(book)
    book.answer(first, pa.table({"y": empty}), ())
    assert result.schema is None
    book.answer(second, pa.table({"y": full}), ())
    assert result.schema == pa.table({"y": full}).schema
    assert book.finish() == empty + full


def test_rows_that_failed_before_a_type_was_known_are_made_again_at_the_end() -> None:
    book, _ = work(50)
    failure = {"first_row": 0, "last_row": 9, "reason": "no"}
    again = 0
    while (chunk := book.next()) is not None:
        is_first, again = chunk.number == 0, again + (chunk.number == 0)
        is_known = not is_first or chunk.knows_columns
        book.answer(chunk, nothing(chunk) if is_known else None, (failure,) if is_first else ())
    assert again == 2, "by a rank that knows the columns"
    assert book.is_done and book.finish() == [None] * 50
    assert (book.n_failed_rows, book.n_failures) == (10, 1)


def test_other_columns_are_made_again_also_where_a_type_stays_unknown() -> None:
    def tagged(chunk: Chunk, kind: pa.DataType) -> pa.Table:
        tags = pa.array([[]] * chunk.n_rows, pa.list_(pa.null()))
        return doubled(chunk, kind).append_column("t", tags)

    book, result = work(20, n_ranks=1)
    kinds = [pa.float64(), pa.string()]
    while (chunk := book.next()) is not None:
        kind = pa.float64() if chunk.knows_columns else kinds[chunk.number]
        book.answer(chunk, tagged(chunk, kind), ())
    assert book.is_done and book.finish() == [2.0 * x for x in range(20)]
    assert result.schema.field("y").type == pa.float64()


def small_work(monkeypatch: pytest.MonkeyPatch, n_rows: int) -> tuple[ChunkQueue, Result]:
    monkeypatch.setattr(works, "_MAX_UNDECIDED_BYTES", 10_000)
    result = Result(is_bounded=True)
    return ChunkQueue(Rows(n_rows), result, InferOptions(batch_size=10), 2), result


def test_a_result_that_is_to_stay_small_does_not_wait_for_a_type_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book, result = small_work(monkeypatch, 100_000)
    chunks = iter(book.next, None)
    for chunk in itertools.islice(chunks, 50):
        book.answer(chunk, nothing(chunk), ())
    assert result.schema == pa.schema({"y": pa.null()})
    late = next(chunks)
    book.answer(late, doubled(late), ())
    assert result.schema == DOUBLES


def test_nor_for_rows_that_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    book, _ = small_work(monkeypatch, 100_000)

    def go_on() -> None:
        for chunk in iter(book.next, None):
            book.answer(chunk, None, ({"reason": "never"},))

    with pytest.raises(InferError, match=r"each of the first 1,300 rows.*never"):
        go_on()


def test_a_slow_first_chunk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    book, result = small_work(monkeypatch, 100_000)
    first, *others = itertools.islice(iter(book.next, None), 8)
    assert sum(each.table.nbytes for each in others) < 10_000
    monkeypatch.setattr(works, "_MAX_UNDECIDED_BYTES", 1_000)
    for each in others:
        book.answer(each, doubled(each), ())
    assert result.schema is None
    book.answer(first, doubled(first), ())
    assert result.schema == DOUBLES


def test_of_many_failures_the_first_are_kept() -> None:
    book, _ = work(10_000)
    while (chunk := book.next()) is not None:
        row = {"first_row": chunk.first_row, "last_row": chunk.first_row, "reason": "no"}
        book.answer(chunk, doubled(chunk), (row,))
    assert len(book.failures) == 100 and book.failures[1]["first_row"] > 0
    assert book.n_failed_rows == book.n_failures > 100


def test_a_chunk_takes_about_a_second() -> None:
    """Whether or not the number of rows is known. Before the first answer it is one batch."""
    for n_rows in (1_000_000, None):
        source = Rows(1_000_000, cut=100_000)
        source.n_rows = n_rows
        book = ChunkQueue(source, Result(), InferOptions(batch_size=10), 2)
        limit, sizes = works.RowLimit(10), []
        for row_s in (1.0, *[0.001] * 6, 0.01, 20.0, 0.5, 0.001):
            chunk = book.next(limit.rows)
            assert chunk is not None
            sizes.append(chunk.n_rows)
            limit.took(row_s * chunk.n_rows, chunk.n_rows)
        assert sizes == [10, 10, 80, 640, 1_000, 1_000, 1_000, 1_000, 100, 10, 10]


def test_nobody_runs_far_ahead_of_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works, "_BYTES_AHEAD", 0)
    book, _ = work(100_000)
    out = list(iter(book.next, None))
    assert len(out) == 8
    for chunk in out[1:]:
        book.answer(chunk, doubled(chunk), ())
    assert book.next() is None
    book.answer(out[0], doubled(out[0]), ())
    assert book.next() is not None


@pytest.mark.parametrize("kind", ["memory", "parquet"])
def test_more_small_chunks_than_large_ones_may_be_ahead(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the columns are known, and until earlier rows of a file are done, which may take long."""
    monkeypatch.setattr(works, "_BYTES_AHEAD", 1_600)
    frame = pa.table({"x": range(10_000)})
    pq.write_table(frame, tmp_path / "rows.parquet")
    source = sources.source(frame if kind == "memory" else tmp_path / "rows.parquet")
    options = InferOptions(batch_size=10)
    book = ChunkQueue(source, source.result(options), options, 2)
    if kind == "parquet":
        first = next_of(book)
        book.answer(first, doubled(first), ())
    late, n_ahead = next_of(book), 0
    while (chunk := book.next(10)) is not None:
        book.answer(chunk, doubled(chunk), ())
        n_ahead += 1
    assert n_ahead == 20, "of 160 bytes each, for two ranks"
    book.answer(late, doubled(late), ())
    assert book.next(10) is not None
    book.abandon()


def test_a_column_without_a_single_value_is_one() -> None:
    book, result = work(50)
    while (chunk := book.next()) is not None:
        book.answer(chunk, nothing(chunk), ())
        assert book.rows == chunk.first_row + chunk.n_rows, "seen while it runs"
    assert book.is_done
    assert book.finish() == [None] * 50
    assert result.schema == pa.schema({"y": pa.null()})


def test_only_a_rank_without_rows_has_a_closed_bar() -> None:
    """An open bar that does not move is that of a rank that hangs."""
    reported: list[ev.Progress] = []
    dispatcher: Any = SimpleNamespace(_emit=reported.append, _now_s=lambda: 1.0)
    for in_flight in ((1, 2), ()):
        channel: Any = SimpleNamespace(rank=0, rows=500, in_flight=in_flight)
        Dispatcher._report_rows(dispatcher, channel)
    assert [bar.closed for bar in reported] == [False, True]


def test_a_run_that_is_stopped_has_the_rows_that_wait_for_a_type() -> None:
    book, result = work(1_000)
    chunks = [next_of(book) for _ in range(4)]
    for chunk in chunks[1:]:  # the first rows are not done either
        book.answer(chunk, nothing(chunk), ())
    assert not result.parts and book.rows > 0
    book.settle()
    assert sorted(result.parts) == [chunk.first_row for chunk in chunks[1:]]
    assert sum(part.num_rows for part in result.parts.values()) == book.rows


def test_a_run_that_is_stopped_before_its_first_row_has_none() -> None:
    book, result = work(1_000)
    book.settle()
    assert not result.parts and result.schema is None


@pytest.mark.parametrize(("n_more", "more"), [(1, "1 more part"), (2, "2 more parts")])
def test_a_stop_lists_the_first_missing_rows_and_counts_the_others(n_more: int, more: str) -> None:
    n_rows = 2 * (_MAX_GAPS + n_more)
    result = SimpleNamespace(done=[(start, start + 1) for start in range(1, n_rows, 2)])
    dispatcher: Any = SimpleNamespace(_result=result, _queue=SimpleNamespace(n_rows=n_rows))
    missing = Dispatcher._missing_text(dispatcher).partition("; missing: ")[2]
    assert missing.count("row ") == _MAX_GAPS and missing.endswith(f", {more}")


@pytest.mark.parametrize(
    ("outcome", "reason", "becomes"),
    [
        ("SUCCEEDED", "user", "succeed"),
        ("STOPPED", "user", "delete"),
        ("STOPPED", "timeout", "close"),
        ("FAILED", "user", "close"),
    ],
)
def test_kept_rows_stay_where_the_gang_ends_after_the_last_row_without_a_result(
    outcome: str, reason: str, becomes: str
) -> None:
    kept = MagicMock(**{"text.return_value": ""})
    dispatcher = Dispatcher(Rows(1), Result(), InferOptions(), 1, kept=kept)
    dispatcher.value = "all rows"
    kept.reset_mock()
    dispatcher.end(outcome, reason)
    assert kept.method_calls[0] == getattr(call, becomes)()


def test_finished_rows_after_the_end_of_the_files_are_refused(tmp_path: Path) -> None:
    """Rows were appended to a text file during the run; the ones before them are not done."""
    files = (ResultFile(Path("rows"), 10),)
    layout = Layout(tmp_path / "rows.parquet", True, files, is_chosen=True)
    result = ParquetResult(layout, pa.schema([]), list, lambda path: path)
    result.begin(DOUBLES)
    result.put(12, pa.table({"y": [1.0]}), pa.table({"x": [12]}))
    for _ in range(2):
        with pytest.raises(InferError, match="the data has more rows than at the start"):
            result.finished()
        assert not list(tmp_path.iterdir())
