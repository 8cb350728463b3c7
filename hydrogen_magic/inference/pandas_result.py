"""Predictions as columns of a pandas DataFrame.

| predicted | without nulls | with nulls |
|---|---|---|
| integers | int64, … | Int64, …: through float, large numbers would change |
| truth values | bool | boolean |
| floats | float64, … | NaN |
| timestamps, durations | datetime64, timedelta64 | NaT |
| text | pandas' own dtype for text | NaN (None in pandas 2) |
| dictionaries | category | NaN |
| lists | object: NumPy arrays | None |
| bytes, decimals, dates, structs | object | None |
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from hydrogen_magic.inference.result_columns import (
    ChunkedColumn,
    FixedColumn,
    ResultColumn,
    ResultColumns,
    is_fixed,
    owned,
)

if TYPE_CHECKING:
    from hydrogen_magic.node.prediction.options import InferOptions

__all__ = ["PandasResult"]


class PandasResult:
    """See :class:`hydrogen_magic.inference.sources.FrameResult`."""

    is_bounded = False
    n_waiting = 0

    def __init__(self, frame: pd.DataFrame, names: Sequence[str], options: InferOptions) -> None:
        self._frame = frame
        self._names = names
        self._kept = options.kept(names)
        self._predicted = ResultColumns(len(frame), _column)

    def begin(self, schema: pa.Schema) -> None:
        self._predicted.begin(schema)

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table | None) -> None:
        self._predicted.put(first_row, columns)

    def finish(self) -> pd.DataFrame:
        values = {field.name: _values(column) for field, column in self._predicted.take()}
        # copy=False: each column stays the array it was gathered in.
        predicted = pd.DataFrame(values, index=self._frame.index, copy=False)
        kept = self._own_columns()
        parts = [kept, predicted] if self._kept or not values else [predicted]
        whole: pd.DataFrame = pd.concat(parts, axis=1)
        whole.columns.name = self._frame.columns.name
        whole.attrs = copy.deepcopy(self._frame.attrs)
        return whole

    def _own_columns(self) -> pd.DataFrame:
        if len(self._kept) == len(self._names) and list(self._names) == self._kept:
            return self._frame
        place = {name: number for number, name in enumerate(self._names)}
        chosen: pd.DataFrame = self._frame.iloc[:, [place[name] for name in self._kept]]
        return chosen

    def abort(self) -> None:
        self._predicted.clear()


class _Objects:
    """A column of Python objects: what pandas has no array of."""

    def __init__(self, n_rows: int) -> None:
        self.values: Any = np.empty(n_rows, object)

    def put(self, first_row: int, column: pa.ChunkedArray) -> None:
        for array in column.chunks:
            end = first_row + len(array)
            self.values[first_row:end] = owned(array).to_pandas().to_numpy()
            first_row = end

    def arrow(self) -> Any:
        return pa.array(self.values, from_pandas=True)


def _column(type_: pa.DataType, n_rows: int) -> ResultColumn:
    if pa.array([], type_).to_pandas().dtype == object:
        return _Objects(n_rows)
    return FixedColumn(type_, n_rows) if is_fixed(type_) else ChunkedColumn(type_)


def _values(column: ResultColumn) -> Any:
    """Return a finished column as what pandas would have made of it."""
    if isinstance(column, _Objects):
        return column.values
    return _plain(column) if isinstance(column, FixedColumn) else column.arrow().to_pandas().array


def _plain(column: FixedColumn) -> Any:
    values, missing, types = column.values, column.missing, pa.types
    if types.is_boolean(column.type):
        return values if missing is None else pd.arrays.BooleanArray(values, missing)
    if types.is_integer(column.type):
        return values if missing is None else pd.arrays.IntegerArray(values, missing)
    if types.is_floating(column.type):
        if missing is not None:
            values[missing] = np.nan
        return values
    if missing is not None:
        values[missing] = np.iinfo(np.int64).min  # NaT
    return _times(column.type, values)


def _times(type_: pa.DataType, counts: Any) -> Any:
    if pa.types.is_duration(type_):
        return counts.view(f"m8[{type_.unit}]")
    if type_.tz is None:
        return counts.view(f"M8[{type_.unit}]")
    return pa.Array.from_buffers(type_, len(counts), [None, pa.py_buffer(counts)]).to_pandas().array
