"""Arrow data in its own memory.

Arrow memory is constant, and NumPy views of it are read-only; but torch writes to it without a check, and
the owner of a buffer that Arrow uses may fill it again. So batches for ``predict``, and its results, are
copied if they could share memory.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

__all__ = ["copied", "copied_column", "written"]


def copied(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the same rows and schema in their own memory."""
    nbytes = written(rows, pa.MockOutputStream()).tell()
    own = pa.allocate_buffer(nbytes, memory_pool=pa.system_memory_pool())
    written(rows, pa.FixedSizeBufferWriter(own))
    return pa.ipc.open_stream(own).read_next_batch()


def copied_column(column: pa.Array) -> pa.Array:
    """Return the same values in their own memory."""
    return copied(pa.RecordBatch.from_arrays([column], names=["column"])).column(0)


def written(rows: pa.Table | pa.RecordBatch, sink: Any) -> Any:
    """Write rows to ``sink`` as an IPC stream; return it."""
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write(rows)
    return sink
