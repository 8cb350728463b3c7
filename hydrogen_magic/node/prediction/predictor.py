"""Runs ``predict`` over the rows of one chunk, from Arrow to Arrow: the same code on a rank and on Spark.

    rows ─ inputs ─► what predict takes ─ calling ─► what it returned
                                                              │
                  one schema ◄─ fitting ─ columns ◄─ outputs ─┘

A failed batch is reported, or bisected to find the rows that fail: this calls ``predict`` again on parts of
the batch, some forty times for one row among four thousand. A ``predict`` that counts its calls or
remembers batches sees them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.annotations import PANDAS
from hydrogen_magic.node.prediction.calling import caller_of
from hydrogen_magic.node.prediction.ddl import parse_schema
from hydrogen_magic.node.prediction.inputs import Inputs
from hydrogen_magic.node.prediction.numeric_buffers import NumberColumns
from hydrogen_magic.node.prediction.options import ERROR_COLUMN, InferOptions
from hydrogen_magic.node.prediction.outputs import columns_of
from hydrogen_magic.node.prediction.row_labels import first_row_text, rows_text
from hydrogen_magic.node.prediction.schema_unify import MisfitError, fit, merge

__all__ = ["ChunkOutput", "Predictor", "RowFailure"]

_MOST_RETRIES = 256
"""Maximum number of calls to find the failing rows of a batch; after that, all remaining rows count as
failed."""
_MOST_OF_A_REASON = 500
"""Characters of an exception's text beside a row; some print whole arrays."""

_Columns = dict[str, pa.Array]


@dataclass(frozen=True)
class RowFailure:
    """Rows without a prediction, and why."""

    first_row: int
    last_row: int
    """The last of them, inclusive."""
    reason: str
    """The exception's type and text, shortened."""
    row: str
    """The contents of the first of the rows, shortened."""


@dataclass(frozen=True)
class ChunkOutput:
    """The result of one chunk."""

    columns: pa.Table
    """As many rows as the input: the predicted columns, and ``error`` if errors are collected.

    A column of type null has no known type yet. If every row so far has failed, there are rows without
    predicted columns.
    """
    failures: tuple[RowFailure, ...] = ()
    """In order of rows; empty if ``on_error`` is ``fail``."""


@dataclass(frozen=True)
class _RowRange:
    """Some consecutive rows of a chunk: predicted, or failed."""

    n_rows: int
    columns: _Columns | None = None
    """None if it failed, and for numbers that have been written to the buffers."""
    failure: RowFailure | None = None


