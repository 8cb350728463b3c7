"""Predicted columns, put in order in the memory that the result keeps.

Columns of a fixed width are written straight to their place in one array per column. Others are kept
as the chunks they came in, copied once out of the message that brought them: a view of a part would
keep all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from hydrogen_magic.errors import InferError

__all__ = [
    "ResultColumn",
    "RowCoverage",
    "FixedColumn",
    "ResultColumns",
    "ChunkedColumn",
    "arrow_column",
    "is_fixed",
    "owned",
]

_FIXED_BITS = (8, 16, 32, 64)


class ResultColumn(Protocol):
    """One predicted column of a known number of rows."""

    def put(self, first_row: int, column: pa.ChunkedArray) -> None:
        """Take the values of the rows from ``first_row`` on."""

    def arrow(self) -> Any:
        """Return the whole column as an Arrow array, chunked where it came in chunks."""


def is_fixed(type_: pa.DataType) -> bool:
    """Say whether all values have one width that NumPy has a number of."""
    types = pa.types
    if types.is_boolean(type_):
        return True
    return bool(types.is_primitive(type_) and type_.bit_width in _FIXED_BITS)


def owned(array: Any) -> Any:
    """Return a copy of an array that shares no memory with the message it came in."""
    return pa.concat_arrays([array])


class FixedColumn:
    """A column of numbers, truth values or times, in one array from the start."""

    def __init__(self, type_: pa.DataType, n_rows: int) -> None:
        self.type = type_
        self.values = np.empty(n_rows, _number(type_))
        """The bare numbers: a timestamp's is its count of units."""
        self.missing: Any = None
        """Where nulls are; None as long as there was none."""

    def put(self, first_row: int, column: pa.ChunkedArray) -> None:
        for array in column.chunks:
            rows = slice(first_row, first_row + len(array))
            if len(array):
                self.values[rows] = self._numbers(array)
            if array.null_count:
                self._note(rows, array)
            first_row = rows.stop

    def _numbers(self, array: Any) -> Any:
        if pa.types.is_boolean(self.type):
            return array.fill_null(False).to_numpy(zero_copy_only=False)
        width = self.values.itemsize
        bare = np.frombuffer(
            array.buffers()[1], self.values.dtype, len(array), array.offset * width
        )
        # What lies under a null is anybody's; the same input is to give the same bytes.
        present = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else True
        return np.where(present, bare, self.values.dtype.type(0)) if array.null_count else bare

    def _note(self, rows: slice, array: Any) -> None:
        if self.missing is None:
            self.missing = np.zeros(len(self.values), bool)
        self.missing[rows] = array.is_null().to_numpy(zero_copy_only=False)

    def arrow(self) -> Any:
        if pa.types.is_boolean(self.type):
            return pa.array(self.values, mask=self.missing)
        present = None if self.missing is None else pa.array(~self.missing).buffers()[1]
        return pa.Array.from_buffers(
            self.type, len(self.values), [present, pa.py_buffer(self.values)]
        )


def _number(type_: pa.DataType) -> Any:
    types = pa.types
    if types.is_boolean(type_) or types.is_integer(type_) or types.is_floating(type_):
        return np.dtype(type_.to_pandas_dtype())
    return np.dtype(f"i{type_.bit_width // 8}")


class ChunkedColumn:
    """A column of texts, lists or whatever else, as chunks."""

    def __init__(self, type_: pa.DataType) -> None:
        self.type = type_
        self._parts: dict[int, list[Any]] = {}

    def put(self, first_row: int, column: pa.ChunkedArray) -> None:
        self._parts[first_row] = [owned(array) for array in column.chunks]

    def arrow(self) -> Any:
        arrays = [array for first in sorted(self._parts) for array in self._parts[first]]
        self._parts.clear()
        return pa.chunked_array(arrays, type=self.type).unify_dictionaries()


def arrow_column(type_: pa.DataType, n_rows: int) -> ResultColumn:
    """Return an empty column for a frame that keeps Arrow types."""
    return FixedColumn(type_, n_rows) if is_fixed(type_) else ChunkedColumn(type_)


class RowCoverage:
    """Which rows have come."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def add(self, first_row: int, n_rows: int) -> None:
        self._ends[first_row] = first_row + n_rows

    def check(self, n_rows: int | None = None) -> None:
        """Raise InferError unless all rows have come, each of them once."""
        done = 0
        for first_row in sorted(self._ends):
            if first_row > done:
                raise InferError(f"the predictions for rows {done} to {first_row - 1} are missing")
            if first_row < done:
                raise InferError(f"predictions for rows {first_row} to {done - 1} came twice")
            done = self._ends[first_row]
        if n_rows is not None and done != n_rows:
            raise InferError(f"predictions came for {done} rows: the frame has {n_rows}")


class ResultColumns:
    """All predicted columns of ``n_rows`` rows; the ``make`` of a column decides how it is kept."""

    def __init__(
        self, n_rows: int, make: Callable[[pa.DataType, int], ResultColumn] = arrow_column
    ) -> None:
        self.schema: pa.Schema | None = None
        self._n_rows = n_rows
        self._make = make
        self._columns: list[ResultColumn] = []
        self._coverage = RowCoverage()

    def begin(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._columns = [self._make(field.type, self._n_rows) for field in schema]

    def put(self, first_row: int, columns: pa.Table) -> None:
        self._coverage.add(first_row, columns.num_rows)
        for column, values in zip(self._columns, columns.columns, strict=True):
            column.put(first_row, values)

    def take(self) -> Iterator[tuple[pa.Field, Any]]:
        """Yield every column with its field, and let go of it. Raises InferError for missing rows."""
        if self.schema is None:
            return
        self._coverage.check(self._n_rows)
        columns, self._columns = deque(self._columns), []
        for field in self.schema:
            yield field, columns.popleft()

    def clear(self) -> None:
        self._columns = []
