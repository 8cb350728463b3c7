"""Columns of a batch that ``predict`` returns without a change: they are the frame's own, not predictions.

They are compared by value, since ``predict`` may change its batch in place. A returned column and the
batch's, made again, are converted in the same way, so missing values and types compare as equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.node.prediction import annotations as kinds
from hydrogen_magic.node.prediction.arrow_copies import written
from hydrogen_magic.node.prediction.arrow_types import NESTED, family
from hydrogen_magic.node.prediction.inputs import BatchConverter
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.outputs import columns_of, in_order

_WITHOUT_NAMES = {kinds.ARRAY, kinds.TENSOR}


class OwnColumns:
    """The columns that the result takes from the frame; ``kind``: the kind of the batches."""

    def __init__(self, options: InferOptions, kind: str) -> None:
        self._options = options
        self._kind = kinds.PANDAS if kind in _WITHOUT_NAMES else kind
        self._converter = BatchConverter(self._kind)
        self._schema: pa.Schema | None = None
        self._kept: set[str] = set()
        self._nested: list[pa.Field] = []

    def has_name_of(self, value: Any, rows: Any) -> bool:
        """Whether ``value`` is a Series with the name of a column of the frame: ``batch["x"] * 2`` has it."""
        is_series = is_a(value, "pandas", "Series") or is_a(value, "polars", "Series")
        return is_series and str(value.name) in self._kept_of(rows)

    def without_unchanged(self, value: Any, rows: Any, first_row: int, index: Any) -> Any:
        """Return a DataFrame without the columns of its batch if all of them are unchanged.

        A shortcut for wide frames: other values, and changed columns, are left to :meth:`drop_unchanged`.
        """
        if not (is_a(value, "pandas", "DataFrame") and self._kind == kinds.PANDAS):
            return value
        kept = self._kept_of(rows)
        labels = [label for label in value.columns if str(label) in kept]
        if not labels or not value.columns.is_unique or len(value) != rows.num_rows:
            return value
        (batch,) = self._converter.batches(rows, first_row, ((0, rows.num_rows),))
        found = in_order(value, index)
        is_same = set(labels) <= set(batch.columns) and (
            found[labels].reset_index(drop=True).equals(batch[labels].reset_index(drop=True))
        )
        return found.drop(columns=labels) if is_same and len(labels) < len(found.columns) else value

    def drop_unchanged(self, columns: dict[str, pa.Array], rows: Any, first_row: int) -> list[str]:
        """Remove unchanged columns from ``columns``; return the names of the changed ones."""
        kept = self._kept_of(rows)
        names = [name for name in columns if name in kept]
        if not names:
            return []
        n_rows = rows.num_rows
        (batch,) = self._converter.batches(rows.select(names), first_row, ((0, n_rows),))
        # There are tensors of numbers alone.
        is_empty = isinstance(batch, dict) and not batch
        before = {} if is_empty else columns_of(batch, n_rows, known=self.nested(rows))
        for name in names:
            if name in before and _is_same(columns[name], before[name]):
                del columns[name]
        return [name for name in names if name in columns]

    def nested(self, rows: Any) -> Sequence[pa.Field]:
        """Return the kept fields of a nested type, which values do not show: pairs of a map are tuples."""
        self._kept_of(rows)
        return self._nested

    def _kept_of(self, rows: Any) -> set[str]:
        if self._schema is None or not rows.schema.equals(self._schema):
            self._schema, self._kept = rows.schema, set(self._options.kept(rows.schema.names))
            fields = (field for field in self._schema if field.name in self._kept)
            self._nested = [field for field in fields if family(field.type) in NESTED]
        return self._kept


def _is_same(one: pa.Array, other: pa.Array) -> bool:
    if one.type != other.type:
        # Integers are floats in a batch of a chunk that has nulls elsewhere.
        if not {family(one.type), family(other.type)} <= {"integer", "float"}:
            return False
        try:
            alike = one.cast(other.type)
            if not _has_same_values(alike.cast(one.type), one):
                return False
        except pa.ArrowInvalid:
            return False
        one = alike
    return _has_same_values(one, other)


def _has_same_values(one: pa.Array, other: pa.Array) -> bool:
    # The bytes of NaN are equal, its values are not.
    return bool(one.equals(other) or _bytes(one).equals(_bytes(other)))


def _bytes(column: pa.Array) -> pa.Buffer:
    rows = pa.RecordBatch.from_arrays([column], names=["column"])
    return written(rows, pa.BufferOutputStream()).getvalue()
