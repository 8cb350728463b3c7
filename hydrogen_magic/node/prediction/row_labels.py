"""Rows in messages: their numbers, and the values of the first row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from hydrogen_magic.core.units import clipped, counted, size_text
from hydrogen_magic.node.prediction.arrow_types import size_bytes

_MAX_REASONS = 3
_MAX_CHARACTERS = 200
_MAX_VALUE_CHARACTERS = 40
_SMALL_BYTES = 1024
"""A value up to this size is converted to Python to be shown."""


def rows_text(first_row: int, last_row: int) -> str:
    """Return the numbers of consecutive rows, counted from 0."""
    if first_row == last_row:
        return f"row {first_row}"
    return f"rows {first_row} to {last_row}"


def failures_text(n_rows: int, reasons: Sequence[str], n_failures: int | None = None) -> str:
    """Return a message about ``n_rows`` rows without predictions, with some of the reasons.

    ``n_failures``: how many reasons there are, if known.
    """
    shown = [*reasons[:_MAX_REASONS]]
    if len(shown) < (n_failures or len(reasons)):
        shown.append("and more" if n_failures is None else f"and {n_failures - len(shown):,} more")
    return f"{counted(n_rows, 'row')} got no prediction: {'; '.join(shown)}"


def first_row_text(rows: Any) -> str:
    """Return the first of ``rows`` in at most 200 characters: ``x=0.5, name='ab…'``.

    ``rows``: a RecordBatch or ``BlockRows``.

    Values that are too long are not copied.
    """
    text = ""
    for place, name in enumerate(rows.schema.names):
        part = f"{_clipped(name)}={_cell_text(rows.column(place).slice(0, 1))}"
        longer = f"{text}, {part}" if text else part
        if len(longer) > _MAX_CHARACTERS - 3:
            return f"{text}, …" if text else part[: _MAX_CHARACTERS - 1] + "…"
        text = longer
    return text


def _cell_text(cell: pa.Array) -> str:
    """Return the single value of ``cell`` as Python shows it, shortened."""
    types, kind = pa.types, cell.type
    n_bytes = size_bytes(cell)
    if n_bytes > _SMALL_BYTES:
        if types.is_string(kind) or types.is_large_string(kind):
            cell = pc.utf8_slice_codeunits(cell, 0, _MAX_VALUE_CHARACTERS + 1)
        elif types.is_binary(kind) or types.is_large_binary(kind):
            cell = pc.binary_slice(cell, 0, _MAX_VALUE_CHARACTERS + 1)
        elif not types.is_dictionary(kind):
            return f"<{_clipped(str(kind))}, {size_text(n_bytes)}>"
    try:
        value: Any = cell[0].as_py()
    except Exception:  # a time out of range, invalid text, an unknown time zone
        return f"<{_clipped(str(kind))}>"
    return _clipped(repr(value) if isinstance(value, (str, bytes)) or value is None else str(value))


def _clipped(text: str) -> str:
    return clipped(text, _MAX_VALUE_CHARACTERS)


def widened_text(name: str, first: str, final: str) -> str:
    """Return a message about a column whose first rows have another type than its result."""
    is_rounded = first.endswith("int64") and final == "double"
    rounded = ", which rounds integers above 2**53" if is_rounded else ""
    return (
        f"column {name!r} is {final}{rounded}, since predict returned {first} for the first rows and another"
        " type for others: set its type with --schema"
    )
