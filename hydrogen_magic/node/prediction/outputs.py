"""The value that ``predict`` returned, as named Arrow columns with as many rows as the batch.

* A dict, DataFrame, table, named tuple or list of dicts has several columns.
* A Series, array, tensor or list is one column, with the name of the Series or ``prediction``, or that of
  the only column of ``--schema``. The caller passes on another name where a Series has that of a column of
  the frame.
* An array of shape (rows, 1) is a column of numbers; one of shape (rows, k) is a column of lists of fixed
  size k, and so on for further dimensions.
* A single value is valid for a batch of one row. Next to columns in a dict it is repeated.
* Rows are matched by position. A pandas object with the labels of the batch, or with labels from 0, in
  another order is put into the order of the batch.
* Missing values of pandas are null, and so is NaN, which pandas does not distinguish. NaN of NumPy, torch
  and lists stays NaN.
* Decimals of Python get 38 digits, since the precision of a batch depends on its values.

Memory is copied: ``predict`` may reuse its own for the next batch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.core.units import counted
from hydrogen_magic.node.prediction.column_values import array_from, is_single
from hydrogen_magic.node.prediction.schema_unify import MisfitError
from hydrogen_magic.serialization.object_paths import describe

PREDICTION = "prediction"
"""The name of a column without one."""


def columns_of(
    value: Any,
    n_rows: int,
    index: Any = None,
    known: Iterable[pa.Field] = (),
    only: str | None = None,
    *,
    as_text: bool = False,
) -> dict[str, pa.Array]:
    """Return the columns of the value that ``predict`` returned for a batch of ``n_rows`` rows.

    Args:
        value: The returned value.
        n_rows: Rows of the batch, at least 1.
        index: The pandas index of the batch, if it has one.
        known: Fields of columns, those that are known, for values whose shape alone is ambiguous.
        only: The name of the only column of ``--schema``: one column gets it, whatever its own name is.
        as_text: Whether a column is text if its values have no common type.

    Raises MisfitError if the value does not have such columns.
    """
    if value is None:
        raise MisfitError(
            "predict returned None: return a dict of columns, a Series, DataFrame, array, tensor, Arrow"
            " table or a list with one value per row"
        )
    named = list(_named(value, n_rows, index, only))
    _check_names([name for name, _ in named])
    singles = {name for name, part in named if is_single(part)}
    if n_rows > 1 and len(singles) == len(named):
        found = named[0][1] if len(named) == 1 else value
        raise MisfitError(
            f"predict returned a single value ({describe(found)}) for the {n_rows:,} rows of the batch:"
            " return one value per row"
        )
    fields = {field.name: field for field in known}
    columns = {}
    for name, part in named:
        whole = [part] * n_rows if name in singles else in_order(part, index)
        columns[name] = array_from(whole, n_rows, name, fields.get(name), as_text=as_text)
        _check_rows(len(columns[name]), n_rows, part, f" in column {name!r}")
    return columns


def _check_rows(found: int, n_rows: int, value: Any, where: str = "") -> None:
    if found != n_rows:
        raise MisfitError(
            f"predict returned {counted(found, 'row')}{where} ({describe(value)}) for the"
            f" {counted(n_rows, 'row')} of the batch: return one value per row"
        )


def _check_names(names: list[str]) -> None:
    if not names:
        raise MisfitError("predict returned no columns: return at least one")
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise MisfitError(f"predict returned two columns {repeated!r}: return unique names")


# ── columns and their names ──────────────────────────────────────────────────────────────────────


def _named(value: Any, n_rows: int, index: Any, only: str | None) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif is_a(value, "pandas", "DataFrame"):
        _check_rows(len(value), n_rows, value)
        ordered = in_order(value, index)
        names = _pandas_names(value)
        yield from ((name, ordered.iloc[:, place]) for place, name in enumerate(names))
    elif is_a(value, "polars", "LazyFrame"):
        yield from _named(value.collect(), n_rows, index, only)
    elif is_a(value, "polars", "DataFrame"):
        yield from ((part.name, part) for part in value.get_columns())
    elif is_a(value, "pandas", "Series") or is_a(value, "polars", "Series"):
        yield only or (PREDICTION if value.name in (None, "") else str(value.name)), value
    elif isinstance(value, (pa.Array, pa.ChunkedArray)):
        yield only or PREDICTION, value
    elif hasattr(value, "__arrow_c_stream__"):
        table = pa.table(value)
        yield from zip(table.schema.names, table.columns, strict=True)
    else:
        yield from _named_parts(value, only)


def _named_parts(value: Any, only: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the columns of named tuples, structured arrays and records, or else one column."""
    dtype_names = getattr(getattr(value, "dtype", None), "names", None)
    fields = getattr(value, "_fields", None) or dtype_names
    if isinstance(value, tuple) and fields:
        yield from zip(fields, value, strict=True)
    elif fields and hasattr(value, "__array__"):
        yield from ((name, value[name]) for name in fields)
    elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        names = dict.fromkeys(name for row in value for name in row)
        yield from ((str(name), [row.get(name) for row in value]) for name in names)
    else:
        _refuse_unordered(value)
        yield only or PREDICTION, value


def _refuse_unordered(value: Any) -> None:
    if isinstance(value, tuple) and any(hasattr(part, "shape") for part in value):
        raise MisfitError(
            f"predict returned a tuple of {len(value)} arrays: return a dict with a name for each"
        )
    if isinstance(value, (set, frozenset)):
        raise MisfitError("predict returned a set, which has no order: return a list")
    if hasattr(value, "__next__"):
        raise MisfitError(f"predict returned a {describe(value)}: return list(…) of it")


def _pandas_names(frame: Any) -> list[str]:
    """Return the names of a DataFrame's columns; default labels are numbered."""
    if not is_a(frame.columns, "pandas", "RangeIndex"):
        return [str(name) for name in frame.columns]
    count = len(frame.columns)
    return [f"{PREDICTION}_{place}" for place in range(count)] if count > 1 else [PREDICTION]


def _refuse_another_order(own: Any, index: Any) -> None:
    if own.nlevels == index.nlevels and Counter(own) == Counter(index):
        raise MisfitError(
            "predict returned the rows of the batch in another order, and some of their labels are equal, "
            "so rows cannot be told apart: return them in the order of the batch, or predict a frame with "
            "reset_index()"
        )


def in_order(part: Any, index: Any) -> Any:
    """Return a pandas object in the order of the batch's index, if it has the same labels.

    Raises MisfitError if the labels do not tell the order of the rows.
    """
    if index is None or not (is_a(part, "pandas", "Series") or is_a(part, "pandas", "DataFrame")):
        return part
    own, pandas = part.index, sys.modules["pandas"]
    if own is index or len(own) != len(index) or own.equals(index):
        return part
    if isinstance(own, pandas.RangeIndex):
        # Labels of a new object, which say nothing of the batch's.
        is_default = own.start == 0 and own.step == 1
        if is_default or (isinstance(index, pandas.RangeIndex) and own.step == index.step):
            return part
    if not own.is_unique:
        _refuse_another_order(own, index)
        return part
    for labels in (index, pandas.RangeIndex(len(index))):
        places = own.get_indexer(labels)
        if labels.is_unique and not (places < 0).any():
            return part.iloc[places]
    return part
