"""A pandas DataFrame as a source of chunks, and as the result.

Columns of numbers are views of the frame's blocks. Other columns are converted to Arrow a chunk at a time.
NaN stays NaN; None, NaT, pd.NA and masked values become null. The index is sent to ranks unless it only
counts rows, or Arrow has no type for it.

| predicted | without nulls | with nulls |
|---|---|---|
| integers | int64, … | Int64, …: float would change large numbers |
| booleans | bool | boolean |
| floats | float64, … | NaN |
| timestamps, durations | datetime64, timedelta64 | NaT |
| text | pandas' dtype for text | NaN (None in pandas 2) |
| dictionaries | category | NaN |
| lists, and arrays of several dimensions | object: NumPy arrays | None |
| bytes, decimals, dates, structs | object | None |

Lists and arrays with a null integer or boolean inside, or with structs of times in nanoseconds, are Python
lists; fields beside such ones are not changed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.memory_result import MemoryResult, PredictedColumns, RowRanges
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.arrow_to_pandas import (
    has_zoned_categories,
    nullable_dtype,
    with_zone,
)
from hydrogen_magic.node.prediction.block_rows import BlockLayout, BlockRows
from hydrogen_magic.node.prediction.column_names import refuse_repeated
from hydrogen_magic.node.prediction.column_values import check_times, exact_type
from hydrogen_magic.node.prediction.exact_cells import exact_cells, has_inexact_items
from hydrogen_magic.node.prediction.ndarray_columns import has_tensors, tensors
from hydrogen_magic.serialization.object_paths import describe

if TYPE_CHECKING:
    from hydrogen_magic.node.prediction.options import InferOptions

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
_MAX_NUMBER_BYTES = 8
_CHECKED_ROWS = 1 << 16
_TEXT_TYPES = {"string": str, "large_string": str, "binary": bytes, "large_binary": bytes}
"""Arrow would convert bytes to text and text to bytes; a prediction must get each value as it is."""


class PandasSource:
    """See :class:`hydrogen_magic.inference.sources.FrameSource`; its chunks are :class:`BlockRows`."""

    def __init__(self, frame: pd.DataFrame) -> None:
        # A view: with copy-on-write, later changes in the notebook do not reach it.
        self._frame: pd.DataFrame = frame.copy(deep=False)
        self._names = _names(frame)
        blocks, others = _grouped(frame)
        self._columns = [_column(self._names[n], frame.iloc[:, n]) for n in others]
        self.n_rows: int | None = len(frame)
        self.attrs: Any = frame.attrs
        names = [self._names[n] for n in others]
        types = [(name, column.type) for name, column in zip(names, self._columns, strict=True)]
        named = frame.iloc[:0, others].set_axis(names, axis=1).reset_index(drop=True)
        index = _index_columns(frame)
        self._columns += index
        for level, (name, column) in enumerate(zip(_other_names(self._names), index, strict=False)):
            types.append((name, column.type))
            named[name] = frame.index[:0].get_level_values(level)
        self._layout = BlockLayout(
            self._names,
            like=_without_rows(frame),
            dtypes=list(blocks),
            places=[np.array(places) for places in blocks.values()],
            others=np.array(others, dtype=int),
            table=pa.schema(types, metadata=_metadata(named)),
            index=list(frame.index.names) if index else [],
        )
        self._blocks = [_selection(places) for places in blocks.values()]
        self.schema = self._layout.schema

    def chunks(self, batch_size: int) -> Iterator[BlockRows]:
        return chunking.sliced(self._take, len(self._frame), batch_size)

    def _take(self, start: int, n_rows: int) -> BlockRows:
        arrays = [column.chunk(start, start + n_rows) for column in self._columns]
        table = chunking.table_of(arrays, self._layout.table, n_rows)
        rows = self._frame.iloc[start : start + n_rows]
        # Without a copy if pandas has these columns in one block, too.
        blocks = [rows.iloc[:, columns].to_numpy() for columns in self._blocks]
        return BlockRows(self._layout, n_rows, blocks, table)

    def result(self, options: InferOptions) -> MemoryResult:
        kept = options.kept(self._names)

        def join(rows: pa.Table, predicted: PredictedColumns, done: RowRanges) -> pd.DataFrame:
            return self._joined(_rows_of(self._frame, done), kept, predicted, options)

        return MemoryResult(join)

    def _joined(
        self,
        own: pd.DataFrame,
        kept: list[str],
        predicted: PredictedColumns,
        options: InferOptions,
    ) -> pd.DataFrame:
        values = {field.name: _values(column) for field, column in predicted}
        # copy=False: each column keeps the array that it was converted to.
        frame: pd.DataFrame = pd.DataFrame(values, index=own.index, copy=False)
        if kept or not values:
            frame = pd.concat([self._own_columns(own, kept), frame], axis=1)
        if options.replace:
            frame = self._in_order(frame, [*kept, *values], options.order(self._names, [*values]))
        frame.columns.name = own.columns.name
        frame.attrs = copy.deepcopy(own.attrs)
        return frame

    def _in_order(self, frame: pd.DataFrame, names: list[str], order: list[str]) -> pd.DataFrame:
        """Return the columns with these ``names`` in ``order``, under the frame's labels."""
        labels = dict(zip(self._names, self._frame.columns, strict=True))
        ordered: pd.DataFrame = frame.iloc[:, pd.Index(names).get_indexer(order)]
        ordered.columns = pd.Index([labels.get(name, name) for name in order])
        return ordered

    def _own_columns(self, own: pd.DataFrame, kept: list[str]) -> pd.DataFrame:
        if kept == self._names:
            return own
        columns: pd.DataFrame = own.iloc[:, pd.Index(self._names).get_indexer(kept)]
        return columns


