"""Arrow columns as NumPy arrays, with further dimensions if their values are lists of numbers.

Numbers without nulls and lists of one length are read-only views of Arrow's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.arrow_types import (
    arrays_inside,
    family,
    has_fine_times,
    is_list_of_numbers,
)
from hydrogen_magic.node.prediction.exact_cells import exact_cells


def array_of(column: pa.Array, name: str) -> Any:
    """Return a column as an array of its own type, with one element (or list of numbers) per row.

    Nulls are NaN among numbers, NaT among times, None elsewhere and inside of structs and maps; integers with
    nulls become float64, booleans with nulls objects. Lists of one length are an array with further
    dimensions, others an object array of arrays. Times with a time zone are in UTC. Raises InferError if a
    float cannot hold an integer.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return array_of(column.dictionary_decode(), name)
    if is_list_of_numbers(kind):
        array = _rectangular(column, name)
        if array is not None:
            return array
        _check_items(column, name)
        return column.to_numpy(zero_copy_only=False)
    if pa.types.is_integer(kind) and column.null_count:
        return _as_floats(column, name)
    if has_fine_times(kind):
        return np.fromiter(exact_cells([column]), dtype=object, count=len(column))
    if _has_parts(kind):
        # Arrow's to_numpy makes floats of integers beside a null in a struct or a map.
        return column.to_pandas(integer_object_nulls=True).to_numpy()
    return column.to_numpy(zero_copy_only=False)


def _check_items(column: pa.Array, name: str) -> None:
    """Raise InferError for lists with nulls among their integers, if no floats can hold these."""
    for items in arrays_inside(column):
        if pa.types.is_integer(items.type) and items.null_count:
            _as_floats(items, name)
        _check_items(items, name)


def _has_parts(kind: pa.DataType) -> bool:
    """Whether values are structs or maps, or lists of such."""
    while family(kind) == "list":
        kind = kind.value_type
    return family(kind) in ("struct", "map")


def shaped(column: pa.Array, name: str) -> Any:
    """Return a column of numbers, or of lists of numbers, as an array of numbers (rows, …).

    Nulls are NaN; so are all numbers of a null list. Raises InferError if lists differ in length.
    """
    if not is_list_of_numbers(column.type):
        return _numbers(column, name)
    array = _rectangular(column, name)
    if array is None:
        raise InferError(
            f"column {name!r} is {column.type} with lists of different lengths, which cannot form a tensor:"
            " pad them, or annotate predict's batch as pa.Table or dict[str, np.ndarray]"
        )
    return array


def has_tensors(kind: pa.DataType) -> bool:
    """Return whether values are tensors of one shape, with two or more dimensions."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return True
    is_list = pa.types.is_fixed_size_list(kind) and is_list_of_numbers(kind)
    return is_list and pa.types.is_fixed_size_list(kind.value_type)


def tensors(column: pa.Array) -> list[Any]:
    """Return each value of a column of tensors as an array that may be written, None for null."""
    cells = iter(np.array(shaped(column.drop_null(), "")))
    return [next(cells) if is_valid else None for is_valid in column.is_valid().to_pylist()]


def _numbers(column: pa.Array, name: str) -> Any:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if pa.types.is_boolean(column.type) and column.null_count:
        column = column.cast(pa.int8())
    if pa.types.is_integer(column.type) and column.null_count:
        return _as_floats(column, name)
    return column.to_numpy(zero_copy_only=False)


def _as_floats(column: pa.Array, name: str) -> Any:
    """Return integers as floats, with NaN for null."""
    try:
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise InferError(
            f"column {name!r} is {column.type} with nulls, for which NumPy needs floats, and has numbers"
            " that no float can hold: fill the nulls, or annotate predict's batch as pa.Table or pandas"
            " DataFrame"
        ) from None


# ── lists ────────────────────────────────────────────────────────────────────────────────────────


def _rectangular(column: pa.Array, name: str) -> Any:
    """Return a column of lists as an array (rows, …), None if their lengths differ."""
    if isinstance(column.type, pa.FixedShapeTensorType):
        return _of_tensors(column, name)
    length = _common_length(column)
    if length is None:
        return None
    present = column.drop_null() if column.null_count else column
    items = present.flatten()
    is_nested = is_list_of_numbers(items.type)
    flat = _rectangular(items, name) if is_nested else _numbers(items, name)
    if flat is None:
        return None
    rows = flat.reshape(len(present), length, *flat.shape[1:])
    return _with_null_rows(rows, column, name) if column.null_count else rows


def _common_length(column: pa.Array) -> int | None:
    """Return the length of all lists, None if they differ; 0 without lists."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    lengths = pc.min_max(pc.list_value_length(column)).as_py()
    return (lengths["min"] or 0) if lengths["min"] == lengths["max"] else None


def _of_tensors(column: pa.Array, name: str) -> Any:
    permutation = column.type.permutation
    array = _rectangular(column.storage, name).reshape(len(column), *column.type.shape)
    if permutation is None:
        return array
    return array.transpose(0, *(axis + 1 for axis in permutation))


def _with_null_rows(rows: Any, column: pa.Array, name: str) -> Any:
    """Return the ``rows`` that are not null among rows of NaN."""
    if rows.dtype.kind in "iu":
        rows = _as_floats(pa.array(rows.ravel()), name).reshape(rows.shape)
    dtype = rows.dtype if rows.dtype.kind == "f" else np.float64
    array = np.full((len(column), *rows.shape[1:]), np.nan, dtype=dtype)
    array[column.is_valid().to_numpy(zero_copy_only=False)] = rows
    return array
