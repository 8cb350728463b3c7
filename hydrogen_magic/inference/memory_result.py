"""Predictions that are collected in memory and joined to their frame at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from hydrogen_magic.node.prediction.schema_unify import fit

RowRanges = list[tuple[int, int]]
"""First row and end of consecutive rows."""
PredictedColumns = Iterator[tuple[pa.Field, pa.ChunkedArray]]
"""One column after another, so that its memory can be released before the next one is converted."""


class MemoryResult:
    """See :class:`hydrogen_magic.inference.sources.FrameResult`.

    Args:
        join: Makes the result from the kept rows, the predicted columns, and the numbers of their rows.
        own: Schema of the columns to keep of each chunk, for data that can be read only once. None: the
            frame still has its rows, and ``join`` is called with an empty table.
    """

    is_bounded = False
    n_waiting = waiting_bytes = 0
    target = None

    def __init__(
        self,
        join: Callable[[pa.Table, PredictedColumns, RowRanges], Any],
        own: pa.Schema | None = None,
    ) -> None:
        self._join = join
        self._own = pa.schema([]) if own is None else own
        self._schema = pa.schema([])
        self._ends: dict[int, int] = {}
        """First row of every chunk that has arrived -> the row after its last."""
        self._rows: dict[int, pa.Table] = {}
        self._columns: list[dict[int, list[pa.Array]]] = []
        """For each predicted column, the arrays of every chunk by its first row."""

    def begin(self, schema: pa.Schema) -> None:
        columns = self._columns or [{} for _ in schema]
        self._columns = [
            _fitted(column, field) for column, field in zip(columns, schema, strict=True)
        ]
        self._schema = schema

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table) -> None:
        self._ends[first_row] = first_row + columns.num_rows
        if self._own.names:
            self._rows[first_row] = rows.select(self._own.names)
        for arrays, column in zip(self._columns, columns.columns, strict=True):
            arrays[first_row] = copied(column)

    @property
    def done(self) -> RowRanges:
        """Rows that have arrived, in order."""
        found: RowRanges = []
        for first_row, end in sorted(self._ends.items()):
            is_next = bool(found) and found[-1][1] == first_row
            found[-1:] = [(found[-1][0], end)] if is_next else [*found[-1:], (first_row, end)]
        return found

    def finished(self) -> Any:
        """See :class:`hydrogen_magic.inference.sources.FrameResult`."""
        rows = [self._rows.pop(first_row) for first_row in sorted(self._rows)]
        whole = pa.concat_tables([self._own.empty_table(), *rows])
        return self._join(whole, self._predicted(), self.done)

    finish = finished

    def _predicted(self) -> PredictedColumns:
        columns, self._columns = deque(self._columns), []
        for field in self._schema:
            yield field, _in_row_order(columns.popleft(), field)

    def abort(self) -> None:
        self._rows.clear()
        self._columns.clear()


def copied(column: pa.ChunkedArray) -> list[pa.Array]:
    """Return the arrays of a column in their own memory.

    They are parts of the message that a rank sent; as long as one of them exists, so does the message.
    """
    return [pa.concat_arrays([array]) for array in column.chunks]


def _fitted(chunks: dict[int, list[pa.Array]], field: pa.Field) -> dict[int, list[pa.Array]]:
    """Return the arrays of a column in a wider type."""
    return {
        first_row: [fit(array, field, is_declared=False) for array in arrays]
        for first_row, arrays in chunks.items()
    }


def _in_row_order(chunks: dict[int, list[pa.Array]], field: pa.Field) -> pa.ChunkedArray:
    arrays = [array for first_row in sorted(chunks) for array in chunks[first_row]]
    return pa.chunked_array(arrays, field.type).unify_dictionaries()
