"""Arrow tables in memory that two processes of one machine share.

The arrays of wide rows (:mod:`~hydrogen_magic.node.prediction.block_rows`) lie behind the table.

Each direction of a channel has two memory files that are used in turn. A rank has at most two chunks in
flight and gets the next one after it has answered the first, so the table before the last one has been
read when its buffer is used again.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hydrogen_magic.node.prediction.arrow_copies import written
from hydrogen_magic.node.prediction.block_rows import BlockRows
from hydrogen_magic.serialization.payload import memory_file, write_at

MAX_IN_FLIGHT = 2
"""Chunks that a rank may have: while it predicts one, the next one is already there."""
_MIN_BYTES = 1 << 16
_ALIGNMENT = 64
"""Of blocks; a cache line."""
_MAX_UNUSED_BYTES = 16 << 20
"""A larger buffer that is mostly empty is replaced by a smaller one."""


class BufferWriter:
    """Writes each table into the next buffer."""

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap | None] = [None] * MAX_IN_FLIGHT
        self._next = 0

    def write(self, rows: Any) -> tuple[dict[str, Any], list[int]]:
        """Write a ``pyarrow.Table`` as an IPC stream, or :class:`BlockRows`.

        Return the place of the table for :class:`BufferReader`, and the descriptor of a new memory
        file, which the caller sends and closes.
        """
        number, self._next = self._next, (self._next + 1) % MAX_IN_FLIGHT
        blocks = getattr(rows, "blocks", ())
        table = getattr(rows, "table", rows)
        nbytes = written(table, pa.MockOutputStream()).tell()
        places, end = _block_places(blocks, nbytes)
        fds = self._make_room(number, end)
        written(table, pa.FixedSizeBufferWriter(pa.py_buffer(self._buffers[number])))
        for block, place in zip(blocks, places, strict=True):
            if fds:  # of a new file: half of the time of page faults in the mapping
                is_contiguous = block.flags.c_contiguous or block.flags.f_contiguous
                raw = pickle.PickleBuffer(block if is_contiguous else block.copy("K")).raw()
                write_at(fds[0], place[0], raw)
            else:
                _block_at(self._buffers[number], place)[...] = block
        return {"buffer": number, "nbytes": nbytes, "end": end, "blocks": places}, fds

    def _make_room(self, number: int, nbytes: int) -> list[int]:
        buffer = self._buffers[number]
        if buffer is not None and nbytes <= len(buffer) <= max(_MAX_UNUSED_BYTES, 4 * nbytes):
            return []
        self._buffers[number] = None  # frees its pages before new ones are needed
        fd = memory_file("chunk")
        try:
            os.ftruncate(fd, max(_MIN_BYTES, nbytes + nbytes // 4))
            self._buffers[number] = mmap.mmap(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return [fd]

    def close(self) -> None:
        """Release the buffers, even if the traceback of an error refers to this object."""
        self._buffers = [None] * MAX_IN_FLIGHT


def _block_places(blocks: Sequence[Any], end: int) -> tuple[list[list[Any]], int]:
    """Return the place of each block behind the first ``end`` bytes, and the end of the last one."""
    places = []
    for block in blocks:
        start = end + -end % _ALIGNMENT
        order = "C" if abs(block.strides[0]) >= abs(block.strides[1]) else "F"
        places.append([start, block.dtype.str, *block.shape, order])
        end = start + block.nbytes
    return places, end


def _block_at(buffer: Any, place: Sequence[Any]) -> Any:
    """Return the array at a place of :func:`_block_places`."""
    start, dtype, n_rows, n_columns, order = place
    values = np.frombuffer(buffer, dtype, n_rows * n_columns, start)
    return values.reshape((n_rows, n_columns), order=order)


class BufferReader:
    """Reads what a :class:`BufferWriter` of another process wrote."""

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap | None] = [None] * MAX_IN_FLIGHT
        self.layout: Any = None
        """The :class:`BlockLayout` of rows in blocks, which arrives before the first of them."""

    def view(self, place: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        """Return a read-only ``pyarrow.Table`` or ``BlockRows`` in the buffer; ``fds`` are closed.

        They are valid until the writer uses the buffer again. Raises ValueError for a place that does
        not exist and for bytes that are not a table.
        """
        content = pa.py_buffer(self._bytes(place, fds))
        table = pa.ipc.open_stream(content.slice(0, int(place["nbytes"]))).read_all()
        if self.layout is None:
            return table
        blocks = [_block_at(content, each) for each in place["blocks"]]
        n_rows = len(blocks[0]) if blocks else table.num_rows
        return BlockRows(self.layout, n_rows, blocks, table)

    def copied(self, place: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        """Return a copy of the bytes in a ``pyarrow.Buffer``: an IPC stream, if there are no blocks."""
        shared = self._bytes(place, fds)
        own = pa.allocate_buffer(len(shared), memory_pool=pa.system_memory_pool())
        memoryview(own).cast("B")[:] = shared
        return own

    def _bytes(self, place: Mapping[str, Any], fds: Sequence[int]) -> memoryview:
        number, nbytes = int(place["buffer"]), int(place["end"])
        for fd in fds:
            self._buffers[number] = _mapped(fd)
        buffer = self._buffers[number]
        if buffer is None or nbytes > len(buffer):
            raise ValueError(f"shared buffer {number} does not have {nbytes} bytes")
        return memoryview(buffer)[:nbytes]

    def close(self) -> None:
        """Release the buffers."""
        self._buffers = [None] * MAX_IN_FLIGHT


def _mapped(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
