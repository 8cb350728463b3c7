"""Families of Arrow types, whatever the width and layout of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_FAMILIES: dict[str, tuple[Callable[[pa.DataType], bool], ...]] = {
    "null": (pa.types.is_null,),
    "boolean": (pa.types.is_boolean,),
    "integer": (pa.types.is_integer,),
    "float": (pa.types.is_floating,),
    "decimal": (pa.types.is_decimal,),
    "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
    "bytes": (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    ),
    "date": (pa.types.is_date,),
    "time": (pa.types.is_time,),
    "timestamp": (pa.types.is_timestamp,),
    "duration": (pa.types.is_duration,),
    "list": (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list),
    "map": (pa.types.is_map,),
    "struct": (pa.types.is_struct,),
    "dictionary": (pa.types.is_dictionary,),
}
NUMBERS = ("boolean", "integer", "float", "decimal")
NESTED = ("list", "map", "struct")


def family(kind: pa.DataType) -> str:
    """Return the family of a type, ``other`` for extension types and rare ones."""
    tests = _FAMILIES.items()
    return next((name for name, checks in tests if any(is_a(kind) for is_a in checks)), "other")


def size_bytes(data: Any) -> int:
    """Return the size of the values of a table or an array."""
    try:
        return int(data.nbytes)
    except pa.ArrowTypeError:  # by PyArrow before 24 for views
        return int(data.get_total_buffer_size())


def is_number(kind: pa.DataType) -> bool:
    """Return whether an element of a tensor can hold it."""
    return family(kind) in NUMBERS


def is_list_of_numbers(kind: pa.DataType) -> bool:
    """Return whether values are lists of numbers, at any depth, or tensors."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return True
    if family(kind) != "list":
        return False
    return is_number(kind.value_type) or is_list_of_numbers(kind.value_type)


def has_null_type(kind: pa.DataType) -> bool:
    """Return whether a type is null, or has a part that is."""
    parts = (kind.field(place).type for place in range(kind.num_fields))
    return pa.types.is_null(kind) or any(map(has_null_type, parts))


def is_undecided(kind: pa.DataType) -> bool:
    """Return whether a type is null or a struct without fields, or has such a part: values may show more."""
    parts = (kind.field(place).type for place in range(kind.num_fields))
    is_empty = pa.types.is_struct(kind) and not kind.num_fields
    return pa.types.is_null(kind) or is_empty or any(map(is_undecided, parts))


def has_fine_times(kind: pa.DataType) -> bool:
    """Return whether structs or maps have times in nanoseconds, which PyArrow gives to pandas as integers."""
    parts = [kind.field(place).type for place in range(kind.num_fields)]
    is_fine = (family(part) in ("timestamp", "duration") and part.unit == "ns" for part in parts)
    return (pa.types.is_struct(kind) and any(is_fine)) or any(map(has_fine_times, parts))


def arrays_inside(array: pa.Array) -> list[pa.Array]:
    """Return the arrays inside a nested array, without those of null rows; none for other types."""
    is_nested = family(array.type) in NESTED
    return parts_of(array.drop_null() if is_nested and array.null_count else array)


def parts_of(array: pa.Array) -> list[pa.Array]:
    """Return the arrays inside a nested array, with what they have for null rows; none for other types."""
    of_family = family(array.type)
    if of_family == "struct":
        return [array.field(place) for place in range(array.type.num_fields)]
    if of_family not in ("list", "map"):
        return []
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return [array.values.slice(array.offset * size, len(array) * size)]
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    items = [array.values] if of_family == "list" else [array.keys, array.items]
    return [each.slice(first, last - first) for each in items]


