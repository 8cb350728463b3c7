"""A pandas DataFrame as a source of chunks.

Columns of numbers become Arrow arrays over the frame's own memory wherever they lie there one value
after another, as pandas lays out a column that was read or assigned; others are converted a chunk at
a time. NaN stays NaN; None, NaT, pd.NA and what a nullable dtype masks are nulls. The index does not
travel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.pandas_result import PandasResult
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.column_names import refuse_repeated
from hydrogen_magic.serialization.pickling_errors import describe

if TYPE_CHECKING:
    from hydrogen_magic.node.prediction.options import InferOptions

__all__ = ["PandasSource"]

_REMEDIES = {
    "Sparse": "make it dense: df[{name}].sparse.to_dense()",
    "interval": "make its bounds two columns: df[{name}].array.left and .right",
    "category of interval": "make its categories text: df[{name}].astype(str)",
    "category of period": "make its categories text: df[{name}].astype(str)",
    "period": "make it a timestamp: df[{name}].dt.to_timestamp()",
    "complex": "make its parts two columns: df[{name}].to_numpy().real and .imag",
}
"""By the beginning of the dtype's name."""
_MOST_KINDS = 4
"""Of values that are named in a message."""
_TEXTS = {"string": str, "large_string": str, "binary": bytes, "large_binary": bytes}
"""Arrow takes bytes for text and text for bytes; here each value is to stay what it is."""


class PandasSource:
    """See :class:`hydrogen_magic.inference.sources.FrameSource`."""

    kind = "pandas"

    def __init__(self, frame: pd.DataFrame) -> None:
        # A view: where pandas copies on write, what the notebook does to the frame meanwhile is its.
        self._frame = frame.copy(deep=False)
        self._names = _names(frame)
        self._columns = [
            _column(name, frame.iloc[:, place]) for place, name in enumerate(self._names)
        ]
        self.n_rows: int | None = len(frame)
        self.n_bytes: int | None = int(frame.memory_usage(index=False, deep=False).sum())
        fields = [
            pa.field(name, column.type)
            for name, column in zip(self._names, self._columns, strict=True)
        ]
        self.schema = _with_labels(pa.schema(fields, metadata=_metadata(frame)), frame.columns)

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        pace = chunking.ChunkSizer(batch_size)
        for start, end in chunking.spans(len(self._frame), pace):
            arrays = [column.chunk(start, end) for column in self._columns]
            table = chunking.table_of(arrays, self.schema, end - start)
            pace.saw(table)
            yield table

    def result(self, options: InferOptions) -> PandasResult:
        return PandasResult(self._frame, self._names, options)


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class _PandasColumn:
    """One column, ready to be cut."""

    values: Any
    """Of NumPy, or one of pandas' arrays."""
    type: pa.DataType
    none_is_null: bool
    """True for objects, where NaN too says that nothing is there."""

    def chunk(self, start: int, end: int) -> Any:
        values = self.values[start:end]
        if self.none_is_null:
            return pa.array(values, type=self.type, from_pandas=True)
        return pa.array(values)


def _column(name: str, series: Any) -> _PandasColumn:
    if isinstance(series.dtype, np.dtype):
        values = series.to_numpy()
        if series.dtype == object:
            return _PandasColumn(values, _type_of_objects(name, values), none_is_null=True)
    else:
        values = series.array
    try:
        type_ = pa.array(values[:0]).type
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError):
        raise _cannot(name, str(series.dtype)) from None
    inner = type_.value_type if pa.types.is_dictionary(type_) else type_
    if isinstance(inner, pa.BaseExtensionType) and inner.extension_name.startswith("pandas."):
        kind = str(series.dtype if inner is type_ else series.array.categories.dtype)
        raise _cannot(name, kind if inner is type_ else f"category of {kind}")
    return _PandasColumn(values, type_, none_is_null=False)


def _cannot(name: str, dtype: str) -> InferError:
    remedies = (text for start, text in _REMEDIES.items() if dtype.startswith(start))
    remedy = next(remedies, "convert it").format(name=repr(name))
    return InferError(
        f"column {name!r} of the frame is {dtype}, which no Arrow type holds, so it cannot be given"
        f" to a rank: {remedy}, or leave it out: df.drop(columns={name!r})"
    )