def _rows_of(frame: pd.DataFrame, done: RowRanges) -> pd.DataFrame:
    """Return these rows; the frame itself if they are all."""
    if done in ([], [(0, len(frame))]):
        return frame if done else frame.iloc[:0]
    places = np.concatenate([np.arange(first, end) for first, end in done])
    rows: pd.DataFrame = frame.iloc[places]
    return rows


def _values(column: pa.ChunkedArray) -> Any:
    """Return a predicted column as an array of pandas that may be written."""
    known = (array.drop_null() for array in column.chunks)
    if has_tensors(column.type) and not any(map(has_inexact_items, known)):
        return _objects([cell for array in column.chunks for cell in tensors(array)])
    if any(map(has_inexact_items, column.chunks)):
        return _objects(exact_cells(column.chunks))
    series = column.to_pandas(types_mapper=nullable_dtype if column.null_count else None)
    if has_zoned_categories(column.type) and column.num_chunks:
        return with_zone(series, column.chunk(0)).array  # its chunks have one dictionary
    is_view = column.num_chunks == 1
    return (series.copy() if is_view else series).array


def _objects(cells: list[Any]) -> Any:
    """Return an array of objects; NumPy would make one array of arrays."""
    array: Any = np.empty(len(cells), dtype=object)
    for place, cell in enumerate(cells):
        array[place] = cell
    return array


def _without_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a plain DataFrame with the labels and ``attrs``: ranks may lack the frame's own class."""
    empty: pd.DataFrame = pd.DataFrame(columns=frame.columns)
    empty.attrs = frame.attrs
    return empty


def _grouped(frame: pd.DataFrame) -> tuple[dict[Any, list[int]], list[int]]:
    """Return the places of the columns of each type of number that Arrow has too, and of all others."""
    found: dict[Any, list[int]] = {}
    for place, dtype in enumerate(frame.dtypes):
        is_number = isinstance(dtype, np.dtype) and dtype.kind in "biuf" and dtype.isnative
        key = dtype if is_number and dtype.itemsize <= _MAX_NUMBER_BYTES else None
        found.setdefault(key, []).append(place)
    others = found.pop(None, [])
    return found, others


def _selection(places: list[int]) -> list[int] | slice:
    """Return consecutive columns as a slice, which pandas does not copy."""
    is_slice = places[-1] - places[0] + 1 == len(places)
    return slice(places[0], places[-1] + 1) if is_slice else places


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
        if isinstance(self.type, pa.FixedShapeTensorType):
            return _tensor_array(values, self.type)
        if self.is_objects:
            return pa.array(values, type=self.type, from_pandas=True)
        return pa.array(values)


def _column(name: str, series: Any) -> _PandasColumn:
    if series.dtype == object:
        values = series.to_numpy()
        kind = _tensor_type(values) or _type_of_objects(name, values)
        return _PandasColumn(values, kind, is_objects=True)
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


