"""One schema for all outputs: the first one with rows sets it, later ones are converted or refused.

A column of nulls has the type ``null`` until a later batch shows another one, also inside lists and
structs. Without ``--schema`` only conversions that keep every value are made; with it, numbers are
converted if they are in range, and rounded for ``float``.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.arrow_types import family
from hydrogen_magic.node.prediction.column_names import listed

__all__ = ["MisfitError", "fit", "fit_table", "merge", "merge_types"]

_NUMBERS = ("integer", "float", "decimal")
_NESTED = ("list", "map", "struct")


class MisfitError(Exception):
    """An output does not fit; the caller adds which rows it was for."""


# ── two schemas ──────────────────────────────────────────────────────────────────────────────────


def merge(known: pa.Schema | None, found: pa.Schema) -> pa.Schema:
    """Return ``known`` with types that only ``found`` has, or ``found`` if ``known`` is None.

    Types that differ stay as in ``known``; :func:`fit` decides whether values can be converted.
    Raises MisfitError if the columns are not the same.
    """
    if known is None or known.equals(found):
        return found
    _check_columns(known.names, found.names)
    types = {
        name: merge_types(known.field(name).type, found.field(name).type) for name in known.names
    }
    return pa.schema(types)


def _check_columns(known: list[str], found: list[str]) -> None:
    changes = [f"without {name!r}" for name in known if name not in found]
    changes += [f"with {name!r}" for name in found if name not in known]
    if changes:
        raise MisfitError(
            f"predict returned columns {' and '.join(changes[:5])}, but {listed(known)} for earlier"
            " rows: return the same columns for every batch"
        )


def merge_types(known: pa.DataType, found: pa.DataType) -> pa.DataType:
    """Return ``known`` with its parts of type null replaced by those of ``found``."""
    if known == found or pa.types.is_null(known):
        return found
    kind = family(known)
    if kind != family(found) or kind not in _NESTED:
        return known
    if kind == "struct":
        others = {field.name: field.type for field in found}
        return pa.struct(
            {part.name: merge_types(part.type, others.get(part.name, part.type)) for part in known}
        )
    if kind == "map":
        key = merge_types(known.key_type, found.key_type)
        return pa.map_(key, merge_types(known.item_type, found.item_type))
    return _list_like(known, merge_types(known.value_type, found.value_type))


def _list_like(kind: pa.DataType, item: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)


# ── conversion ───────────────────────────────────────────────────────────────────────────────────


def fit_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return ``table`` with the columns of ``schema`` in its order; missing ones are null.

    For outputs that a rank made before it knew the whole schema. Raises InferError with the column and
    both types.
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
    """Return ``array`` in the type of ``field``. Raises MisfitError with the column and both types.

    ``is_declared``: the type is one of ``--schema``.
    """
    found, wanted = array.type, field.type
    if found == wanted:
        return array
    if pa.types.is_null(found):
        return pa.nulls(len(array), wanted)
    detail = ""
    if _is_convertible(found, wanted, is_declared):
        try:
            return _cast(array, wanted)
        except pa.ArrowException as error:
            detail = f" ({error})"
    raise MisfitError(_refusal(field, found, detail, is_declared))


def _cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    if "struct<" in str(wanted) and "list<item: null>" in str(wanted):
        # The cast of PyArrow makes lists of nulls in a struct that end after their items.
        return pa.array(array.to_pylist(), type=wanted)
    cast = array.cast(wanted)
    if _n_infinite(cast) != _n_infinite(array):
        raise pa.ArrowInvalid(f"a value is out of the range of {wanted}")
    return cast


def _n_infinite(array: pa.Array) -> int:
    """Return how many values are infinite, also in lists and structs; a cast to float32 may add some."""
    kind = family(array.type)
    if kind == "struct":
        return sum(map(_n_infinite, array.flatten()))
    if kind == "list":
        return _n_infinite(array.flatten())
    if kind != "float":
        return 0
    return pc.sum(pc.is_inf(array.cast(pa.float64()))).as_py() or 0


def _refusal(field: pa.Field, found: pa.DataType, detail: str, is_declared: bool) -> str:
    if not is_declared:
        return (
            f"predict returned column {field.name!r} as {found}, but as {field.type} for other rows"
            f"{detail}: return one type for all batches, or set it with --schema"
        )
    wanted = field.type
    is_time = pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted)
    lacks_zone = is_time and found.tz is None and wanted.tz is not None
    remedy = "give the times a time zone, or declare timestamp_ntz"
    return (
        f"predict returned column {field.name!r} as {found}, but --schema declares {wanted}{detail}: "
        + (remedy if lacks_zone else "return that type, or correct --schema")
    )


def _is_convertible(found: pa.DataType, wanted: pa.DataType, is_declared: bool) -> bool:
    """Return whether values of one type may become another; the cast still checks every value."""
    if found == wanted or pa.types.is_null(found):
        return True
    kinds = family(found), family(wanted)
    if "dictionary" in kinds:
        return _is_convertible(_decoded(found), _decoded(wanted), is_declared)
    if kinds[0] != kinds[1]:
        return _is_convertible_kind(*kinds, is_declared)
    if kinds[0] in _NESTED:
        parts, others = _parts(found), _parts(wanted)
        return parts.keys() == others.keys() and all(
            _is_convertible(parts[name], others[name], is_declared) for name in parts
        )
    if kinds[0] == "timestamp":
        return (found.tz is None) == (wanted.tz is None)
    if kinds[0] in ("integer", "float"):
        return is_declared or _is_wider(found, wanted)
    return kinds[0] != "other"


def _is_convertible_kind(found: str, wanted: str, is_declared: bool) -> bool:
    if is_declared:
        is_flag = (found, wanted) == ("boolean", "integer")
        return is_flag or (found in _NUMBERS and wanted in _NUMBERS)
    # A cast to float refuses integers that it cannot hold.
    return (found, wanted) == ("integer", "float")


def _is_wider(found: pa.DataType, wanted: pa.DataType) -> bool:
    loses_sign = pa.types.is_signed_integer(found) and pa.types.is_unsigned_integer(wanted)
    return not loses_sign and wanted.bit_width > found.bit_width


def _parts(kind: pa.DataType) -> dict[str, pa.DataType]:
    """Return the types inside a nested type by their names."""
    if family(kind) == "list":
        return {"item": kind.value_type}
    if family(kind) == "map":
        return {"key": kind.key_type, "value": kind.item_type}
    return {field.name: field.type for field in kind}


def _decoded(kind: pa.DataType) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