def without_nulls(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` with text in the place of types that are not known."""
    return pa.schema([field.with_type(_without_null(field.type)) for field in schema])


def _without_null(kind: pa.DataType) -> pa.DataType:
    if not has_null_type(kind):
        return kind
    return with_parts(kind, _without_null) or pa.string()


def in_utc(kind: pa.DataType) -> pa.DataType:
    """Return a type for the same times in UTC, at any depth."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    return with_parts(kind, in_utc) or kind


def with_parts(
    kind: pa.DataType, changed: Callable[[pa.DataType], pa.DataType]
) -> pa.DataType | None:
    """Return a nested type with ``changed`` types of its fields, None for others."""
    of_family = family(kind)
    if of_family == "list":
        item = kind.value_field.with_type(changed(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    if of_family == "map":
        fields = (kind.key_field, kind.item_field)
        parts = [field.with_type(changed(field.type)) for field in fields]
        return pa.map_(*parts, keys_sorted=kind.keys_sorted)
    if of_family == "struct":
        return pa.struct([field.with_type(changed(field.type)) for field in kind])
    return None


# ── encodings ────────────────────────────────────────────────────────────────────────────────────


def plain_rows(rows: pa.RecordBatch, *, is_polars: bool = False) -> pa.RecordBatch:
    """Return rows whose columns are :func:`plain`."""
    columns = [plain(column, is_polars=is_polars) for column in rows.columns]
    types = [column.type for column in columns]
    if types == rows.schema.types:
        return rows
    fields = [field.with_type(kind) for field, kind in zip(rows.schema, types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, rows.schema.metadata))


def plain(array: pa.Array, *, is_polars: bool = False) -> pa.Array:
    """Return the same values in a type that PyArrow and Polars convert exactly; most arrays as they are.

    Without views, runs, booleans of a byte, dictionaries inside nested types, and dictionaries of nulls or of
    nested values: for pandas, integers with nulls in these would become floats; and PyArrow cannot
    filter views, and cannot unify such dictionaries. ``is_polars``: keep dictionaries of text inside nested
    types, which Polars reads as categories.
    """
    kind = array.type
    if not pa.types.is_dictionary(kind):
        return _converted(array, _plain_type(kind, is_polars))
    values = plain(array.dictionary, is_polars=is_polars)
    if values.null_count or family(values.type) in ("null", "other", *NESTED):
        return values.take(array.indices)
    return _converted(array, pa.dictionary(kind.index_type, values.type, kind.ordered))


def _plain_type(kind: pa.DataType, is_polars: bool) -> pa.DataType:
    def part(of: pa.DataType) -> pa.DataType:
        return _plain_type(of, is_polars)

    if isinstance(kind, pa.Bool8Type):
        return pa.bool_()
    if pa.types.is_dictionary(kind):
        values = part(kind.value_type)
        is_kept = is_polars and family(values) == "text"
        return pa.dictionary(kind.index_type, values, kind.ordered) if is_kept else values
    if pa.types.is_run_end_encoded(kind):
        return part(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_list_view(kind):
        return pa.list_(kind.value_field.with_type(part(kind.value_type)))
    if pa.types.is_large_list_view(kind):
        return pa.large_list(kind.value_field.with_type(part(kind.value_type)))
    return (with_parts(kind, part) if kind.num_fields else None) or kind


def _converted(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return the same values in their plain type.

    Part by part: Python's times have no nanoseconds, casts of views of lists lose items, and not all of
    these types have a cast.
    """
    kind = array.type
    if kind == wanted:
        return array
    if pa.types.is_dictionary(kind):
        if pa.types.is_dictionary(wanted):
            values = _converted(array.dictionary, wanted.value_type)
            return pa.DictionaryArray.from_arrays(array.indices, values, ordered=kind.ordered)
        return _converted(array.dictionary, wanted).take(array.indices)
    if pa.types.is_run_end_encoded(kind):
        rows = np.arange(array.offset, array.offset + len(array))
        runs = np.searchsorted(array.run_ends.to_numpy(), rows, side="right")
        return _converted(array.values, wanted).take(pa.array(runs))
    if isinstance(kind, pa.Bool8Type):
        return array.storage.cast(wanted)
    if family(kind) in ("text", "bytes"):
        return array.cast(wanted)
    return _of_parts(array, wanted)


def _of_parts(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    is_null = array.is_null()
    if pa.types.is_struct(wanted):
        places = range(wanted.num_fields)
        fields = [_converted(array.field(place), wanted.field(place).type) for place in places]
        return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=is_null)
    if family(array.type) == "other":
        return _of_view(array, wanted)
    types = (wanted.key_type, wanted.item_type) if pa.types.is_map(wanted) else (wanted.value_type,)
    parts = [_converted(*each) for each in zip(parts_of(array), types, strict=True)]
    if pa.types.is_fixed_size_list(wanted):
        return pa.FixedSizeListArray.from_arrays(*parts, type=wanted, mask=is_null)
    starts = pc.subtract(array.offsets, array.offsets[0])
    return type(array).from_arrays(starts, *parts, type=wanted, mask=is_null)


def _of_view(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return lists of a view, which may be in any order and have items in common."""
    sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    has_items, offsets = sizes > 0, array.offsets.to_numpy()
    first = offsets[has_items].min(initial=len(array.values))
    last = (offsets + sizes)[has_items].max(initial=first)
    ends = sizes.cumsum()
    places = np.arange(sizes.sum()) + np.repeat(offsets - first - ends + sizes, sizes)
    items = _converted(array.values.slice(first, last - first), wanted.value_type)
    is_large = pa.types.is_large_list(wanted)
    of_lists, offset_type = (
        (pa.LargeListArray, pa.int64()) if is_large else (pa.ListArray, pa.int32())
    )
    starts = pa.array([0, *ends], offset_type)
    return of_lists.from_arrays(
        starts, items.take(pa.array(places)), type=wanted, mask=array.is_null()
    )
