"""Converts a result of ``predict`` to named Arrow columns with as many rows as the batch.

* A dict, DataFrame, table or list of dicts is its columns; a named tuple too.
* A Series, array, tensor or list is one column, named as the Series is, or else ``prediction``.
* Arrays of shape (rows, 1) are a column of numbers, those of shape (rows, k) one of lists of fixed
  size k, and so on inwards: an embedding stays one column.
* A single value is a row's where the batch has one row; beside whole columns in a dict it is repeated.
* Rows are matched by position. A pandas object whose index has the batch's labels in another order, or
  counts its rows from 0 in another order, is put into the batch's order.
* Missing values of pandas are null, among floats NaN as well, as pandas makes no difference; NaN of
  NumPy, torch and lists stays NaN.
* Decimals that are Python objects get 38 digits, as their number differs from batch to batch.

Memory is copied: ``predict`` may reuse its own for the next batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from hydrogen_magic.node.prediction.column_values import array_from, is_a, is_single, rows_in
from hydrogen_magic.node.prediction.schema_unify import MisfitError
from hydrogen_magic.serialization.pickling_errors import describe

__all__ = ["PREDICTION", "columns_of"]

PREDICTION = "prediction"
"""The name of a column without one."""

_RETURNED = (
    "return a dict of columns, a Series, DataFrame, array, tensor, Arrow table or a list with one"
    " value per row"
)


def columns_of(
    value: Any, n_rows: int, index: Any = None, wanted: pa.Schema | None = None
) -> dict[str, pa.Array]:
    """Return the columns in the result of ``predict`` for a batch of ``n_rows`` rows.

    Args:
        value: The returned object.
        n_rows: Rows of the batch, at least 1.
        index: The batch's pandas index, if it was given as pandas.
        wanted: Known properties of the columns, for values whose shape is ambiguous.

    Raises MisfitError if it does not consist of columns with this many rows.
    """
    if value is None:
        raise MisfitError(f"predict returned None: {_RETURNED}")
    named = list(_named(value, n_rows, index))
    _check_names([name for name, _ in named])
    singles = {name for name, part in named if is_single(part)}
    if n_rows > 1 and len(singles) == len(named):
        raise MisfitError(
            f"predict returned a {describe(value)}, a single value, for the {n_rows:,} rows it was"
            " given: return one value per row"
        )
    columns = {}
    for name, part in named:
        field = _field(wanted, name)
        whole = [part] * n_rows if name in singles else _in_order(part, index)
        array = array_from(whole, n_rows, name, field)
        if len(array) != n_rows:
            raise MisfitError(
                f"predict returned {len(array):,} rows in column {name!r} ({describe(part)}) for"
                f" the {n_rows:,} rows it was given: return one value per row"
            )
        columns[name] = array
    return columns


def _field(wanted: pa.Schema | None, name: str) -> pa.Field | None:
    place = -1 if wanted is None else wanted.get_field_index(name)
    return None if wanted is None or place < 0 else wanted.field(place)


def _check_names(names: list[str]) -> None:
    if not names:
        raise MisfitError("predict returned no columns: return at least one")
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise MisfitError(f"predict returned two columns {repeated!r}: give each a unique name")


# ── the columns and their names ──────────────────────────────────────────────────────────────────


def _named(value: Any, n_rows: int, index: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif is_a(value, "pandas", "DataFrame"):
        rows_in(value, n_rows)
        ordered = _in_order(value, index)
        names = _pandas_names(value)
        yield from ((name, ordered.iloc[:, place]) for place, name in enumerate(names))
    elif is_a(value, "polars", "LazyFrame"):
        yield from _named(value.collect(), n_rows, index)
    elif is_a(value, "polars", "DataFrame"):
        yield from ((part.name, part) for part in value.get_columns())
    elif is_a(value, "pandas", "Series") or is_a(value, "polars", "Series"):
        yield (PREDICTION if value.name in (None, "") else str(value.name)), value
    elif isinstance(value, (pa.Table, pa.RecordBatch)):
        yield from zip(value.schema.names, value.columns, strict=True)
    elif isinstance(value, (pa.Array, pa.ChunkedArray)):
        yield PREDICTION, value
    elif hasattr(value, "__arrow_c_stream__"):
        yield from _named(pa.table(value), n_rows, index)
    else:
        yield from _named_by_parts(value)


def _named_by_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield columns of named tuples, structured arrays and records; other values are one column."""
    fields = getattr(value, "_fields", None) or getattr(
        getattr(value, "dtype", None), "names", None
    )
    if isinstance(value, tuple) and fields:
        yield from zip(fields, value, strict=True)
    elif fields and hasattr(value, "__array__"):
        yield from ((name, value[name]) for name in fields)
    elif _are_records(value):
        names = dict.fromkeys(name for row in value for name in row)
        yield from ((str(name), [row.get(name) for row in value]) for name in names)
    else:
        _refuse_what_is_no_column(value)
        yield PREDICTION, value


def _are_records(value: Any) -> bool:
    return bool(isinstance(value, list) and value and all(isinstance(row, dict) for row in value))


def _refuse_what_is_no_column(value: Any) -> None:
    if isinstance(value, tuple) and any(hasattr(part, "shape") for part in value):
        raise MisfitError(
            f"predict returned a tuple of {len(value)} arrays: return a dict with a name for each"
        )
    if isinstance(value, (set, frozenset)):
        raise MisfitError("predict returned a set, which has no order: return a list")
    if hasattr(value, "__next__"):
        raise MisfitError(f"predict returned a {describe(value)}: return list(…) of it")


def _pandas_names(frame: Any) -> list[str]:
    """Return the names of a DataFrame's columns; numbers generated by pandas follow ``prediction``."""
    pandas = sys.modules["pandas"]
    if isinstance(frame.columns, pandas.RangeIndex):
        count = len(frame.columns)
        return [f"{PREDICTION}_{place}" for place in range(count)] if count > 1 else [PREDICTION]
    return [str(name) for name in frame.columns]


def _in_order(part: Any, index: Any) -> Any:
    """Return a pandas object in the order of the batch's index, if it has the same labels."""
    if index is None or not (is_a(part, "pandas", "Series") or is_a(part, "pandas", "DataFrame")):
        return part
    own, pandas = part.index, sys.modules["pandas"]
    if own is index or len(own) != len(index) or own.equals(index):
        return part
    ranges = isinstance(own, pandas.RangeIndex) and isinstance(index, pandas.RangeIndex)
    if (ranges and own.step == index.step) or not own.is_unique:
        return part
    for labels in (index, pandas.RangeIndex(len(index))):
        places = own.get_indexer(labels)
        if labels.is_unique and not (places < 0).any():
            return part.iloc[places]
    return part
