"""A pandas DataFrame as a source of chunks, and as the result.

Columns of numbers become Arrow arrays over the frame's own memory if their values are contiguous, as
pandas stores a column that was read or assigned. Other columns are converted a chunk at a time. NaN
stays NaN; None, NaT, pd.NA and masked values become null. The index is not sent to ranks.

| predicted | without nulls | with nulls |
|---|---|---|
| integers | int64, … | Int64, …: float would change large numbers |
| booleans | bool | boolean |
| floats | float64, … | NaN |
| timestamps, durations | datetime64, timedelta64 | NaT |
| text | pandas' dtype for text | NaN (None in pandas 2) |
| dictionaries | category | NaN |
| lists | object: NumPy arrays | None |
| bytes, decimals, dates, structs | object | None |
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.memory_result import MemoryResult, PredictedColumns
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.arrow_to_pandas import nullable_dtype
from hydrogen_magic.node.prediction.column_names import refuse_repeated
from hydrogen_magic.serialization.pickling_errors import describe

if TYPE_CHECKING:
    from hydrogen_magic.node.prediction.options import InferOptions

__all__ = ["PandasSource"]

_REMEDIES = {
    "Sparse": "make it dense: df[{name}].sparse.to_dense()",
    "interval": "split it into two columns: df[{name}].array.left and .right",
    "category of interval": "convert its categories to text: df[{name}].astype(str)",
    "category of period": "convert its categories to text: df[{name}].astype(str)",
    "period": "convert it to timestamps: df[{name}].dt.to_timestamp()",
    "complex": "split it into two columns: df[{name}].to_numpy().real and .imag",
}
"""By the beginning of the dtype's name."""
_MAX_SHOWN_TYPES = 4
_CHECKED_ROWS = 1 << 16
_TEXT_TYPES = {"string": str, "large_string": str, "binary": bytes, "large_binary": bytes}
"""Arrow would convert bytes to text and text to bytes; a prediction must get each value as it is."""


class PandasSource:
    """See :class:`hydrogen_magic.inference.sources.FrameSource`."""

    def __init__(self, frame: pd.DataFrame) -> None:
        # A view: with copy-on-write, later changes in the notebook do not reach it.
        self._frame: pd.DataFrame = frame.copy(deep=False)
        self._names = _names(frame)
        self._columns = [
            _column(name, frame.iloc[:, place]) for place, name in enumerate(self._names)
        ]
        self.n_rows: int | None = len(frame)
        types = [
            (name, column.type) for name, column in zip(self._names, self._columns, strict=True)
        ]
        self.schema = _with_labels(pa.schema(types, metadata=_metadata(frame)), frame.columns)

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        def take(start: int, n_rows: int) -> pa.Table:
            arrays = [column.chunk(start, start + n_rows) for column in self._columns]
            return chunking.table_of(arrays, self.schema, n_rows)

        return chunking.sliced(take, len(self._frame), batch_size)

    def result(self, options: InferOptions) -> MemoryResult:
        kept = options.kept(self._names)
        return MemoryResult(lambda rows, predicted: self._joined(kept, predicted), self.n_rows)

    def _joined(self, kept: list[str], predicted: PredictedColumns) -> pd.DataFrame:
        values = {field.name: _values(column) for field, column in predicted}
        # copy=False: each column keeps the array that it was converted to.
        frame: pd.DataFrame = pd.DataFrame(values, index=self._frame.index, copy=False)
        if kept or not values:
            frame = pd.concat([self._own_columns(kept), frame], axis=1)
        frame.columns.name = self._frame.columns.name
        frame.attrs = copy.deepcopy(self._frame.attrs)
        return frame

    def _own_columns(self, kept: list[str]) -> pd.DataFrame:
        if kept == self._names:
            return self._frame
        columns: pd.DataFrame = self._frame.iloc[:, pd.Index(self._names).get_indexer(kept)]
        return columns


def _values(column: pa.ChunkedArray) -> Any:
    """Return a predicted column as an array of pandas that may be written."""
    series = column.to_pandas(types_mapper=nullable_dtype if column.null_count else None)
    is_view = column.num_chunks == 1
    return (series.copy() if is_view else series).array


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class _PandasColumn:
    """One column that can be cut into Arrow arrays."""

    values: Any
    """A NumPy array, or one of pandas' arrays."""
    type: pa.DataType
    is_objects: bool
    """Whether NaN is a null, as in a column of Python objects."""

    def chunk(self, start: int, end: int) -> Any:
        values = self.values[start:end]
        if self.is_objects:
            return pa.array(values, type=self.type, from_pandas=True)
        return pa.array(values)


