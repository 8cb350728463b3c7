"""``predict`` over the rows of one chunk, from Arrow to Arrow, on a rank or on Spark.

    rows ─ inputs ─► batch ─ calling ─► returned value
                                              │
       one schema ◄─ schema_unify ◄─ outputs ─┘

A batch that fails is reported, or split in halves to find the rows that cause it. That calls ``predict``
again on parts of the batch, some forty times for one row of four thousand, which a ``predict`` that counts
its calls would notice.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import pyarrow as pa

from hydrogen_magic.core.units import clipped, counted
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.annotations import PANDAS
from hydrogen_magic.node.prediction.block_rows import BlockRows
from hydrogen_magic.node.prediction.calling import OutOfStepError, caller_of
from hydrogen_magic.node.prediction.chunking import table_of
from hydrogen_magic.node.prediction.ddl import parse_schema
from hydrogen_magic.node.prediction.fixed_types import add_reasons, fixed_array, with_reasons
from hydrogen_magic.node.prediction.inputs import BatchConverter
from hydrogen_magic.node.prediction.numeric_buffers import NumericBuffers
from hydrogen_magic.node.prediction.options import ERROR_COLUMN, InferOptions
from hydrogen_magic.node.prediction.outputs import PREDICTION, columns_of
from hydrogen_magic.node.prediction.own_columns import OwnColumns
from hydrogen_magic.node.prediction.row_labels import first_row_text, rows_text
from hydrogen_magic.node.prediction.schema_unify import (
    MisfitError,
    as_text,
    check_columns,
    fit,
    joined,
    lacks_values,
    types_of,
)

_MAX_FAILURES = 256
"""Failed calls in a row by which the remaining rows of a batch count as failed, too."""
_MAX_REASON_CHARACTERS = 500
"""Of the text of an exception, which may contain whole arrays."""

_Columns = dict[str, pa.Array]
_Rows: TypeAlias = "pa.RecordBatch | BlockRows"


@dataclass(frozen=True)
class RowFailure:
    """Rows without a prediction."""

    first_row: int
    last_row: int
    """The last of them, inclusive."""
    reason: str
    """The exception's type and text, shortened."""
    row: str
    """The values of the first row, shortened."""


@dataclass(frozen=True)
class ChunkOutput:
    """The predictions for one chunk."""

    columns: pa.Table
    """The predicted columns, and ``error`` if errors are collected, with the rows of the chunk.

    A column of type null has no type yet. If every row so far failed, there are rows but no predicted
    columns.
    """
    failures: tuple[RowFailure, ...] = ()
    """In order of rows; none if ``on_error`` is ``fail``."""
    misfits: dict[int, str] = field(default_factory=dict)
    """Why values are missing that :attr:`Predictor.target` cannot hold, by their row in the chunk."""


@dataclass(frozen=True)
class _RowRange:
    """Consecutive rows of a chunk that were predicted, or failed."""

    n_rows: int
    columns: _Columns | None = None
    """None if they failed, or if they are numbers in :class:`NumericBuffers`."""
    failure: RowFailure | None = None


