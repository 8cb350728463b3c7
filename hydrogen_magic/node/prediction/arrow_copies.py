"""Rows and columns of Arrow in memory of their own.

Arrow's memory counts as constant, and NumPy's views of it say so; but torch writes into what it is given
without asking, and whoever made an Arrow array from a buffer of theirs may fill that again. So what goes
to ``predict`` and what comes from it is copied where its kind could share memory.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

__all__ = ["copied", "copied_column", "written"]


def copied(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the same rows, schema included, in memory that nobody else has."""
    nbytes = written(rows, pa.MockOutputStream()).tell()
    own = pa.allocate_buffer(nbytes, memory_pool=pa.system_memory_pool())
    written(rows, pa.FixedSizeBufferWriter(own))
    return pa.ipc.open_stream(own).read_next_batch()


def copied_column(column: pa.Array) -> pa.Array:
    """Return the same values in memory that nobody else has."""
    return copied(pa.RecordBatch.from_arrays([column], names=["column"])).column(0)


def written(rows: pa.Table | pa.RecordBatch, sink: Any) -> Any:
    """Write rows to ``sink`` as an IPC stream; return it."""
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write(rows)
    return sink
