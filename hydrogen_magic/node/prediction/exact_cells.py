"""Values of nested Arrow columns as objects, where PyArrow would change items of them for pandas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from hydrogen_magic.node.prediction.arrow_types import NESTED, family, has_fine_times, parts_of


def has_inexact_items(column: pa.Array) -> bool:
    """Return whether PyArrow would change items of a nested type, at any depth, for pandas.

    It converts integers and booleans with nulls beside them to floats, where only a nullable dtype could
    hold them (null rows have items, too), and times in nanoseconds to integers. Of a map it converts all
    items, also those before and after a slice.
    """
    is_map = pa.types.is_map(column.type)
    parts = [column.keys, column.items] if is_map else parts_of(column)
    return has_fine_times(column.type) or any(
        (array.null_count and family(array.type) in ("integer", "boolean"))
        or has_inexact_items(array)
        for array in parts
    )


def exact_cells(chunks: Sequence[pa.Array]) -> list[Any]:
    """Return the values of a column: as PyArrow makes them for pandas, but lists of inexact items are lists.

    Only these: an array beside a time in nanoseconds is the same as without it.
    """
    known = [chunk.drop_null() if chunk.null_count else chunk for chunk in chunks]
    cells = iter(_known_cells(known))
    is_known = (each for chunk in chunks for each in chunk.is_valid().to_pylist())
    return [next(cells) if each else None for each in is_known]


def _known_cells(chunks: Sequence[pa.Array]) -> Iterator[Any]:
    kind = chunks[0].type
    if isinstance(kind, pa.BaseExtensionType):
        return _known_cells([chunk.storage for chunk in chunks])
    if family(kind) not in NESTED:
        return (cell for chunk in chunks for cell in chunk.to_pylist())
    if not any(map(has_inexact_items, chunks)):
        return (cell for chunk in chunks for cell in chunk.to_pandas())
    parts = [exact_cells(part) for part in zip(*map(parts_of, chunks), strict=True)]
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        return (dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True))
    items = zip(*parts, strict=True) if pa.types.is_map(kind) else iter(parts[0])
    return (list(islice(items, size)) for chunk in chunks for size in _sizes(chunk))


def _sizes(lists: pa.Array) -> list[int]:
    if pa.types.is_fixed_size_list(lists.type):
        return [lists.type.list_size] * len(lists)
    offsets = lists.offsets.to_numpy()
    return list(offsets[1:] - offsets[:-1])