class Predictor:
    """One rank's ``predict``.

    Args:
        predict: The cell's object of that name; None without one.
        options: Batch size, and handling of failures.

    Raises InferError if ``predict`` cannot be called with batches.
    """

    def __init__(self, predict: Any, options: InferOptions) -> None:
        self._options = options
        self._caller = caller_of(predict)
        self._inputs = Inputs(self._caller.kind, self._caller.module)
        self.schema: pa.Schema | None = parse_schema(options.schema) if options.schema else None
        """Schema of the predicted columns; None before the first output. Types with null are incomplete."""
        self._numbers: NumberColumns | None = None
        """Buffers of the chunk, after its columns are known."""
        self._rows = range(0)
        """Failures in the chunk, by row numbers."""
        self._names_checked_for: list[str] | None = None
        self._refusal: InferError | None = None
        """Error about equal names: no row causes it, so it is raised whatever ``on_error`` is."""

    def adopt(self, schema: pa.Schema) -> None:
        """Adopt the schema of another rank, also for types that differ from this rank's.

        ``schema``: of predicted columns; it may include the one of collected errors. Raises InferError if
        the other rank has other columns.
        """
        if self._options.collects and ERROR_COLUMN in schema.names:
            schema = schema.remove(schema.get_field_index(ERROR_COLUMN))
        try:
            self.schema = schema if self.schema is None else merge(schema, self.schema)
        except MisfitError as error:
            raise InferError(str(error)) from None

    def run(self, table: pa.Table | pa.RecordBatch, first_row: int) -> ChunkOutput:
        """Return the predictions for ``table``, whose first row has the number ``first_row``.

        They share no memory with ``table`` or with objects that ``predict`` may keep. ``predict`` is not
        called without rows. Raises InferError for a failed batch if ``on_error`` is ``fail``, with the
        exception of ``predict`` as cause.
        """
        self._numbers, self._rows = None, range(first_row, first_row + table.num_rows)
        parts: list[_RowRange] = []
        for rows in _in_one_piece(table):
            self._check_names(rows.schema.names)
            parts += self._run(rows, first_row)
            first_row += rows.num_rows
        failures = tuple(part.failure for part in parts if part.failure is not None)
        return ChunkOutput(self._assembled(parts), failures)

    def close(self) -> None:
        """End a ``predict`` that reads an iterator; its ``finally`` runs now."""
        self._caller.close()

    # ── batches ──────────────────────────────────────────────────────────────────────────────────

    def _run(self, rows: pa.RecordBatch, first_row: int) -> Iterator[_RowRange]:
        """Yield the result of each batch of ``rows``, in order."""
        size, end = self._options.batch_size, rows.num_rows
        todo = deque((start, min(start + size, end)) for start in range(0, end, size))
        while todo:
            try:
                for columns in self._attempt(rows, first_row, tuple(todo)):
                    start, stop = todo.popleft()
                    yield _RowRange(stop - start, columns)
            except Exception as error:
                if not todo:  # predict yields more outputs than batches
                    raise
                start, stop = todo.popleft()
                guilty = rows.slice(start, stop - start)
                self._refuse(guilty, first_row + start, error)
                yield from self._search(guilty, first_row + start, error)

    def _attempt(
        self, rows: pa.RecordBatch, first_row: int, bounds: Sequence[tuple[int, int]]
    ) -> Iterator[_Columns | None]:
        """Yield the columns for each batch in ``bounds``; errors of a batch are raised.

        None for numbers, which have been written to the buffers.
        """
        indexes: deque[Any] = deque()
        outputs = self._caller.outputs(self._batches(rows, first_row, bounds, indexes))
        for (start, stop), value in zip(bounds, outputs, strict=True):
            index, n_rows = indexes.popleft(), stop - start
            if self._place(value, first_row + start, n_rows):
                yield None
            else:
                yield self._fitted(columns_of(value, n_rows, index, self.schema), rows)

    def _batches(
        self,
        rows: pa.RecordBatch,
        first_row: int,
        bounds: Sequence[tuple[int, int]],
        indexes: deque[Any],
    ) -> Iterator[Any]:
        """Yield each batch in the type that ``predict`` takes, its pandas index appended to ``indexes``."""
        for batch in self._inputs.batches(rows, first_row, bounds):
            indexes.append(batch.index if self._caller.kind == PANDAS else None)
            yield batch

    def _place(self, value: Any, first_row: int, n_rows: int) -> bool:
        if self._numbers is None:
            if self.schema is None:
                return False
            self._numbers = NumberColumns(self.schema, len(self._rows))
        return self._numbers.put(value, first_row - self._rows.start, n_rows)

    # ── one schema ───────────────────────────────────────────────────────────────────────────────

    def _fitted(self, columns: _Columns, rows: pa.RecordBatch) -> _Columns:
        """Return ``columns`` in the types and order of the schema, which they may complete."""
        types = [(name, array.type) for name, array in columns.items()]
        if self.schema is not None and types == _named_types(self.schema):
            return columns
        merged = merge(self.schema, pa.schema(types))
        is_declared = self._options.schema is not None
        fitted = {
            field.name: fit(columns[field.name], field, is_declared=is_declared) for field in merged
        }
        is_first, self.schema = self.schema is None, merged
        if is_first:
            self._check_names(rows.schema.names)
        return fitted

    def _check_names(self, frame_names: list[str]) -> None:
        """Raise InferError, once for all rows, if a predicted column has the name of another."""
        if self.schema is None or self._names_checked_for == frame_names:
            return
        try:
            self._options.check_names(self.schema.names, frame_names)
        except InferError as error:
            self._refusal = error
            raise
        self._names_checked_for = frame_names

    def _assembled(self, parts: list[_RowRange]) -> pa.Table:
        """Return the concatenated parts; the schema is what is known by now."""
        n_rows = sum(part.n_rows for part in parts)
        fields = [] if self.schema is None else list(self.schema)
        columns = [pa.chunked_array(self._column(parts, field), field.type) for field in fields]
        if self._options.collects:
            fields.append(pa.field(ERROR_COLUMN, pa.string()))
            columns.append(pa.chunked_array([_reasons(part) for part in parts], pa.string()))
        if not fields:
            return _rows_without_columns(n_rows)
        return pa.Table.from_arrays(columns, schema=pa.schema(fields))

    def _column(self, parts: list[_RowRange], field: pa.Field) -> Iterator[pa.Array]:
        """Yield one column's arrays; one for several parts that were written to the buffers."""
        start = 0
        for is_placed, group in groupby(parts, key=_is_placed):
            if is_placed and self._numbers is not None:
                stop = start + sum(part.n_rows for part in group)
                yield fit(self._numbers.array(field.name, start, stop), field, is_declared=False)
                start = stop
                continue
            for part in group:
                start += part.n_rows
                if part.columns is None:
                    yield pa.nulls(part.n_rows, field.type)
                else:
                    yield fit(part.columns[field.name], field, is_declared=False)

    # ── failures ─────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, rows: pa.RecordBatch, first_row: int, error: Exception) -> None:
        """Raise InferError for a failed batch, unless failures are permitted."""
        if error is self._refusal:
            raise error
        if self._options.on_error != "fail":
            return
        where = rows_text(first_row, first_row + rows.num_rows - 1)
        if isinstance(error, (MisfitError, InferError)):
            raise InferError(f"{where} (counted from 0): {error}") from error.__cause__
        raise InferError(
            f"predict failed on {where} (counted from 0): {_reason(error)}\n"
            f"the first of them: {first_row_text(rows)}"
        ) from error

    def _search(
        self, rows: pa.RecordBatch, first_row: int, error: Exception
    ) -> Iterator[_RowRange]:
        """Yield the predictions for parts of a failed batch, with as few failed rows as possible."""
        todo = _halves(0, rows.num_rows, error)
        retries = _MOST_RETRIES
        if not todo:
            yield _failed(rows, first_row, error)
        while todo:
            start, stop, reason = todo.pop()
            piece = rows.slice(start, stop - start)
            if not retries:
                yield _failed(piece, first_row + start, reason)
                continue
            retries -= 1
            try:
                (columns,) = self._attempt(piece, first_row + start, ((0, stop - start),))
                yield _RowRange(stop - start, columns)
            except Exception as again:
                if again is self._refusal:
                    raise
                todo += (smaller := _halves(start, stop, again))
                if not smaller:
                    yield _failed(piece, first_row + start, again)


