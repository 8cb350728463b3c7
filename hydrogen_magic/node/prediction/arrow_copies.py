"""Arrow data in its own memory.

Arrow memory is constant, and NumPy views of it are read-only; but torch writes to it without a check, and
the owner of a buffer that Arrow uses may fill it again. So batches for ``predict``, and its results, are
copied if they could share memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from hydrogen_magic.node.prediction.block_rows import BlockRows
from hydrogen_magic.node.prediction.chunking import one_batch


def copied(rows: Any) -> Any:
    """Return the same rows and schema, of a RecordBatch or :class:`BlockRows`, in their own memory."""
    if isinstance(rows, BlockRows):
        blocks = [block.copy("K") for block in rows.blocks]
        table = pa.Table.from_batches([copied(one_batch(rows.table))])
        return replace(rows, blocks=blocks, table=table)
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
