"""Columns of Arrow as NumPy arrays, with a shape where their cells are lists of numbers.

A view of Arrow's memory wherever there is nothing to change: numbers without nulls, and lists of one
length. Such a view is read-only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.arrow_types import is_list_of_numbers

__all__ = ["array_of", "shaped"]


def array_of(column: pa.Array, name: str) -> Any:
    """Return a column as an array of its own kind, one element (or row of numbers) per row.

    Nulls are NaN among numbers, NaT among times, None elsewhere; whole numbers become float64 for
    that, truth values objects. Lists of one length are an array with further dimensions, ragged ones
    an object array of arrays. Times with a zone are in UTC. Raises InferError where a whole number
    would not survive as a float.
    """
    found = column.type
    if pa.types.is_dictionary(found):
        return array_of(column.dictionary_decode(), name)
    if is_list_of_numbers(found):
        array = _unless_ragged(column, name)
        return column.to_numpy(zero_copy_only=False) if array is None else array
    if pa.types.is_integer(found) and column.null_count:
        return _with_nan(column, name)
    return column.to_numpy(zero_copy_only=False)


def shaped(column: pa.Array, name: str) -> Any:
    """Return a column of numbers, or of lists of them, as an array of numbers (rows, …).

    Nulls are NaN; of a null list, all its elements. Raises InferError where lists differ in length.
    """
    if not is_list_of_numbers(column.type):
        return _numbers(column, name)
    array = _unless_ragged(column, name)
    if array is None:
        raise InferError(
            f"column {name!r} is {column.type} with lists of different lengths, which are no tensor:"
            " pad them, or let predict take a pa.Table or dict[str, np.ndarray]"
        )
    return array


def _numbers(column: pa.Array, name: str) -> Any:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if pa.types.is_boolean(column.type) and column.null_count:
        column = column.cast(pa.int8())
    if pa.types.is_integer(column.type) and column.null_count:
        return _with_nan(column, name)
    return column.to_numpy(zero_copy_only=False)


def _with_nan(column: pa.Array, name: str) -> Any:
    """Return whole numbers as floats, with NaN for null."""
    try:
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise InferError(
            f"column {name!r} is {column.type} and has nulls, which NumPy has only among floats, and"
            " numbers that no float can hold: fill the nulls, or let predict take a pa.Table or a"
            " pandas DataFrame"
        ) from None


# ── lists ────────────────────────────────────────────────────────────────────────────────────────


def _unless_ragged(column: pa.Array, name: str) -> Any:
    """Return a column of lists as an array (rows, …), or None where their lengths differ."""
    if isinstance(column.type, pa.FixedShapeTensorType):
        return _of_tensors(column, name)
    length = _length(column)
    if length is None:
        return None
    valid = column.drop_null() if column.null_count else column
    items = valid.flatten()
    listed = is_list_of_numbers(items.type)
    flat = _unless_ragged(items, name) if listed else _numbers(items, name)
    if flat is None:
        return None
    rows = flat.reshape(len(valid), length, *flat.shape[1:])
    return _spread(rows, column) if column.null_count else rows


def _length(column: pa.Array) -> int | None:
    """Return the length that all lists of ``column`` have, or None; 0 where there is no list."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    ends = pc.min_max(pc.list_value_length(column)).as_py()
    return (ends["min"] or 0) if ends["min"] == ends["max"] else None


def _of_tensors(column: pa.Array, name: str) -> Any:
    permutation = column.type.permutation
    flat = _unless_ragged(column.storage, name)
    array = flat.reshape(len(column), *column.type.shape)
    if permutation is None or list(permutation) == sorted(permutation):
        return array
    return array.transpose(0, *(place + 1 for place in permutation))


def _spread(rows: Any, column: pa.Array) -> Any:
    """Return ``rows`` of the cells that are there, with NaN for those that are null."""
    kind = rows.dtype if rows.dtype.kind == "f" else np.float64
    array = np.full((len(column), *rows.shape[1:]), np.nan, dtype=kind)
    array[column.is_valid().to_numpy(zero_copy_only=False)] = rows
    return array
