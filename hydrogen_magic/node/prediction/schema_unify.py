"""One schema for all outputs: the first that has rows fixes it, later ones are made to fit or refused.

A column that is all null fixes nothing: its type is ``null`` until a batch knows better, inside lists
and structs too. Only what keeps every value is converted without being asked. A ``--schema`` asks:
then numbers are converted as long as they stay in range, and to ``float`` they are rounded.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.column_names import listed

__all__ = ["MisfitError", "fit", "fit_table", "has_unknown", "merge", "merge_types"]


class MisfitError(Exception):
    """An output is not what it has to be; whoever knows the rows says it to the user."""


# ── two schemas ──────────────────────────────────────────────────────────────────────────────────


def merge(known: pa.Schema | None, found: pa.Schema) -> pa.Schema:
    """Return ``known`` with the types filled in that only ``found`` has; ``found`` where None is known.

    Types that differ are left as they are known: :func:`fit` decides whether values can follow.
    Raises MisfitError where the columns are not the same.
    """
    if known is None or known.equals(found):
        return found
    check_columns(known.names, found.names)
    fields = [
        pa.field(field.name, merge_types(field.type, found.field(field.name).type))
        for field in known
    ]
    return pa.schema(fields)


def check_columns(known: list[str], found: list[str]) -> None:
    """Raise MisfitError where an output has other columns than those ``known``."""
    missing = [name for name in known if name not in found]
    extra = [name for name in found if name not in known]
    if missing or extra:
        changes = [f"without {name!r}" for name in missing] + [f"with {name!r}" for name in extra]
        raise MisfitError(
            f"predict returned columns {' and '.join(changes[:5])}, where {listed(known)} should be:"
            " return the same columns for every batch"
        )


def merge_types(known: pa.DataType, found: pa.DataType) -> pa.DataType:
    """Return ``known`` with its parts of type null replaced by what ``found`` has there."""
    if known == found or pa.types.is_null(known):
        return found
    parts = _with_items(known, found)
    return known if parts is None else parts


def has_unknown(found: pa.DataType) -> bool:
    """Return whether a type is null, or has a part that is."""
    types = pa.types
    if types.is_struct(found):
        return any(has_unknown(part.type) for part in found)
    if types.is_map(found):
        return has_unknown(found.key_type) or has_unknown(found.item_type)
    return has_unknown(found.value_type) if _is_list(found) else bool(types.is_null(found))


def _with_items(known: pa.DataType, found: pa.DataType) -> pa.DataType | None:
    types = pa.types
    for is_kind, make in (
        (types.is_list, pa.list_),
        (types.is_large_list, pa.large_list),
        (types.is_fixed_size_list, lambda item: pa.list_(item, known.list_size)),
    ):
        if is_kind(known) and is_kind(found):
            return make(merge_types(known.value_type, found.value_type))
    if types.is_struct(known) and types.is_struct(found):
        others = {field.name: field.type for field in found}
        return pa.struct(
            [
                (part.name, merge_types(part.type, others.get(part.name, part.type)))
                for part in known
            ]
        )
    if types.is_map(known) and types.is_map(found):
        item = merge_types(known.item_type, found.item_type)
        return pa.map_(merge_types(known.key_type, found.key_type), item)
    return None


# ── values that follow ───────────────────────────────────────────────────────────────────────────


def fit_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return ``table`` with the columns of ``schema``, in its order; absent ones are null.

    For outputs of ranks that knew less of the schema when they made them. Raises InferError naming
    the column and both types.
    """
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        column = table.column(field.name)
        try:
            chunks = [fit(chunk, field, is_declared=False) for chunk in column.chunks]
        except MisfitError as error:
            raise InferError(str(error)) from None
        columns.append(pa.chunked_array(chunks, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def fit(array: pa.Array, field: pa.Field, *, is_declared: bool) -> pa.Array:
    """Return ``array`` in the type of ``field``; MisfitError naming column, both types and a remedy."""
    have, want = array.type, field.type
    if have == want:
        return array
    if pa.types.is_null(have):
        return pa.nulls(len(array), want)
    why = ""
    if _may_become(have, want, is_declared):
        try:
            return _cast(array, want)
        except pa.ArrowException as error:
            why = f" ({error})"
    raise MisfitError(_refusal(field, have, why, is_declared))


def _cast(array: pa.Array, want: pa.DataType) -> pa.Array:
    if "struct<" in str(want) and "list<item: null>" in str(want):
        # pyarrow's cast makes lists of nulls in a struct that end behind their items.
        return pa.array(array.to_pylist(), type=want)
    cast = array.cast(want)
    if _n_infinite(cast) != _n_infinite(array):
        raise pa.ArrowInvalid(f"a value is out of the range of {want}")
    return cast


def _n_infinite(array: pa.Array) -> int:
    """Return how many values, in lists and structs too, are infinite: a cast says nothing of that."""
    if pa.types.is_struct(array.type):
        return sum(map(_n_infinite, array.flatten()))
    if _is_list(array.type):
        return _n_infinite(array.flatten())
    if not pa.types.is_floating(array.type):
        return 0
    return pc.sum(pc.is_inf(array.cast(pa.float64()))).as_py() or 0


def _refusal(field: pa.Field, have: pa.DataType, why: str, is_declared: bool) -> str:
    if is_declared:
        remedy = _ZONE if _is_zone_missing(have, field.type) else "return that, or correct --schema"
        return (
            f"predict returned column {field.name!r} as {have}, where --schema asks for"
            f" {field.type}{why}: {remedy}"
        )
    return (
        f"predict returned column {field.name!r} as {have}, where other rows have"
        f" {field.type}{why}: return one type for all batches, or name it with --schema"
    )


_ZONE = "give the times a zone, or ask for timestamp_ntz"


def _is_zone_missing(have: pa.DataType, want: pa.DataType) -> bool:
    is_time = pa.types.is_timestamp(have) and pa.types.is_timestamp(want)
    return is_time and have.tz is None and want.tz is not None


def _may_become(have: pa.DataType, want: pa.DataType, is_declared: bool) -> bool:
    """Return whether values may change their type so; a cast still looks at each of them."""
    types = pa.types
    if have == want or types.is_null(have):
        return True
    if types.is_dictionary(have) or types.is_dictionary(want):
        return _may_become(_decoded(have), _decoded(want), is_declared)
    for is_kind in (_is_text, _is_bytes, _is_time_of_day, types.is_duration):
        if is_kind(have) and is_kind(want):
            return True
    if types.is_timestamp(have) and types.is_timestamp(want):
        return (have.tz is None) == (want.tz is None)
    if _is_list(have) and _is_list(want):
        return _may_become(have.value_type, want.value_type, is_declared)
    if types.is_map(have) and types.is_map(want):
        keys = _may_become(have.key_type, want.key_type, is_declared)
        return keys and _may_become(have.item_type, want.item_type, is_declared)
    if types.is_struct(have) and types.is_struct(want):
        return _may_struct_become(have, want, is_declared)
    return _may_number_become(have, want, is_declared)


def _may_struct_become(have: pa.DataType, want: pa.DataType, is_declared: bool) -> bool:
    parts = {field.name: field.type for field in have}
    if parts.keys() != {field.name for field in want}:
        return False
    return all(_may_become(parts[field.name], field.type, is_declared) for field in want)


def _may_number_become(have: pa.DataType, want: pa.DataType, is_declared: bool) -> bool:
    types = pa.types
    if types.is_boolean(have):
        return is_declared and bool(types.is_integer(want))
    if types.is_date(have) and types.is_date(want):
        return True
    if not (_is_number(have) and _is_number(want)):
        return False
    if is_declared or (types.is_decimal(have) and types.is_decimal(want)):
        return True
    if types.is_integer(have):
        # A cast to a float refuses whole numbers that it cannot hold.
        return bool(types.is_floating(want)) or _is_wider(have, want)
    return bool(types.is_floating(have) and types.is_floating(want)) and _is_wider(have, want)


def _is_wider(have: pa.DataType, want: pa.DataType) -> bool:
    """Return whether every whole number (or float) of one type is one of the other."""
    types = pa.types
    if types.is_floating(have):
        return bool(want.bit_width > have.bit_width)
    if not types.is_integer(want):
        return False
    if types.is_signed_integer(have) and types.is_unsigned_integer(want):
        return False
    return bool(want.bit_width > have.bit_width)


def _is_number(found: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(found) or types.is_floating(found) or types.is_decimal(found))


def _is_text(found: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(found) or types.is_large_string(found) or types.is_string_view(found)
    )


def _is_bytes(found: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(found)
        or types.is_large_binary(found)
        or types.is_binary_view(found)
        or types.is_fixed_size_binary(found)
    )


def _is_time_of_day(found: pa.DataType) -> bool:
    return bool(pa.types.is_time(found))


def _is_list(found: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found)
    )


def _decoded(found: pa.DataType) -> Any:
    return found.value_type if pa.types.is_dictionary(found) else found