class Predictor:
    """One rank's ``predict``.

    Args:
        predict: The cell's ``predict``, None if it does not define one.
        options: The batch size, and what to do with failures.

    Raises InferError if ``predict`` cannot be called with batches.
    """

    def __init__(self, predict: Any, options: InferOptions) -> None:
        self._options = options
        self._caller = caller_of(predict)
        self._converter = BatchConverter(self._caller.kind, self._caller.module)
        self.schema: pa.Schema | None = parse_schema(options.schema) if options.schema else None
        """The predicted columns; None before the first output. Unknown types are null."""
        self.target: pa.Schema | None = None
        """Types that the result has, whatever is predicted; None: those of ``schema``, which become wider."""
        declared = self.schema.names if self.schema is not None else []
        self._only = declared[0] if len(declared) == 1 else None
        self._numbers: NumericBuffers | None = None
        """Those of the chunk, once its columns are known."""
        self._rows = range(0)
        """Numbers of the chunk's rows."""
        self._own = OwnColumns(options, self._caller.kind)
        self._names_checked_for: list[str] | None = None
        self._refusal: InferError | None = None
        """The error of names that clash: no row causes it, so it is raised whatever ``on_error`` is."""

    def adopt(self, schema: pa.Schema) -> None:
        """Use the predicted columns that another rank found, with types for its values and those found here.

        ``schema`` may include the column of collected errors. Raises InferError if the columns differ.
        """
        if self._options.collects and ERROR_COLUMN in schema.names:
            schema = schema.remove(schema.get_field_index(ERROR_COLUMN))
        try:
            self.schema = self._joined(schema, self.schema or schema)
        except MisfitError as error:
            raise InferError(str(error)) from None

    def run(self, table: pa.Table | BlockRows, first_row: int) -> ChunkOutput:
        """Return the predictions for ``table``, whose first row has the number ``first_row``.

        Neither these nor the batches share its memory. Without rows, ``predict`` is called only for the
        columns that it returns. Raises InferError for a failed batch if ``on_error`` is ``fail``, caused by
        the error of ``predict``.
        """
        self._numbers, self._rows = None, range(first_row, first_row + table.num_rows)
        parts: list[_RowRange] = []
        for rows in _in_one_piece(table):
            self._check_names(rows.schema.names)
            parts += self._run(rows, first_row)
            first_row += rows.num_rows
        if not table.num_rows and self.schema is None:
            try:
                self.find_columns(table.schema)
            except Exception as error:
                text = f"predict failed for a batch without rows ({reason_of(error)})"
                print(f"{text}: set its columns with --schema", file=sys.stderr)
        failures = tuple(part.failure for part in parts if part.failure is not None)
        misfits: dict[int, str] = {}
        columns = with_reasons(self._assembled(parts, misfits), misfits)
        return ChunkOutput(columns, failures, misfits)

    def find_columns(self, schema: pa.Schema) -> None:
        """Predict a batch without rows, which sets the predicted columns. Raises its error."""
        rows = pa.RecordBatch.from_arrays(
            [pa.array([], each.type) for each in schema], schema=schema
        )
        list(self._attempt(rows, 0, ((0, 0),)))

    def close(self) -> None:
        """End a ``predict`` that reads an iterator, so that its ``finally`` runs."""
        self._caller.close()

    # ── batches ──────────────────────────────────────────────────────────────────────────────────

    def _run(self, rows: _Rows, first_row: int) -> Iterator[_RowRange]:
        """Yield the predictions of each batch of ``rows``, in order."""
        size, end = self._options.batch_size, rows.num_rows
        todo = deque((start, min(start + size, end)) for start in range(0, end, size))
        while todo:
            try:
                for columns in self._attempt(rows, first_row, tuple(todo)):
                    start, stop = todo.popleft()
                    yield _RowRange(stop - start, columns)
            except Exception as error:
                if not todo:  # predict has yielded more outputs than batches
                    raise
                start, stop = todo.popleft()
                batch = rows.slice(start, stop - start)
                self._raise_unless_allowed(batch, first_row + start, error)
                yield from self._search(batch, first_row + start, error)

    def _attempt(
        self, rows: _Rows, first_row: int, bounds: Sequence[tuple[int, int]]
    ) -> Iterator[_Columns | None]:
        """Yield the columns for each batch in ``bounds``, None if they are in the numeric buffers."""
        indexes: deque[Any] = deque()
        outputs = self._caller.outputs(self._batches(rows, first_row, bounds, indexes))
        for (start, stop), value in zip(bounds, outputs, strict=True):
            index, n_rows = indexes.popleft(), stop - start
            if self._buffered(value, first_row + start, n_rows):
                yield None
            else:
                batch = rows.slice(start, n_rows)
                yield self._fitted(self._columns(value, batch, first_row + start, index), batch)

    def _batches(
        self,
        rows: _Rows,
        first_row: int,
        bounds: Sequence[tuple[int, int]],
        indexes: deque[Any],
    ) -> Iterator[Any]:
        """Yield each batch, and append its pandas index to ``indexes``."""
        for batch in self._converter.batches(rows, first_row, bounds):
            indexes.append(batch.index if self._caller.kind == PANDAS else None)
            yield batch

    def _columns(self, value: Any, rows: _Rows, first_row: int, index: Any) -> _Columns:
        """Return the columns of a returned value, without those of the frame that it has unchanged."""
        value = self._own.without_unchanged(value, rows, first_row, index)
        known = (*self._own.nested(rows), *(self.schema or ()))
        only = self._only or (PREDICTION if self._own.has_name_of(value, rows) else None)
        columns = columns_of(value, rows.num_rows, index, known, only, as_text=self._may_be_text)
        changed = self._own.drop_unchanged(columns, rows, first_row)
        if changed:
            self._checked(lambda: self._options.check_names(changed, rows.schema.names))
        if not columns:
            raise MisfitError(
                "predict returned the columns of the frame without a change: add a column, or return"
                " the predictions alone"
            )
        return columns

    def _buffered(self, value: Any, first_row: int, n_rows: int) -> bool:
        if self._numbers is None:
            if self.schema is None or lacks_values(self.schema):
                return False
            self._numbers = NumericBuffers(self.schema, len(self._rows), self._only or PREDICTION)
        return self._numbers.put(value, first_row - self._rows.start, n_rows)

    # ── one schema ───────────────────────────────────────────────────────────────────────────────

    def _fitted(self, columns: _Columns, rows: _Rows) -> _Columns:
        """Return ``columns`` in the schema, whose unknown types they may set."""
        found = pa.schema([(name, array.type) for name, array in columns.items()])
        if found == self.schema and not lacks_values(self.schema):
            return columns
        if self.target is not None and self.schema is not None and self._options.schema is None:
            check_columns(self.schema.names, found.names)
            return columns
        merged = self._joined(self.schema, types_of(pa.table(columns), self.schema))
        is_declared, may_be_text = self._options.schema is not None, self._may_be_text
        fitted = {}
        for name in merged.names:
            try:
                fitted[name] = fit(columns[name], merged.field(name), is_declared=is_declared)
            except MisfitError as error:
                if not may_be_text:
                    raise
                merged = as_text(merged, error)
                fitted[name] = fit(columns[name], merged.field(name), is_declared=False)
        is_first, self.schema = self.schema is None, merged
        if is_first:
            self._check_names(rows.schema.names)
        return fitted

    def _joined(self, known: pa.Schema | None, found: pa.Schema) -> pa.Schema:
        if known is not None and self._options.schema is not None:
            check_columns(known.names, found.names, are_declared=True)
            return known
        return joined(known, found, as_text=self._may_be_text)

    @property
    def _may_be_text(self) -> bool:
        """Whether a column becomes text if its values have no common type."""
        return self._options.collects and self._options.schema is None

    def _check_names(self, frame_names: list[str]) -> None:
        """Raise InferError if a predicted column has the name of another one."""
        if self.schema is None or self._names_checked_for == frame_names:
            return
        predicted = self.schema.names
        self._checked(lambda: self._options.check_names(predicted, frame_names))
        self._checked(lambda: self._options.check_replaced(predicted))
        self._names_checked_for = frame_names

    def _checked(self, check: Callable[[], None]) -> None:
        try:
            check()
        except InferError as error:
            self._refusal = error
            raise

    def _assembled(self, parts: list[_RowRange], misfits: dict[int, str]) -> pa.Table:
        """Return all parts as a table of the current schema, or of the target; fill ``misfits``."""
        n_rows = sum(part.n_rows for part in parts)
        if self.target is None:
            columns = [self._whole_column(parts, field) for field in self.schema or ()]
            fields = list(self.schema or ())
        else:
            own = {ERROR_COLUMN} if self._options.collects else set()
            fields = [field for field in self.target if field.name not in own]
            columns = [self._fixed_column(parts, field, misfits) for field in fields]
        if self._options.collects:
            fields.append(pa.field(ERROR_COLUMN, pa.string()))
            columns.append(pa.chunked_array([_reasons(part) for part in parts], pa.string()))
        return table_of(columns, pa.schema(fields), n_rows)

    def _whole_column(self, parts: list[_RowRange], field: pa.Field) -> pa.ChunkedArray:
        """Return one column, as text if errors are collected and its values do not fit into one type."""
        assert self.schema is not None
        try:
            return pa.chunked_array(self._column(parts, field), field.type)
        except MisfitError as error:
            if not self._may_be_text:
                where = rows_text(self._rows[0], self._rows[-1])
                raise InferError(f"{where} (counted from 0): {error}") from None
            self.schema = as_text(self.schema, error)
        return self._whole_column(parts, self.schema.field(field.name))

    def _fixed_column(
        self, parts: list[_RowRange], field: pa.Field, misfits: dict[int, str]
    ) -> pa.ChunkedArray:
        """Return one column in the type of the target, and add the rows that do not fit it."""
        arrays, start = [], 0
        for array in self._arrays(parts, field):
            fixed, reasons = fixed_array(array, field, as_text=self._may_be_text)
            add_reasons(misfits, {start + row: reason for row, reason in reasons.items()})
            arrays.append(fixed)
            start += len(array)
        return pa.chunked_array(arrays, field.type)

    def _column(self, parts: list[_RowRange], field: pa.Field) -> Iterator[pa.Array]:
        return (fit(array, field, is_declared=False) for array in self._arrays(parts, field))

    def _arrays(self, parts: list[_RowRange], field: pa.Field) -> Iterator[pa.Array]:
        """Yield the arrays of one column: one for each group of buffered parts, and for each other part."""
        start = 0
        for is_buffered, group in groupby(parts, key=_is_buffered):
            if is_buffered and self._numbers is not None:
                stop = start + sum(part.n_rows for part in group)
                yield self._numbers.array(field.name, start, stop)
                start = stop
                continue
            for part in group:
                start += part.n_rows
                if part.columns is None:
                    yield pa.nulls(part.n_rows, field.type)
                else:
                    yield part.columns[field.name]

    # ── failures ─────────────────────────────────────────────────────────────────────────────────

    def _raise_unless_allowed(self, rows: _Rows, first_row: int, error: Exception) -> None:
        """Raise InferError for a failed batch if ``on_error`` is ``fail``, or if others may be wrong."""
        if error is self._refusal:
            raise error
        where = rows_text(first_row, first_row + rows.num_rows - 1)
        if isinstance(error, OutOfStepError):
            raise InferError(f"at {where} (counted from 0), or before: {error}") from None
        if self._options.on_error != "fail":
            return
        if isinstance(error, (MisfitError, InferError)):
            raise InferError(f"{where} (counted from 0): {error}") from error.__cause__
        raise InferError(
            f"predict failed on {where} (counted from 0): {reason_of(error)}\n"
            f"the batch: {self._caller.kind} of {counted(rows.num_rows, 'row')}\n"
            f"the first row: {first_row_text(rows)}"
        ) from error

    def _search(self, rows: _Rows, first_row: int, error: Exception) -> list[_RowRange]:
        """Return the predictions of rows that failed together, except for as few rows as possible.

        Rows are halved. A half whose other half can be predicted is always searched, and the others after
        it, the largest first.
        """
        found: list[tuple[int, _RowRange]] = []
        promising: deque[tuple[int, _Rows, Exception]] = deque()
        doubtful = deque([(0, rows, error)])
        n_failures = 0
        while promising or doubtful:
            is_hopeless = not promising and n_failures >= _MAX_FAILURES
            start, part, error = (promising or doubtful).popleft()
            if part.num_rows == 1 or is_hopeless:
                found.append((start, _failed(part, first_row + start, error)))
                continue
            middle, failed = part.num_rows // 2, []
            for offset, half in ((0, part.slice(0, middle)), (middle, part.slice(middle))):
                place = start + offset
                try:
                    (columns,) = self._attempt(half, first_row + place, ((0, half.num_rows),))
                except Exception as again:
                    self._raise_unless_allowed(half, first_row + place, again)
                    failed.append((place, half, again))
                else:
                    found.append((place, _RowRange(half.num_rows, columns)))
            n_failures = n_failures + 2 if len(failed) == 2 else 0
            (doubtful if len(failed) == 2 else promising).extend(failed)
        return [part for _, part in sorted(found, key=lambda each: each[0])]