def _type_of_objects(name: str, values: Any) -> pa.DataType:
    """Return the one Arrow type of all values. Raises InferError where there is none."""
    try:
        type_ = pa.infer_type(values, from_pandas=True)
        if pa.types.is_timestamp(type_) or pa.types.is_duration(type_):
            return _with_nanoseconds(type_, values)
        if str(type_) in _TEXTS:
            _refuse_others(name, values, _TEXTS[str(type_)])
        elif not pa.types.is_null(type_):
            _try(values, type_)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InferError(
            f"column {name!r} of the frame holds {_kinds(values)}, which have no common Arrow type"
            f" ({error}): make them one type, as with df[{name!r}].astype(str), or leave the column"
            f" out: df.drop(columns={name!r})"
        ) from None
    return type_


def _try(values: Any, type_: pa.DataType) -> None:
    """Convert all values, a piece at a time: only that tells whether they fit the type."""
    for start in range(0, len(values), 1 << 16):
        pa.array(values[start : start + (1 << 16)], type=type_, from_pandas=True)


def _refuse_others(name: str, values: Any, wanted: type) -> None:
    others = {"string", "empty"} if wanted is str else {"bytes", "empty"}
    if pd.api.types.infer_dtype(values, skipna=True) not in others:
        raise TypeError(f"Arrow would make {wanted.__name__} of all of them")


def _with_nanoseconds(type_: pa.DataType, values: Any) -> pa.DataType:
    """Return the type in nanoseconds where a value has some: Arrow looks for microseconds only."""
    fine = any(
        getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0) for value in values
    )
    if not fine:
        return type_
    is_timestamp = pa.types.is_timestamp(type_)
    return pa.timestamp("ns", type_.tz) if is_timestamp else pa.duration("ns")


def _kinds(values: Any) -> str:
    """Return the first kinds of values there are, for a message."""
    kinds: dict[str, None] = {}
    for value in values:
        is_nan = isinstance(value, float) and value != value
        if not is_nan and not any(value is nothing for nothing in (None, pd.NA, pd.NaT)):
            kinds.setdefault(describe(value))
        if len(kinds) == _MOST_KINDS:
            break
    return " and ".join(kinds) or "nothing"


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def _names(frame: pd.DataFrame) -> list[str]:
    """Return what Arrow calls the columns: their labels as text."""
    if isinstance(frame.columns, pd.MultiIndex):
        raise InferError(
            f"the frame's columns have {frame.columns.nlevels} levels: give each one name, as with"
            ' df.columns = ["_".join(map(str, labels)) for labels in df.columns]'
        )
    names = [str(label) for label in frame.columns]
    refuse_repeated(
        names,
        "the frame calls",
        "rename one, or keep the first of each with df.loc[:, ~df.columns.duplicated()]",
    )
    return names


def _metadata(frame: pd.DataFrame) -> dict[bytes, bytes]:
    """Return what ``pyarrow.Table.to_pandas`` needs to make the same labels and dtypes again."""
    empty = frame.iloc[:0].reset_index(drop=True)
    for place, dtype in enumerate(empty.dtypes):
        if isinstance(dtype, pd.ArrowDtype) and not _is_restored(empty.iloc[:, [place]]):
            empty.isetitem(place, empty.iloc[:, place].astype(object))
    metadata: dict[bytes, bytes] = pa.Schema.from_pandas(empty).metadata
    return metadata


def _with_labels(schema: pa.Schema, labels: pd.Index) -> pa.Schema:
    """Return a schema that has these labels in pandas, or their text.

    PyArrow does not make periods again, and turns the truth value False into True.
    """
    try:
        if schema.empty_table().to_pandas().columns.equals(labels):
            return schema
    except (TypeError, NotImplementedError, ValueError, KeyError):
        pass
    of_pandas = {**json.loads(schema.metadata[b"pandas"]), "column_indexes": []}
    return schema.with_metadata({**schema.metadata, b"pandas": json.dumps(of_pandas).encode()})


def _is_restored(column: pd.DataFrame) -> bool:
    """Say whether PyArrow knows this dtype by its name; of Arrow's nested types it does not."""
    try:
        pa.Table.from_pandas(column).to_pandas()
    except (TypeError, NotImplementedError, ValueError):
        return False
    return True
