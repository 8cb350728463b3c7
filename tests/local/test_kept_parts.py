"""Finished predictions on disk: taken over by a run with the same fingerprint, refused for any other."""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import fingerprints, gang, kept_parts, sources
from hydrogen_magic.inference.chunk_queue import Chunk, ChunkQueue
from hydrogen_magic.inference.kept_parts import KeptParts
from hydrogen_magic.inference.row_checksums import checksum
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.options import InferOptions
from tests import records

N_ROWS = 1_000
PRINTS = {
    "the cell": "a",
    "`model`": "1",
    "the frame's columns": "c",
    "the frame's number of rows": "n",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDROGEN_MAGIC_HOME", str(tmp_path / "home"))


def table(n_rows: int = N_ROWS) -> pa.Table:
    texts = [f"text {n}" if n % 7 else None for n in range(n_rows)]
    return pa.table({"x": range(n_rows), "s": texts, "b": [n % 3 == 0 for n in range(n_rows)]})


def ipc(columns: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema) as stream:
        stream.write_table(columns)
    return sink.getvalue()


def predicted(chunk: Chunk) -> pa.Table:
    """Return whole numbers for the first rows, and others later."""
    kind = pa.int64() if chunk.first_row < 300 else pa.float64()
    numbers = chunk.table.select(["x"]).column(0).to_pylist()
    return pa.table({"y": pa.array([2 * x for x in numbers], kind)})


@dataclass
class Run:
    """A run without ranks."""

    frame: Any
    prints: dict[str, str] = field(default_factory=lambda: PRINTS)
    resume: bool = True
    calls: list[int] = field(default_factory=list)
    """First row of every batch that was predicted."""
    target: Path | None = None

    def __post_init__(self) -> None:
        self.gang = f"run-{len(run_log.recent_ids())}"
        self.options = InferOptions(batch_size=10)
        source = sources.source(self.frame, self.target)
        self.result = source.result(self.options)
        head = partial(gang._head, source, 10)
        self.kept = KeptParts(self.prints, self.result.target, resume=self.resume, head=head)
        number = len(run_log.recent_ids())
        self.record = records.write(self.gang, records.launched(self.gang, float(number)))
        self.kept.open(self.record)
        self.queue = ChunkQueue(source, self.result, self.options, 2, self.kept)

    def predict(self, n_chunks: int = -1, seed: int = 0) -> Any:
        """Answer this many chunks in a random order; return the result if that is all."""
        chance = random.Random(seed)
        in_hand: list[Chunk] = []
        while not self.queue.is_done:
            while self.queue.can_resume:
                self.queue.resume()
            while len(in_hand) < 4 and (chunk := self.queue.next()) is not None:
                in_hand.append(chunk)
            if in_hand and n_chunks == 0:
                return self.end("FAILED")
            if in_hand:
                self._answer(in_hand.pop(chance.randrange(len(in_hand))))
                n_chunks -= 1
        value = self.queue.finish()
        self.kept.delete()
        self.end("SUCCEEDED")
        return value

    def _answer(self, chunk: Chunk) -> None:
        self.calls += range(chunk.first_row, chunk.first_row + chunk.n_rows, 10)
        data = ipc(predicted(chunk))
        if self.queue.answer(chunk, pa.ipc.open_stream(data).read_all(), ()):
            self.kept.add(chunk.first_row, chunk.table, data, ())

    def end(self, outcome: str) -> None:
        self.kept.close()
        with open(self.record / "events.jsonl", "a") as file:
            file.write(json.dumps(ev.encode(ev.GangEnded(1.0, outcome, ""))) + "\n")


def values(frame: Any) -> list[Any]:
    if isinstance(frame, (str, Path)):
        frame = pq.read_table(frame)
    return list(frame["y"].to_list() if hasattr(frame["y"], "to_list") else frame["y"].to_pylist())


def two_files(folder: Path) -> str:
    (folder / "data").mkdir(exist_ok=True)
    pq.write_table(table().slice(0, 450), folder / "data" / "a.parquet")
    pq.write_table(table().slice(450), folder / "data" / "b.parquet")
    return str(folder / "data")


FRAMES: dict[str, Callable[[Path], Any]] = {
    "pandas": lambda folder: table().to_pandas(),
    "polars": lambda folder: pl.from_arrow(table()),
    "arrow": lambda folder: table(),
    "reader": lambda folder: table().to_reader(max_chunksize=40),
    "parquet": two_files,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_resumed_run_predicts_no_finished_row_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 1_000)
    calls: list[int] = []
    for n_chunks, seed in ((7, 0), (5, 1)):
        run = Run(FRAMES[kind](tmp_path), calls=calls)
        run.predict(n_chunks, seed)
        done = [row for first, end in run.result.done for row in range(first, end)]
        assert len(done) == 10 * len(calls)
        assert values(run.result.finished()) == [2.0 * row for row in done]
    whole = Run(FRAMES[kind](tmp_path), calls=calls).predict()
    assert values(whole) == [2.0 * x for x in range(N_ROWS)]
    assert set(map(type, values(whole))) == {float}, "though the first ones are whole numbers"
    assert sorted(calls) == list(range(0, N_ROWS, 10))
    assert not list(tmp_path.rglob("*kept*"))


def test_a_change_is_refused_by_its_name() -> None:
    Run(table()).predict(5)
    for change, said in (
        ({"`model`": "2"}, "but `model` changed since"),
        ({"the cell": "b", "`new`": "1"}, "but the cell, `new` changed since"),
        ({"the frame's columns": "d"}, "but the frame's columns changed since"),
    ):
        with pytest.raises(InferError, match=said):
            Run(table(), {**PRINTS, **change})
    other = Run(table(), {"the cell": "b", "the frame's columns": "d"})
    assert "no finished rows of this cell and frame are kept" in other.kept.start_text()


KINDS: dict[str, Callable[[pa.Table], Any]] = {
    "pandas": pa.Table.to_pandas,
    "polars": pl.from_arrow,
    "arrow": lambda table: table,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", ["x", "s", "lists", "categories"])
def test_one_changed_cell_in_the_middle_of_a_part_is_refused(kind: str, column: str) -> None:
    values = {
        "x": list(range(N_ROWS)),
        "s": [f"text {n}" for n in range(N_ROWS)],
        "lists": [[n, n + 1] for n in range(N_ROWS)],
        "categories": ["ab"[n % 2] for n in range(N_ROWS)],
    }

    def frame() -> Any:
        made = pa.table(values)
        return KINDS[kind](made.set_column(3, "categories", made["categories"].dictionary_encode()))

    Run(frame()).predict(5)
    (journal,) = run_log.runs_dir().rglob("journal")
    parts = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    part = next(each for each in parts if each["row"])
    place = part["row"] + part["n_rows"] // 2
    values[column][place] = values[column][place + 1]
    run = Run(frame())
    last = part["row"] + part["n_rows"] - 1
    with pytest.raises(InferError, match=f"values in rows {part['row']} to {last} have changed"):
        run.predict()
    run.end("FAILED")


@pytest.mark.parametrize("kind", KINDS)
def test_runs_over_frames_of_one_shape_are_told_apart(kind: str) -> None:
    def frame(first: int) -> Any:
        return KINDS[kind](pa.table({"x": range(first, first + N_ROWS)}))

    for first in (0, 5_000):
        Run(frame(first), resume=False).predict(5)
    again = Run(frame(0))
    assert again.kept.n_rows
    assert values(again.predict()) == [2.0 * x for x in range(N_ROWS)]
    assert "no finished rows of this cell and frame" in Run(frame(9_000)).kept.start_text()
    assert Run(frame(5_000)).kept.n_rows


def test_another_frame_s_rows_are_not_taken_for_this_one_s() -> None:
    Run(table()).predict(5)
    with pytest.raises(InferError, match="fewer than the"):
        Run(table(5)).predict()


def test_a_run_without_a_finished_row_keeps_none() -> None:
    """The next kernel says whether there is something to resume."""
    local, on_spark = Run(table()), Run(table())
    local.predict(2)
    on_spark.end("STOPPED")
    folder = run_log.kept_dir(on_spark.gang)
    assert fingerprints.has_answers(local.gang) and not fingerprints.has_answers(on_spark.gang)
    folder.mkdir()
    (folder / fingerprints.JOURNAL).write_text("{}\n")
    assert not fingerprints.has_answers(on_spark.gang), "no task has written a partition"
    (folder / "0.5.ab.0.part").touch()
    assert fingerprints.has_answers(on_spark.gang)


def test_a_run_that_is_not_over_is_left_alone() -> None:
    first = Run(table())
    for _ in range(3):
        first._answer(first.queue.next())  # type: ignore[arg-type]  # there are rows
    assert not Run(table(), calls=[]).kept.n_rows
    first.end("STOPPED")
    assert Run(table()).kept.n_rows == first.kept.n_rows > 0


def test_a_line_that_was_not_written_whole_is_left_out() -> None:
    Run(table()).predict(5)
    (journal,) = run_log.runs_dir().rglob("journal")
    n_rows = [json.loads(line)["n_rows"] for line in journal.read_text().splitlines()[1:]]
    with open(journal, "a") as file:
        file.write('\0\0\n{"row": 700}\n{"row": 700, "n_r')
    (answers,) = run_log.runs_dir().rglob("answers")
    os.truncate(answers, answers.stat().st_size - 1)
    run = Run(table())
    assert run.kept.n_rows == sum(n_rows[:-1])
    assert values(run.predict()) == [2.0 * x for x in range(N_ROWS)]


def test_a_damaged_answer_is_predicted_again() -> None:
    """Whether its values or its layout are lost: a crash of the machine may leave zeros of a page."""
    Run(table()).predict(5)
    (journal,) = run_log.runs_dir().rglob("journal")
    entries = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    (answers,) = run_log.runs_dir().rglob("answers")
    data = bytearray(answers.read_bytes())
    first, second = entries[:2]
    end = first["at"] + first["n_bytes"] - 8  # of the values
    data[end - 16 : end] = bytes(16)
    data[second["at"] : second["at"] + 64] = bytes(64)
    answers.write_bytes(data)
    run = Run(table())
    assert values(run.predict()) == [2.0 * x for x in range(N_ROWS)]
    assert {first["row"], second["row"]} <= set(run.calls)


def test_answers_that_the_disk_is_too_slow_for_are_predicted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, is_free, write = threading.Event(), threading.Event(), KeptParts._write

    def slow(*args: Any) -> None:
        has_begun.set()
        assert is_free.wait(60)
        write(*args)

    monkeypatch.setattr(KeptParts, "_write", slow)
    monkeypatch.setattr(chunking, "CHUNK_BYTES", 1_000)
    run, parts = Run(table()), []
    while len(parts) < 20:
        chunk = run.queue.next()
        assert chunk is not None
        run._answer(chunk)
        parts.append((chunk.first_row, chunk.n_rows))
        assert has_begun.wait(60), "the thread holds the first one"
    is_free.set()
    run.end("STOPPED")
    n_kept = 17  # one that the thread holds, and those that wait for it
    assert run.kept.n_rows == sum(size for _, size in parts[:n_kept])
    again = Run(table())
    assert values(again.predict()) == [2.0 * x for x in range(N_ROWS)]
    assert sorted(again.calls) == list(range(parts[n_kept][0], N_ROWS, 10))


def test_a_full_disk_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(table())
    chunk = run.queue.next()
    assert chunk is not None
    with monkeypatch.context() as patched:
        patched.setattr(kept_parts, "_append", full_disk)
        with pytest.raises(OSError, match="No space"):
            run.kept.add(0, chunk.table, b"data", ())
    run.kept.give_up()
    run.kept.add(0, chunk.table, b"data", ())
    assert not list(run_log.runs_dir().rglob("kept")) and not run.kept.text()


def test_a_disk_that_is_full_during_a_resumed_run_keeps_the_earlier_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Run(table()).predict(5)
    again = Run(table())
    n_before = again.kept.n_rows
    again.queue.resume()
    again.kept.give_up()
    assert again.kept.text().startswith(f"{n_before} finished rows kept"), "of the earlier run"
    assert values(again.predict()) == [2.0 * n for n in range(N_ROWS)]
    assert 0 < n_before == N_ROWS - 10 * len(again.calls)
    assert not list(run_log.runs_dir().rglob("kept")), "a run that succeeds deletes them"


@pytest.mark.parametrize("broken", [(Path, "write_bytes"), (KeptParts, "_open_files")])
def test_rows_that_cannot_be_continued_stay_those_of_the_earlier_run(
    broken: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is still full, or too many files are open."""
    first = Run(table())
    first.predict(5)
    kept = KeptParts(PRINTS, resume=True)
    record = records.write("again", records.launched("again", 9.0))
    with monkeypatch.context() as patched:
        patched.setattr(*broken, full_disk)
        with pytest.raises(OSError, match="No space"):
            kept.open(record)
    kept.give_up()
    said = f"run {first.gang} keeps its finished rows; all rows are predicted again"
    assert (kept.start_text(), kept.n_rows) == (said, 0)
    assert Run(table()).kept.n_rows > 0


def full_disk(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_run_that_succeeds_keeps_the_rows_of_another_frame() -> None:
    """Both have equal columns and as many rows."""
    Run(table()).predict(5)
    Run(table().set_column(0, "x", pa.array(range(1, N_ROWS + 1))), resume=False).predict()
    assert Run(table()).kept.n_rows > 0


def test_kept_rows_go_with_their_record(tmp_path: Path) -> None:
    data = two_files(tmp_path)
    run = Run(data)
    run.predict(5)
    (beside,) = tmp_path.glob(".data-inferred-*.kept")
    assert beside.is_dir()
    run.result.abort()
    run_log.prune(keep=0, keep_data_s=0.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "home"]


TENSOR = pa.fixed_shape_tensor(pa.int16(), (2, 2))
VALUES: dict[pa.DataType, list[Any]] = {
    pa.bool_(): [True, False],
    pa.int8(): [1, 2],
    pa.float64(): [0.5, float("nan")],
    pa.decimal128(20, 2): [Decimal("0.01"), Decimal("1e15")],
    pa.timestamp("ns"): [dt.datetime(2020, 1, 1), dt.datetime(1700, 1, 1)],
    pa.binary(2): [b"ab", b"ba"],
    pa.string(): ["ab", "", "b"],
    pa.large_binary(): [b"ab", b"", b"\xff"],
    pa.string_view(): ["ab", "longer than twelve"],
    pa.list_(pa.int32()): [[1, 2], [], [1], [None]],
    pa.large_list(pa.string()): [["a", "b"], ["ab"], [None]],
    pa.list_(pa.float32(), 2): [[1, 2], [1, None]],
    pa.list_view(pa.int8()): [[1], [2, 3]],
    pa.map_(pa.string(), pa.int64()): [[("a", 1)], [("b", None)], []],
    pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())}): [{"a": 1, "b": ["x"]}, {"a": None}],
    pa.dictionary(pa.int8(), pa.string()): ["ab", "b", "a"],
    pa.run_end_encoded(pa.int32(), pa.string()): ["a", "b"],
    TENSOR: [[1, 2, 3, 4], [1, 2, 4, 3]],
}


def column_of(kind: pa.DataType, values: list[Any]) -> pa.Array:
    if kind == TENSOR:
        return pa.ExtensionArray.from_storage(TENSOR, pa.array(values, TENSOR.storage_type))
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).cast(kind)
    return pa.array(values, kind)


@pytest.mark.parametrize("missing", [[None], []], ids=["nulls", ""])
@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_a_checksum_is_that_of_all_values_and_of_nothing_else(
    kind: pa.DataType, missing: list[None]
) -> None:
    """Not of their place in memory, nor of the bytes under nulls, nor of a category that no row has."""
    values = [*VALUES[kind], *missing, *VALUES[kind], *missing]
    alike = [column_of(kind, values)]
    for others in (values[::-1], values[1:2] * 9):
        more = column_of(kind, [*others, *values, *others])
        alike.append(more[len(others) : len(others) + len(values)])
        alike.append(pa.chunked_array([alike[-1][:1], alike[0][1:3], alike[-1][3:]]))
    if not (pa.types.is_run_end_encoded(kind) or pa.types.is_map(kind)):
        under_nulls = column_of(kind, [values[0] if each is None else each for each in values])
        alike.append(with_nulls(under_nulls, [each is None for each in values]))
    sums = [checksum(pa.table({"c": each, "d": each})) for each in alike]
    assert len(alike) >= 5 and len(set(sums)) == 1
    for place, value in enumerate(values):
        for other in {*map(repr, [*values, None])} - {repr(value)}:
            new = next(each for each in [*values, None] if repr(each) == other)
            changed = column_of(kind, [*values[:place], new, *values[place + 1 :]])
            found = checksum(pa.table({"c": alike[0], "d": changed}))
            assert found != sums[0], (place, new)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (pa.string(), ["ab", "c"], ["a", "bc"]),
        (pa.large_binary(), [b"ab", b"c"], [b"a", b"bc"]),
        (pa.list_(pa.int8()), [[1, 2], []], [[1], [2]]),
    ],
    ids=str,
)
def test_a_checksum_is_also_that_of_lengths(
    kind: pa.DataType, one: list[Any], other: list[Any]
) -> None:
    sums = {checksum(pa.table({"c": pa.array(values, kind)})) for values in (one, other)}
    assert len(sums) == 2


def with_nulls(array: pa.Array, are_null: list[bool]) -> pa.Array:
    """Return an array with other bytes under its nulls than Arrow writes."""
    if isinstance(array, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(array.type, with_nulls(array.storage, are_null))
    if pa.types.is_dictionary(array.type):
        indices = with_nulls(array.indices, are_null)
        return pa.DictionaryArray.from_arrays(indices, array.dictionary)
    validity = pa.array([not each for each in are_null] + [True] * 3).buffers()[1]
    own, children = array.buffers()[1:], []
    if array.type.num_fields:
        own = own[: array.type.num_buffers - 1]
        children = array.flatten() if pa.types.is_struct(array.type) else [array.values]
    return pa.Array.from_buffers(
        array.type, len(array), [validity, *own], sum(are_null), children=children
    )


def test_block_rows_have_the_checksum_of_their_values() -> None:
    """Whichever way their numbers lie in memory; the order of categories is part of them."""
    numbers = np.arange(600.0, dtype="float32").reshape(100, 6)
    categories = pd.Categorical(["a", "b"] * 50, ["b", "a", "c"])
    one = pd.DataFrame(numbers).assign(c=categories, s="text")
    other = pd.DataFrame({n: numbers[:, n].copy() for n in range(6)}).assign(c=categories, s="text")

    def found(frame: pd.DataFrame) -> int:
        rows = next(iter(sources.source(frame).chunks(100)))
        return checksum(rows.slice(20, 50))

    assert found(one) == found(other)
    for place, column, value in ((19, 3, -1), (70, 3, -1), (20, 3, -1), (45, 5, -1), (69, 0, -1)):
        changed = one.copy()
        changed.iloc[place, column] = value
        assert (found(changed) == found(one)) == (place not in range(20, 70))
    for change in ({"c": categories.reorder_categories(["c", "b", "a"])}, {"s": "texu"}):
        assert found(one.assign(**change)) != found(one)


def test_pandas_values_under_a_mask_do_not_count() -> None:
    frames = [pd.DataFrame({"x": pd.array([1, None, n], "Int64")}) for n in (3, 3)]
    frames[1].iloc[1, 0] = 7
    frames[1].iloc[1, 0] = None
    sums = [next(iter(sources.source(frame).chunks(10))) for frame in frames]
    assert checksum(sums[0]) == checksum(sums[1])