def _index_columns(frame: pd.DataFrame) -> list[_PandasColumn]:
    """Return the levels of the index, none if batches do not have it."""
    index = frame.index
    counts_rows = isinstance(index, pd.RangeIndex) and (index.start, index.step) == (0, 1)
    if counts_rows and index.name is None:
        return []
    levels = (index.get_level_values(level) for level in range(index.nlevels))
    try:
        return [_column("the index", pd.Series(level)) for level in levels]
    except InferError:
        return []


def _unsupported(name: str, dtype: str) -> InferError:
    remedies = (text for start, text in _REMEDIES.items() if dtype.startswith(start))
    remedy = next(remedies, "convert it").format(name=repr(name))
    return InferError(
        f"column {name!r} has dtype {dtype}, which Arrow does not support, so it cannot be sent to a"
        f" rank: {remedy}, or drop it with df.drop(columns={name!r})"
    )


def _tensor_type(values: Any) -> pa.DataType | None:
    """Return the type of arrays of several dimensions, of one shape and type of number; None otherwise."""
    first = values[0] if len(values) else None
    if not isinstance(first, np.ndarray) or first.ndim < 2 or not first.size:
        return None
    is_alike = (isinstance(each, np.ndarray) and each.dtype == first.dtype for each in values)
    if first.dtype.kind not in "iuf" or not all(is_alike):
        return None
    if any(each.shape != first.shape for each in values):
        return None
    return pa.fixed_shape_tensor(pa.from_numpy_dtype(first.dtype), first.shape)


def _tensor_array(arrays: Any, kind: pa.FixedShapeTensorType) -> pa.Array:
    numbers = np.stack([*arrays]).reshape(-1) if len(arrays) else []
    size = kind.storage_type.list_size
    storage = pa.FixedSizeListArray.from_arrays(pa.array(numbers, kind.value_type), size)
    return pa.ExtensionArray.from_storage(kind, storage)


def _type_of_objects(name: str, values: Any) -> pa.DataType:
    """Return the one Arrow type of all values. Raises InferError if there is none."""
    try:
        kind = pa.infer_type(values, from_pandas=True)
        check_times(values, kind)
        kind = exact_type(kind, values)
        if str(kind) in _TEXT_TYPES:
            _check_all_are(_TEXT_TYPES[str(kind)], values)
        elif not pa.types.is_null(kind):
            # Only a conversion tells whether all values fit; in parts, to save memory.
            for start in range(0, len(values), _CHECKED_ROWS):
                pa.array(values[start : start + _CHECKED_ROWS], type=kind, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        remedy = "astype(str)"
        if any(isinstance(value, np.ndarray) and value.ndim > 1 for value in values):
            remedy = 'map(lambda array: array.tolist(), na_action="ignore")'
        if any(is_a(value, "torch", "Tensor") for value in values):
            remedy = 'map(lambda tensor: tensor.tolist(), na_action="ignore")'
        raise InferError(
            f"column {name!r} has values of type {_shown_types(values)}, which have no common Arrow"
            f" type ({error}): convert them to one type, for example with df[{name!r}].{remedy}, or"
            f" drop the column with df.drop(columns={name!r})"
        ) from None
    return kind


def _check_all_are(wanted: type, values: Any) -> None:
    found = pd.api.types.infer_dtype(values, skipna=True)
    if found not in ("string" if wanted is str else "bytes", "empty"):
        raise TypeError(f"Arrow would convert all of them to {wanted.__name__}")


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
    remedy = "rename one, or keep the first of each with df.loc[:, ~df.columns.duplicated()]"
    if frame.columns.is_unique:
        remedy = "rename one, since labels are compared as text"
    refuse_repeated(names, "the frame has", remedy)
    return names


def _other_names(names: list[str]) -> Iterator[str]:
    """Yield names for levels of the index that no column has."""
    return (name for name in map("__index_{}__".format, itertools.count()) if name not in names)


def _metadata(empty: pd.DataFrame) -> dict[bytes, bytes]:
    """Return the metadata from which ``pyarrow.Table.to_pandas`` restores dtypes."""
    empty.attrs = {}  # they are in the layout, and need not be JSON
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
