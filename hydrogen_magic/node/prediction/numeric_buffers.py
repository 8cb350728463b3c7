"""Predicted columns of numbers: each batch is written to its place in the column of the chunk.

Converting each batch by itself would leave small objects in the heap where the activations of the next
batch would go. These would move, and miss the CPU's caches: two ranks with a perceptron took 1.08 of the
time that way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.node.prediction.column_values import of_tensor


@dataclass(frozen=True, eq=False)
class _BufferedColumn:
    type: pa.DataType
    buffer: pa.Buffer
    values: Any
    """The buffer as an array: (rows,), or (rows, k) for lists of fixed size k."""

    def fitting(self, value: Any, n_rows: int) -> Any:
        """Return ``value`` as an array of the same dtype and shape, None if it is anything else."""
        if is_a(value, "torch", "Tensor"):
            value = of_tensor(value)
        if type(value) is not np.ndarray or value.dtype != self.values.dtype:
            return None
        if value.shape == (n_rows, 1) and self.values.ndim == 1:
            return value[:, 0]
        return value if value.shape == (n_rows, *self.values.shape[1:]) else None

    def array(self, start: int, stop: int) -> pa.Array:
        numbers = self.type if self.values.ndim == 1 else self.type.value_type
        flat = pa.Array.from_buffers(numbers, self.values.size, [None, self.buffer])
        if self.values.ndim > 1:
            flat = pa.Array.from_buffers(self.type, len(self.values), [None], children=[flat])
        return flat.slice(start, stop - start)


class NumericBuffers:
    """Space for ``n_rows`` rows of ``schema``, if all its columns are numbers or lists of fixed size.

    ``unnamed``: the name of a column without one.
    """

    def __init__(self, schema: pa.Schema, n_rows: int, unnamed: str) -> None:
        self._unnamed = unnamed
        columns = {field.name: _column(field.type, n_rows) for field in schema}
        self._columns = {name: column for name, column in columns.items() if column is not None}
        self._is_complete = bool(columns) and len(self._columns) == len(schema)

    def put(self, value: Any, start: int, n_rows: int) -> bool:
        """Write what ``predict`` returned for ``n_rows`` rows from ``start`` on, if it fits exactly.

        It fits if it is a dict of arrays or tensors of the columns' types, or one of these for a single
        column without a name. Otherwise nothing is written, and False is returned.
        """
        found = value if type(value) is dict else {self._unnamed: value}
        if not self._is_complete or len(found) != len(self._columns):
            return False
        parts = []
        for name, column in self._columns.items():
            part = column.fitting(found.get(name), n_rows)
            if part is None:
                return False
            parts.append((column, part))
        for column, part in parts:
            column.values[start : start + n_rows] = part
        return True

    def array(self, name: str, start: int, stop: int) -> pa.Array:
        """Return rows ``start`` to ``stop`` of a column, which share its memory."""
        return self._columns[name].array(start, stop)


def _column(kind: pa.DataType, n_rows: int) -> _BufferedColumn | None:
    shape: tuple[int, ...] = (n_rows,)
    numbers = kind
    if pa.types.is_fixed_size_list(kind):
        shape, numbers = (n_rows, kind.list_size), kind.value_type
    if not (pa.types.is_integer(numbers) or pa.types.is_floating(numbers)):
        return None
    dtype = np.dtype(numbers.to_pandas_dtype())
    buffer = pa.allocate_buffer(int(np.prod(shape)) * dtype.itemsize)
    return _BufferedColumn(kind, buffer, np.frombuffer(buffer, dtype).reshape(shape))
