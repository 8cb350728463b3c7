"""Predictions in the types of a Spark DataFrame, which are fixed before its rows are predicted.

Values are converted where nothing is lost: 3.0 becomes the integer 3, and NaN in a column of integers is a
missing value. Others are null, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.node.prediction.arrow_types import family
from hydrogen_magic.node.prediction.ddl import name_of, spark_type
from hydrogen_magic.node.prediction.options import ERROR_COLUMN
from hydrogen_magic.node.prediction.schema_unify import n_infinite

_MAX_CHARACTERS = 80
"""Of a value in a message."""


def fixed(columns: pa.Table, schema: pa.Schema) -> tuple[pa.Table, dict[int, str]]:
    """Return ``columns`` in exactly the types of ``schema``, and why values are missing, by their row."""
    arrays: list[pa.Array] = []
    reasons: dict[int, str] = {}
    for field, column in zip(schema, columns.columns, strict=True):
        values = column.combine_chunks()
        if isinstance(values.type, pa.BaseExtensionType):
            values = values.storage
        try:
            arrays.append(_cast(values, field.type))
        except pa.ArrowException:
            parts = [values.slice(row, 1) for row in range(len(values))]
            converted = [_or_none(part, field.type) for part in parts]
            for row, part in enumerate(parts):
                if converted[row] is None:
                    reasons.setdefault(row, _reason(field, part))
            nothing = pa.nulls(1, field.type)
            arrays.append(pa.concat_arrays([nothing if a is None else a for a in converted]))
    return pa.Table.from_arrays(arrays, schema=schema), reasons


def with_reasons(columns: pa.Table, reasons: dict[int, str]) -> pa.Table:
    """Return ``columns`` with ``reasons`` in the column of errors, if there is one."""
    place = columns.schema.get_field_index(ERROR_COLUMN)
    if not reasons or place < 0:
        return columns
    known = columns.column(place).to_pylist()
    texts = [text or reasons.get(row) for row, text in enumerate(known)]
    return columns.set_column(place, columns.schema.field(place), [pa.array(texts, pa.string())])


def _or_none(value: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        return _cast(value, kind)
    except pa.ArrowException:
        return None


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Raises ArrowException if a value would change."""
    kinds = family(values.type), family(kind)
    if kinds == ("float", "integer"):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    # Spark has microseconds: what is finer is cut off, as pyspark does.
    is_finer = kinds[0] == kinds[1] and getattr(values.type, "unit", "") == "ns"
    cast = values.cast(kind, safe=not is_finer)
    if n_infinite(cast) != n_infinite(values):
        raise pa.ArrowInvalid("out of range")
    is_flag = kinds[1] == "boolean" and kinds[0] in ("integer", "float", "decimal")
    if is_flag and not cast.cast(pa.int8()).cast(values.type).equals(values):
        raise pa.ArrowInvalid("not 0 or 1")  # the cast makes every number but 0 true
    return cast


def _reason(field: pa.Field, value: pa.Array) -> str:
    shown, wider = repr(value[0].as_py())[:_MAX_CHARACTERS], name_of(spark_type(value.type))
    return (
        f"predict returned {shown} in column {field.name!r}, which is {name_of(field.type)} since the first"
        f' batch: set its type, for example --schema "{field.name} {wider}"'
    )


def misfit_texts(reasons: dict[int, str], first_row: int) -> Iterator[str]:
    """Yield the reasons with the numbers of their rows."""
    return (f"row {first_row + row:,}: {reason}" for row, reason in sorted(reasons.items()))
