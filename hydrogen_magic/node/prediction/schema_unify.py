"""One schema for all outputs: it becomes wide enough for each of them, in whatever order they come.

Numbers become wider: int64 and float64 are float64. Times with different time zones become UTC. A column of
nulls has the type ``null`` until a batch shows another one, also inside lists and structs; one of NaN alone
is float until then, and null beside text. Other types that differ are refused, and so are values that do not
fit the wider type; if errors are collected, the column becomes text instead. With ``--schema`` the types are
fixed: numbers are converted if they are in range, and rounded for ``float``; NaN in a column of integers is a
missing value.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.node.prediction.arrow_types import (
    NESTED,
    NUMBERS,
    arrays_inside,
    family,
    in_utc,
)
from hydrogen_magic.node.prediction.column_names import listed

_DECIMAL_DIGITS = 38
_NO_LIMIT = 1 << 30
_NO_VALUE = {b"hydrogen_magic": b"no value"}
"""Metadata of a column of missing values, or of NaN alone, so far."""


class MisfitError(Exception):
    """An output does not fit; the caller adds which rows it was for."""

    def __init__(self, text: str, column: str | None = None, remedy: str = "") -> None:
        super().__init__(f"{text}: {remedy}" if remedy else text)
        self.fact = text
        """Its text without a remedy."""
        self.column = column
        """The column whose values do not fit its type, None if something else is wrong."""


# ── two schemas ──────────────────────────────────────────────────────────────────────────────────


def joined(known: pa.Schema | None, found: pa.Schema, *, as_text: bool = False) -> pa.Schema:
    """Return the columns of ``known`` with types for its values and those of ``found``.

    ``as_text``: columns of types without a common one become text. Raises MisfitError if the columns are
    not the same, or if types have no common one.
    """
    if known is None or (known.equals(found) and not lacks_values(known)):
        return found if known is None else known
    check_columns(known.names, found.names)
    for place, field in enumerate(known):
        other = found.field(field.name)
        if field.type != other.type or (has_no_value(field) and not has_no_value(other)):
            known = known.set(place, _joined_field(field, other, as_text=as_text))
    return known


def _joined_field(known: pa.Field, found: pa.Field, *, as_text: bool) -> pa.Field:
    if pa.types.is_null(found.type):
        return known
    if pa.types.is_null(known.type):
        return found
    kind = known.type if known.type == found.type else _joined_type(known.type, found.type)
    if kind is None and (has_no_value(known) or has_no_value(found)):
        kind = found.type if has_no_value(known) else known.type
    if kind is None and not as_text:
        raise _misfit(known, found.type)
    kind = _text_for(known.type, found.type) if kind is None else kind
    widened = known.with_type(kind)
    return widened if has_no_value(known) and has_no_value(found) else widened.remove_metadata()


def has_no_value(field: pa.Field) -> bool:
    """Return whether a column has had missing values and NaN alone."""
    return bool(field.metadata == _NO_VALUE)


def lacks_values(schema: pa.Schema) -> bool:
    """Return whether a column of ``schema`` has had missing values and NaN alone."""
    return any(map(has_no_value, schema))


def without_marks(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` without the marks of columns that have had no value."""
    return (
        pa.schema([field.remove_metadata() for field in schema]) if lacks_values(schema) else schema
    )


def types_of(columns: pa.Table, known: pa.Schema | None) -> pa.Schema:
    """Return the types of ``columns``; those without a value are marked.

    pandas gives a column of missing values a type, and NaN may stand for them: other rows show the type.
    """
    found = columns.schema
    if known is not None and found.equals(known) and not lacks_values(known):
        return found
    for place, field in enumerate(found):
        column = columns.column(place)
        if (len(column) and column.null_count == len(column)) or all_nan(column):
            found = found.set(place, field.with_metadata(_NO_VALUE))
    return found