def _column(name: str, series: Any) -> _PandasColumn:
    if series.dtype == object:
        values = series.to_numpy()
        return _PandasColumn(values, _type_of_objects(name, values), is_objects=True)
    values = series.to_numpy() if isinstance(series.dtype, np.dtype) else series.array
    try:
        kind = pa.array(values[:0]).type
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError):
        raise _unsupported(name, str(series.dtype)) from None
    is_dictionary = pa.types.is_dictionary(kind)
    inner = kind.value_type if is_dictionary else kind
    if isinstance(inner, pa.BaseExtensionType) and inner.extension_name.startswith("pandas."):
        dtype = f"category of {values.categories.dtype}" if is_dictionary else str(series.dtype)
        raise _unsupported(name, dtype)
    return _PandasColumn(values, kind, is_objects=False)


def _unsupported(name: str, dtype: str) -> InferError:
    remedies = (text for start, text in _REMEDIES.items() if dtype.startswith(start))
    remedy = next(remedies, "convert it").format(name=repr(name))
    return InferError(
        f"column {name!r} has dtype {dtype}, which Arrow does not support, so it cannot be sent to a"
        f" rank: {remedy}, or drop it with df.drop(columns={name!r})"
    )


def _type_of_objects(name: str, values: Any) -> pa.DataType:
    """Return the one Arrow type of all values. Raises InferError if there is none."""
    try:
        kind = pa.infer_type(values, from_pandas=True)
        if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
            return _with_nanoseconds(kind, values)
        if str(kind) in _TEXT_TYPES:
            _check_all_are(_TEXT_TYPES[str(kind)], values)
        elif not pa.types.is_null(kind):
            # Only a conversion tells whether all values fit; in parts, to save memory.
            for start in range(0, len(values), _CHECKED_ROWS):
                pa.array(values[start : start + _CHECKED_ROWS], type=kind, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InferError(
            f"column {name!r} has values of type {_shown_types(values)}, which have no common Arrow"
            f" type ({error}): convert them to one type, for example with df[{name!r}].astype(str), or"
            f" drop the column with df.drop(columns={name!r})"
        ) from None
    return kind


def _check_all_are(wanted: type, values: Any) -> None:
    found = pd.api.types.infer_dtype(values, skipna=True)
    if found not in ("string" if wanted is str else "bytes", "empty"):
        raise TypeError(f"Arrow would convert all of them to {wanted.__name__}")


def _with_nanoseconds(kind: pa.DataType, values: Any) -> pa.DataType:
    """Return the type in nanoseconds if a value needs them: Arrow infers microseconds."""
    fields = ("nanosecond", "nanoseconds")  # of a Timestamp, of a Timedelta
    if not any(getattr(value, field, 0) for value in values for field in fields):
        return kind
    return pa.timestamp("ns", kind.tz) if pa.types.is_timestamp(kind) else pa.duration("ns")


def _shown_types(values: Any) -> str:
    """Return the first types of values, for a message."""
    types: dict[str, None] = {}
    for value in values:
        if not (pd.api.types.is_scalar(value) and pd.isna(value)):
            types.setdefault(describe(value))
        if len(types) == _MAX_SHOWN_TYPES:
            break
    return " and ".join(types)


# ── labels ───────────────────────────────────────────────────────────────────────────────────────


def _names(frame: pd.DataFrame) -> list[str]:
    """Return the Arrow names of the columns: their labels as text."""
    if isinstance(frame.columns, pd.MultiIndex):
        raise InferError(
            f"the columns have {frame.columns.nlevels} levels: give each column one name, for example"
            ' with df.columns = ["_".join(map(str, labels)) for labels in df.columns]'
        )
    names = [str(label) for label in frame.columns]
    refuse_repeated(
        names,
        "the frame has",
        "rename one, or keep the first of each with df.loc[:, ~df.columns.duplicated()]",
    )
    return names


def _metadata(frame: pd.DataFrame) -> dict[bytes, bytes]:
    """Return the metadata from which ``pyarrow.Table.to_pandas`` restores labels and dtypes."""
    empty = frame.iloc[:0].reset_index(drop=True)
    for place, dtype in enumerate(empty.dtypes):
        if isinstance(dtype, pd.ArrowDtype) and not _is_restored(empty.iloc[:, [place]]):
            empty.isetitem(place, empty.iloc[:, place].astype(object))
    metadata: dict[bytes, bytes] = pa.Schema.from_pandas(empty).metadata
    return metadata


def _is_restored(column: pd.DataFrame) -> bool:
    """Return whether PyArrow can restore this dtype from its name; it cannot for nested types."""
    try:
        pa.Table.from_pandas(column).to_pandas()
    except (TypeError, NotImplementedError, ValueError):
        return False
    return True


def _with_labels(schema: pa.Schema, labels: pd.Index) -> pa.Schema:
    """Return a schema that restores these labels, or else their text.

    PyArrow does not restore periods, and turns the label False into True.
    """
    try:
        if schema.empty_table().to_pandas().columns.equals(labels):
            return schema
    except (TypeError, NotImplementedError, ValueError, KeyError):
        pass
    of_pandas = {**json.loads(schema.metadata[b"pandas"]), "column_indexes": []}
    return schema.with_metadata({**schema.metadata, b"pandas": json.dumps(of_pandas).encode()})