def _halves(start: int, stop: int, reason: Exception) -> list[tuple[int, int, Exception]]:
    """Return both halves of some rows, the first one last; none of a single row."""
    middle = (start + stop) // 2
    return [(middle, stop, reason), (start, middle, reason)] if stop - start > 1 else []


def _failed(rows: pa.RecordBatch, first_row: int, error: Exception) -> _RowRange:
    last_row = first_row + rows.num_rows - 1
    failure = RowFailure(first_row, last_row, _reason(error), first_row_text(rows))
    return _RowRange(rows.num_rows, failure=failure)


def _named_types(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return list(zip(schema.names, schema.types, strict=True))


def _reason(error: Exception) -> str:
    text = str(error).strip()
    kind = type(error).__name__
    is_ours = isinstance(error, (MisfitError, InferError))
    whole = text if is_ours else f"{kind}: {text}" if text else kind
    return whole if len(whole) <= _MOST_OF_A_REASON else whole[: _MOST_OF_A_REASON - 1] + "…"


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def _in_one_piece(table: pa.Table | pa.RecordBatch) -> list[pa.RecordBatch]:
    """Return rows whose columns are one array each, or several if one array cannot hold them."""
    if isinstance(table, pa.RecordBatch):
        return [table] if table.num_rows else []
    if any(column.num_chunks > 1 for column in table.columns):
        table = table.combine_chunks()
    return [rows for rows in table.to_batches() if rows.num_rows]


def _is_placed(part: _RowRange) -> bool:
    return part.columns is None and part.failure is None


def _reasons(part: _RowRange) -> pa.Array:
    if part.failure is None:
        return pa.nulls(part.n_rows, pa.string())
    return pa.array([part.failure.reason] * part.n_rows, pa.string())


def _rows_without_columns(n_rows: int) -> pa.Table:
    """Return a table that has only a number of rows."""
    cells = pa.StructArray.from_buffers(pa.struct([]), n_rows, [None])
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(cells)])
