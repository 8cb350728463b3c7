"""Predictions in the types of a Spark DataFrame, which are fixed before its rows are predicted.

Values are converted where nothing is lost: 3.0 becomes the integer 3, and NaN in a column of integers is a
missing value. Others are null, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.core.units import clipped
from hydrogen_magic.node.prediction.arrow_types import family, is_number
from hydrogen_magic.node.prediction.ddl import name_of, spark_type
from hydrogen_magic.node.prediction.options import ERROR_COLUMN
from hydrogen_magic.node.prediction.schema_unify import (
    is_convertible,
    n_infinite,
    text_of,
    without_nan,
)

_MAX_CHARACTERS = 500
"""Of a message; the column of errors has the whole value."""

_COARSE = re.compile(r"(timestamp|duration)\[m?s\b")
"""Types with values out of the range of Spark's microseconds."""


def fixed(
    columns: pa.Table, schema: pa.Schema, *, as_text: bool, rounds: bool = False
) -> tuple[pa.Table, dict[int, str]]:
    """Return ``columns`` in exactly the types of ``schema``, and why values are missing, by their row.

    Columns that are missing are null. See :func:`fixed_array`.
    """
    arrays: list[pa.Array] = []
    reasons: dict[int, str] = {}
    for field in schema:
        if field.name not in columns.column_names:
            arrays.append(pa.nulls(columns.num_rows, field.type))
            continue
        values = columns.column(field.name).combine_chunks()
        array, of_column = fixed_array(values, field, as_text=as_text, rounds=rounds)
        arrays.append(array)
        add_reasons(reasons, of_column)
    return pa.Table.from_arrays(arrays, schema=schema), reasons


def fixed_array(
    values: pa.Array, field: pa.Field, *, as_text: bool, rounds: bool = False
) -> tuple[pa.Array, dict[int, str]]:
    """Return ``values`` in the type of ``field``, and why some are missing, by their row.

    ``as_text``: values of all types fit a column of text, and text that a value was made into is that value
    again. ``rounds``: numbers are rounded in a column of floats; the type of ``field`` was joined from those
    of all values.
    """
    found = _converted(values, field.type, as_text, rounds)
    if found is not None:
        return found, {}
    parts = [values.slice(row, 1) for row in range(len(values))]
    converted = [_converted(part, field.type, as_text, rounds) for part in parts]
    reasons = {row: _reason(field, parts[row]) for row, a in enumerate(converted) if a is None}
    nothing = pa.nulls(1, field.type)
    return pa.concat_arrays([nothing if a is None else a for a in converted]), reasons


def fits(values: pa.Array, kind: pa.DataType) -> bool:
    """Return whether a column of type ``kind``, joined from several types, can hold all ``values``."""
    # Values are not read if each one of their type fits, such as those of embeddings.
    is_same = spark_type(values.type) == kind and not _COARSE.search(str(values.type))
    is_safe = is_same or family(kind) == "text"
    return is_safe or _converted(values, kind, as_text=True, rounds=True) is not None


def add_reasons(known: dict[int, str], of_column: dict[int, str]) -> None:
    """Add the reasons of one more column, by their row."""
    for row, reason in of_column.items():
        known[row] = f"{known[row]}; {reason}" if row in known else reason


def with_reasons(columns: pa.Table, reasons: dict[int, str]) -> pa.Table:
    """Return ``columns`` with ``reasons`` in the column of errors, if there is one."""
    place = columns.schema.get_field_index(ERROR_COLUMN)
    if not reasons or place < 0:
        return columns
    known = columns.column(place).to_pylist()
    texts = [text or reasons.get(row) for row, text in enumerate(known)]
    return columns.set_column(place, columns.schema.field(place), [pa.array(texts, pa.string())])


def misfit_texts(reasons: dict[int, str], first_row: int) -> Iterator[str]:
    """Yield the reasons, shortened, with the numbers of their rows."""
    return (
        f"row {first_row + row:,}: {clipped(reason, _MAX_CHARACTERS)}"
        for row, reason in sorted(reasons.items())
    )


def _converted(values: pa.Array, kind: pa.DataType, as_text: bool, rounds: bool) -> pa.Array | None:
    """Return ``values`` in a type, None if one of them would change."""
    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    if values.type == kind:
        return values
    if values.null_count == len(values):
        return pa.nulls(len(values), kind)
    try:
        if as_text and "text" in (family(kind), family(values.type)):
            return _by_text(values, kind)
        return _cast(values, kind, rounds)
    except pa.ArrowException:
        return None


def _by_text(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Raises ArrowException for text that is not the text of a value of ``kind``."""
    if family(kind) == "text":
        return text_of(values, kind)
    cast = values.cast(kind)
    if not text_of(cast, values.type).equals(values):
        raise pa.ArrowInvalid("not the text of such a value")
    return cast


def _cast(values: pa.Array, kind: pa.DataType, rounds: bool) -> pa.Array:
    """Raises ArrowException if a value would change."""
    kinds = family(values.type), family(kind)
    are_numbers = is_number(values.type) and is_number(kind)
    if not (rounds or are_numbers or is_convertible(values.type, kind)):
        raise pa.ArrowInvalid("another type")
    values = without_nan(values, kind)
    # Spark has microseconds: what is finer is cut off, as pyspark does.
    is_rounded = rounds and kinds == ("integer", "float")
    options = pc.CastOptions(kind, allow_time_truncate=True, allow_float_truncate=is_rounded)
    cast = values.cast(options=options)
    if n_infinite(cast) != n_infinite(values):
        raise pa.ArrowInvalid("out of range")
    # The cast makes every number but 0 true, for example.
    is_exact = not are_numbers or kinds[0] == kinds[1] or rounds
    if not is_exact and not cast.cast(values.type).equals(values):
        raise pa.ArrowInvalid("not the same number")
    return cast


def _reason(field: pa.Field, value: pa.Array) -> str:
    wider = spark_type(value.type)
    if wider is None or family(wider) == "text":
        remedy = f'return text for every row and set --schema "{field.name} string"'
    else:
        remedy = f'set its type, for example --schema "{field.name} {name_of(wider)}"'
    (shown,) = text_of(value, pa.string()).to_pylist()
    shown = repr(shown) if family(value.type) == "text" else shown
    return (
        f"predict returned {shown} in column {field.name!r}, which is {name_of(field.type)} for other rows:"
        f" {remedy}"
    )
