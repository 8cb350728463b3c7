"""Arrow tables in memory that two processes of one machine share.

Each direction of a channel has two memory files that are used in turn. A rank has at most two chunks in
flight and gets the next one after it has answered the first, so the table before the last one has been
read when its buffer is used again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hydrogen_magic.serialization.payload import memory_file

__all__ = ["MAX_IN_FLIGHT", "BufferReader", "BufferWriter"]

MAX_IN_FLIGHT = 2
"""Chunks that a rank may have: while it predicts one, the next one is already there."""
_MIN_BYTES = 1 << 16
_MAX_UNUSED_BYTES = 16 << 20
"""A larger buffer that is mostly empty is replaced by a smaller one."""


class BufferWriter:
    """Writes each table into the next buffer."""

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap | None] = [None] * MAX_IN_FLIGHT
        self._next = 0

    def write(self, table: Any) -> tuple[dict[str, int], list[int]]:
        """Write a ``pyarrow.Table`` as an IPC stream.

        Return the place of the table for :class:`BufferReader`, and the descriptor of a new memory
        file, which the caller sends and closes.
        """
        import pyarrow as pa

        from hydrogen_magic.node.prediction.arrow_copies import written

        number, self._next = self._next, (self._next + 1) % MAX_IN_FLIGHT
        nbytes = written(table, pa.MockOutputStream()).tell()
        fds = self._make_room(number, nbytes)
        written(table, pa.FixedSizeBufferWriter(pa.py_buffer(self._buffers[number])))
        return {"buffer": number, "nbytes": nbytes}, fds

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


class BufferReader:
    """Reads what a :class:`BufferWriter` of another process wrote."""

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap | None] = [None] * MAX_IN_FLIGHT

    def view(self, place: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        """Return a read-only ``pyarrow.Table`` in the buffer; ``fds`` are closed.

        It is valid until the writer uses the buffer again. Raises ValueError for a place that does not
        exist and for bytes that are not a table.
        """
        import pyarrow as pa

        return pa.ipc.open_stream(pa.py_buffer(self._bytes(place, fds))).read_all()

    def read(self, place: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        """Return a table like :meth:`view`, in its own memory."""
        import pyarrow as pa

        shared = self._bytes(place, fds)
        own = pa.allocate_buffer(len(shared), memory_pool=pa.system_memory_pool())
        memoryview(own).cast("B")[:] = shared
        return pa.ipc.open_stream(own).read_all()

    def _bytes(self, place: Mapping[str, Any], fds: Sequence[int]) -> memoryview:
        number, nbytes = int(place["buffer"]), int(place["nbytes"])
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