def _failed(rows: _Rows, first_row: int, error: Exception) -> _RowRange:
    last_row = first_row + rows.num_rows - 1
    failure = RowFailure(first_row, last_row, reason_of(error), first_row_text(rows))
    return _RowRange(rows.num_rows, failure=failure)


def reason_of(error: Exception) -> str:
    """Return the type and the text of an error of ``predict``, shortened, as text that can be encoded."""
    kind = type(error).__name__
    try:
        text = str(error).strip()
    except Exception as broken:  # the user's own __str__
        text = f"<no message: {kind}.__str__ raised {type(broken).__name__}>"
    is_ours = isinstance(error, (MisfitError, InferError))
    whole = text if is_ours else f"{kind}: {text}" if text else kind
    return clipped(whole, _MAX_REASON_CHARACTERS).encode("utf-8", "backslashreplace").decode()


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def _in_one_piece(table: pa.Table | BlockRows) -> Sequence[_Rows]:
    """Return record batches, several only if one array cannot hold a column."""
    if not isinstance(table, pa.Table):
        return [table] if table.num_rows else []
    if any(column.num_chunks > 1 for column in table.columns):
        table = table.combine_chunks()
    return [rows for rows in table.to_batches() if rows.num_rows]


def _is_buffered(part: _RowRange) -> bool:
    return part.columns is None and part.failure is None


def _reasons(part: _RowRange) -> pa.Array:
    if part.failure is None:
        return pa.nulls(part.n_rows, pa.string())
    return pa.array([part.failure.reason] * part.n_rows, pa.string())