def all_nan(column: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether a column of floats has values, and each of them is NaN."""
    if family(column.type) != "float" or len(column) == 0:
        return False
    first = column[0].as_py()
    if first is not None and first == first:
        return False  # most columns, at once
    is_nan: bool = pc.all(pc.is_nan(column)).as_py() and column.null_count < len(column)
    return is_nan


def as_text(schema: pa.Schema, misfit: MisfitError) -> pa.Schema:
    """Return ``schema`` with text for the column that does not fit, whose values are text then.

    Raises ``misfit`` if that is no remedy.
    """
    place = -1 if misfit.column is None else schema.get_field_index(misfit.column)
    if place < 0 or family(schema.field(place).type) == "text":
        raise misfit
    return schema.set(place, schema.field(place).with_type(pa.string()))


def _text_for(*kinds: pa.DataType) -> pa.DataType:
    return pa.large_string() if pa.large_string() in kinds else pa.string()


def check_columns(known: list[str], found: list[str], *, are_declared: bool = False) -> None:
    """Raise MisfitError if the names of columns are not the same.

    ``are_declared``: the known ones are those of ``--schema``.
    """
    changes = [f"without {name!r}" for name in known if name not in found]
    changes += [f"with {name!r}" for name in found if name not in known]
    if changes:
        returned = f"predict returned columns {' and '.join(changes[:5])}, but"
        if are_declared:
            raise MisfitError(
                f"{returned} --schema declares {listed(known)}: return a dict of these columns, or correct"
                " --schema"
            )
        raise MisfitError(
            f"{returned} {listed(known)} for earlier rows: return the same columns for every batch"
        )


def _joined_type(known: pa.DataType, found: pa.DataType) -> pa.DataType | None:
    """Return the narrowest type for the values of both, None if there is none."""
    kinds = family(known), family(found)
    if known == found or kinds[1] == "null":
        return known
    if kinds[0] == "null":
        return found
    if "dictionary" in kinds and kinds[0] != kinds[1]:
        return _joined_type(_decoded(known), _decoded(found))
    if kinds[0] != kinds[1]:
        if not set(kinds) <= set(NUMBERS):
            return None
        if set(kinds) == {"decimal", "float"}:
            return pa.float64()
        known, found = (pa.int8() if pa.types.is_boolean(kind) else kind for kind in (known, found))
    try:
        schemas = [pa.schema({"": kind}) for kind in (known, found)]
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        known_in_utc, found_in_utc = in_utc(known), in_utc(found)
        if (known_in_utc, found_in_utc) == (known, found):
            return None
        return _joined_type(known_in_utc, found_in_utc)
    if pa.types.is_decimal256(kind) and not any(map(pa.types.is_decimal256, (known, found))):
        # Few systems have more digits; the cast checks that the values need no more.
        return pa.decimal128(_DECIMAL_DIGITS, min(kind.scale, _DECIMAL_DIGITS))
    return kind


# ── conversion ───────────────────────────────────────────────────────────────────────────────────


def fit_table(table: pa.Table, schema: pa.Schema, *, is_declared: bool = False) -> pa.Table:
    """Return ``table`` with the columns of ``schema`` in its order; missing ones are null.

    For outputs that a rank made before it knew the whole schema; ``is_declared`` as in :func:`fit`. Raises
    MisfitError with the column and both types.
    """
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        chunks = [
            fit(chunk, field, is_declared=is_declared) for chunk in table.column(field.name).chunks
        ]
        columns.append(pa.chunked_array(chunks, field.type))
    return pa.Table.from_arrays(columns, schema=without_marks(schema))


def fit(array: pa.Array, field: pa.Field, *, is_declared: bool) -> pa.Array:
    """Return ``array`` in the type of ``field``. Raises MisfitError with the column and both types.

    ``is_declared``: the type is one of ``--schema``; otherwise it is one that :func:`joined` returned.
    """
    found, wanted = array.type, field.type
    if found == wanted:
        return array
    if array.null_count == len(array) or (family(wanted) not in NUMBERS and all_nan(array)):
        return pa.nulls(len(array), wanted)
    if not is_declared and family(wanted) == "text":
        return text_of(array, wanted)
    detail = ""
    # The order of a struct's fields is that of the first type.
    if is_convertible(found, wanted) if is_declared else _joined_type(wanted, found) == wanted:
        try:
            return _cast(array, wanted, rounds=not is_declared)
        except pa.ArrowException as error:
            detail = f" ({error})"
    raise _misfit(field, found, detail, is_declared)


def text_of(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return the text of each value as ``str`` shows it, in the type ``wanted`` of texts."""
    if family(_decoded(array.type)) == "text":
        return array.cast(wanted)
    return pa.array(_texts(array), wanted)


def _texts(array: pa.Array) -> list[str | None]:
    try:
        return [None if value is None else str(value) for value in array.to_pylist()]
    except (ValueError, OverflowError):  # some time is one that Python does not have
        if len(array) > 1:
            return [text for row in range(len(array)) for text in _texts(array.slice(row, 1))]
        shown: str = array.to_string(window=_NO_LIMIT, skip_new_lines=True)
        return [shown[1:-1]]


def _cast(array: pa.Array, wanted: pa.DataType, rounds: bool) -> pa.Array:
    """``rounds``: integers become the nearest float, as in pandas, instead of an error."""
    if "struct<" in str(wanted) and "list<item: null>" in str(wanted):
        # The cast of PyArrow makes lists of nulls in a struct that end after their items.
        return pa.array(array.to_pylist(), type=wanted)
    array = without_nan(array, wanted)
    is_rounded = rounds and pa.types.is_floating(wanted) and pa.types.is_integer(array.type)
    cast = array.cast(wanted, safe=not is_rounded)
    if n_infinite(cast) != n_infinite(array):
        raise pa.ArrowInvalid(f"a value is out of the range of {wanted}")
    return cast


def without_nan(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return floats for a column of integers, where NaN is a missing value."""
    if (family(array.type), family(wanted)) != ("float", "integer"):
        return array
    return pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)


def n_infinite(array: pa.Array) -> int:
    """Return how many values are infinite, also in nested types; a cast to float32 may add some."""
    if family(array.type) != "float":
        return sum(map(n_infinite, arrays_inside(array)))
    return pc.sum(pc.is_inf(array.cast(pa.float64()))).as_py() or 0


def _misfit(
    field: pa.Field, found: pa.DataType, detail: str = "", is_declared: bool = False
) -> MisfitError:
    returned = f"predict returned column {field.name!r} as {found}, but"
    if not is_declared:
        return MisfitError(
            f"{returned} as {field.type} for other rows{detail}",
            field.name,
            "return one type for all batches, or continue with --resume and --on-error collect, which makes"
            " the column text, or --schema, which sets its type",
        )
    wanted = field.type
    is_time = pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted)
    lacks_zone = is_time and found.tz is None and wanted.tz is not None
    remedy = "return that type, or correct --schema"
    if lacks_zone:
        remedy = "give the times a time zone, or declare timestamp_ntz"
    return MisfitError(f"{returned} --schema declares {wanted}{detail}", field.name, remedy)


def is_convertible(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether values may become a declared type; the cast still checks every value."""
    if found == wanted or pa.types.is_null(found):
        return True
    kinds = family(found), family(wanted)
    if "dictionary" in kinds:
        return is_convertible(_decoded(found), _decoded(wanted))
    if kinds[0] != kinds[1]:
        is_flag = kinds == ("boolean", "integer")
        return is_flag or ("boolean" not in kinds and set(kinds) <= set(NUMBERS))
    if kinds[0] in NESTED:
        parts, others = _parts(found), _parts(wanted)
        return parts.keys() <= others.keys() and all(
            is_convertible(parts[name], others[name]) for name in parts
        )
    if kinds[0] == "timestamp":
        return (found.tz is None) == (wanted.tz is None)
    return kinds[0] != "other"


def _parts(kind: pa.DataType) -> dict[str, pa.DataType]:
    """Return the types inside a nested type by their names."""
    if family(kind) == "list":
        return {"item": kind.value_type}
    if family(kind) == "map":
        return {"key": kind.key_type, "value": kind.item_type}
    return {field.name: field.type for field in kind}


def _decoded(kind: pa.DataType) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
