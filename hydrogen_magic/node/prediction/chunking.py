"""Frames as chunks of rows, and chunks as batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from hydrogen_magic.node.prediction.arrow_types import size_bytes

CHUNK_BYTES = 4 << 20
"""Target size of a chunk: large enough that sending it costs nothing, small enough to keep a few per
rank in memory."""

_MADE_AHEAD = 16
"""Batches."""
_LARGE_TYPES = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


class ChunkSizer:
    """Number of rows of the next chunk, from the size of the last one."""

    def __init__(self, batch_size: int) -> None:
        self.rows = batch_size
        """A multiple of the batch size."""
        self._batch_size = batch_size

    def saw(self, table: pa.Table) -> None:
        """Take note of a chunk's size."""
        if table.num_rows:
            batch_bytes = _row_bytes(table) / table.num_rows * self._batch_size
            n_batches = int(CHUNK_BYTES // max(batch_bytes, 1.0))
            self.rows = self._batch_size * max(1, n_batches)


def _row_bytes(rows: Any) -> int:
    """Return the size of the rows without the dictionaries, which each chunk holds as a whole."""
    table = getattr(rows, "table", rows)
    encoded = (n for n, kind in enumerate(table.schema.types) if pa.types.is_dictionary(kind))
    chunks = [chunk for n in encoded for chunk in table.column(n).chunks]
    shared = sum(chunk.nbytes - chunk.indices.nbytes for chunk in chunks)
    return size_bytes(rows) - int(shared)


def sliced(take: Callable[[int, int], Any], n_rows: int, batch_size: int) -> Iterator[Any]:
    """Yield chunks of ``n_rows`` rows, an empty one if there are none.

    ``take`` returns a number of rows from a first row on.
    """
    sizer, start = ChunkSizer(batch_size), 0
    while True:
        chunk = take(start, min(sizer.rows, n_rows - start))
        sizer.saw(chunk)
        start += chunk.num_rows
        yield chunk
        if start >= n_rows:
            return


def rebatched(pieces: Iterable[Any], schema: pa.Schema, sizer: ChunkSizer) -> Iterator[pa.Table]:
    """Yield the rows of tables or record batches of any size in chunks of ``sizer.rows`` rows.

    Pieces without rows are left out: PyArrow writes invalid IPC for such an array of another library if it
    has an offset.
    """
    waiting: list[pa.Table] = []
    n_waiting = n_yielded = 0
    for piece in pieces:
        table = pa.Table.from_batches([piece]) if isinstance(piece, pa.RecordBatch) else piece
        waiting += [table] if table.num_rows else []
        n_waiting += table.num_rows
        while n_waiting >= sizer.rows:
            together = pa.concat_tables(waiting)
            chunk = together.slice(0, sizer.rows)
            n_waiting -= chunk.num_rows
            waiting = [together.slice(chunk.num_rows)] if n_waiting else []
            n_yielded += 1
            sizer.saw(chunk)
            yield chunk
    if n_waiting:
        yield pa.concat_tables(waiting)
    elif not n_yielded:
        yield schema.empty_table()


def in_groups(made: Callable[[int, int], Any], bounds: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Yield ``made(start, stop)`` for each of ``bounds``, some of them made ahead."""
    todo = iter(bounds)
    while group := [made(start, stop) for start, stop in islice(todo, _MADE_AHEAD)]:
        yield from group


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows of a table in one RecordBatch.

    Text and bytes of more than 2 GiB are in Arrow's large types: ``combine_chunks`` splits them.
    """
    batches = with_large_types(table.combine_chunks()).to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def with_large_types(table: pa.Table) -> pa.Table:
    """Return ``table`` with large types for text and bytes in several chunks, which become one chunk."""
    for place, column in enumerate(table.columns):
        if column.num_chunks > 1:
            kind = _LARGE_TYPES[column.type]
            whole = column.cast(kind).combine_chunks()
            table = table.set_column(place, table.schema.field(place).with_type(kind), whole)
    return table


def table_of(arrays: list[Any], schema: pa.Schema, n_rows: int) -> pa.Table:
    """Return a table of ``n_rows`` rows, also without columns."""
    if arrays:
        return pa.Table.from_arrays(arrays, schema=schema)
    nothing = pa.StructArray.from_buffers(pa.struct([]), n_rows, [None])
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(nothing)])


def side_by_side(own: pa.Table, predicted: pa.Table) -> pa.Table:
    """Return the columns of both tables. A table without columns does not know its number of rows."""
    if not (own.num_columns and predicted.num_columns):
        return predicted if predicted.num_columns else own
    schema = pa.schema([*own.schema, *predicted.schema], metadata=own.schema.metadata)
    return pa.Table.from_arrays([*own.columns, *predicted.columns], schema=schema)
