"""Where one chunk ends and the next begins, and the batches of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

__all__ = ["CHUNK_BYTES", "ChunkSizer", "in_groups", "rebatched", "spans", "table_of"]

CHUNK_BYTES = 4 << 20
"""What a chunk should hold: large enough that handing it out costs nothing, small enough for a few
per rank to be no matter of memory."""

_MADE_AHEAD = 16
"""Batches."""


class ChunkSizer:
    """How many rows the next chunk should have, learned from the last one."""

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


def _row_bytes(table: pa.Table) -> int:
    """Return what the rows take, without the dictionaries that each chunk has as a whole."""
    return sum(
        chunk.indices.nbytes if pa.types.is_dictionary(chunk.type) else chunk.nbytes
        for column in table.columns
        for chunk in column.chunks
    )


def spans(n_rows: int, pace: ChunkSizer) -> Iterator[tuple[int, int]]:
    """Yield first row and end of every chunk; one empty one where there are no rows."""
    start = 0
    while True:
        end = min(start + pace.rows, n_rows)
        yield start, end
        if end >= n_rows:
            return
        start = end


def rebatched(pieces: Iterable[Any], schema: pa.Schema, pace: ChunkSizer) -> Iterator[pa.Table]:
    """Yield the rows of tables or record batches of any size in chunks of ``pace.rows``."""
    waiting: list[pa.Table] = []
    n_waiting = n_yielded = 0
    for piece in pieces:
        table = pa.Table.from_batches([piece]) if isinstance(piece, pa.RecordBatch) else piece
        waiting.append(table)
        n_waiting += table.num_rows
        while n_waiting >= pace.rows:
            together = pa.concat_tables(waiting)
            chunk = together.slice(0, pace.rows)
            waiting = [together.slice(chunk.num_rows)]
            n_waiting -= chunk.num_rows
            n_yielded += 1
            pace.saw(chunk)
            yield chunk
    if n_waiting:
        yield pa.concat_tables(waiting)
    elif not n_yielded:
        yield schema.empty_table()


def in_groups(made: Callable[[int, int], Any], bounds: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """Yield what is ``made`` of each of ``bounds``, some of them made ahead."""
    todo = iter(bounds)
    while group := [made(start, stop) for start, stop in islice(todo, _MADE_AHEAD)]:
        yield from group


def table_of(arrays: list[Any], schema: pa.Schema, n_rows: int) -> pa.Table:
    """Return a table of ``n_rows``, which Arrow cannot tell where there are no columns."""
    if arrays:
        return pa.Table.from_arrays(arrays, schema=schema)
    nothing = pa.array([{}] * n_rows, pa.struct([]))
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(nothing)])
