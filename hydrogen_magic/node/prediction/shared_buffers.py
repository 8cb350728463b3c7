"""Arrow tables on their way between two processes of one machine, through two memory files in turn.

Whoever writes a table knows that the one before the last has been read: a rank has at most two chunks
in hand, and is given the next one when the output of the first of them has arrived. So each
direction of a channel needs two files, whose pages are there from the third table on.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hydrogen_magic.serialization.payload import memory_file

__all__ = ["IN_HAND", "SlotReader", "SlotWriter"]

IN_HAND = 2
"""Chunks a rank may have: it computes one, and the other is there when it is done."""
_LEAST = 1 << 16
"""Bytes of the smallest file."""
_KEPT = 16 << 20
"""Bytes; a larger file that is mostly empty gives way to a smaller one."""


class SlotWriter:
    """Writes tables, each into the next memory file."""

    def __init__(self) -> None:
        self._memories: list[mmap.mmap | None] = [None] * IN_HAND
        self._turn = 0

    def write(self, table: Any) -> tuple[dict[str, int], list[int]]:
        """Write a ``pyarrow.Table`` as an IPC stream.

        Return what :meth:`SlotReader.read` wants to know of it, and the descriptor of its memory file
        where that is a new one: the caller's to send along and to close.
        """
        import pyarrow as pa

        from hydrogen_magic.node.prediction.arrow_copies import written

        slot, self._turn = self._turn, (self._turn + 1) % IN_HAND
        nbytes = written(table, pa.MockOutputStream()).tell()
        fds = self._make_room(slot, nbytes)
        written(table, pa.FixedSizeBufferWriter(pa.py_buffer(self._memories[slot])))
        return {"slot": slot, "nbytes": nbytes}, fds

    def close(self) -> None:
        """Let go of the files: an error's traceback may hold whoever has us."""
        self._memories = [None] * IN_HAND

    def _make_room(self, slot: int, nbytes: int) -> list[int]:
        memory = self._memories[slot]
        if memory is not None and nbytes <= len(memory) <= max(_KEPT, 4 * nbytes):
            return []
        self._memories[slot] = None  # the old file's pages go first
        fd = memory_file("chunk")
        try:
            os.ftruncate(fd, max(_LEAST, nbytes + nbytes // 4))
            self._memories[slot] = mmap.mmap(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        return [fd]


class SlotReader:
    """Reads what a :class:`SlotWriter` in another process wrote."""

    def __init__(self) -> None:
        self._memories: list[mmap.mmap | None] = [None] * IN_HAND

    def view(self, told: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        """Return a ``pyarrow.Table`` that lies in the memory file, read-only; ``fds`` are closed.

        Its values hold until the writer may use that file again. Raises ValueError for a place that
        does not exist and for bytes that are no table.
        """
        import pyarrow as pa

        return pa.ipc.open_stream(pa.py_buffer(self._written(told, fds))).read_all()

    def read(self, told: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        """Return a table like :meth:`view`, in memory of its own."""
        import pyarrow as pa

        written = self._written(told, fds)
        own = pa.allocate_buffer(len(written), memory_pool=pa.system_memory_pool())
        memoryview(own).cast("B")[:] = written
        return pa.ipc.open_stream(own).read_all()

    def _written(self, told: Mapping[str, Any], fds: Sequence[int]) -> memoryview:
        slot, nbytes = int(told["slot"]), int(told["nbytes"])
        for fd in fds:
            self._memories[slot] = _mapped(fd)
        memory = self._memories[slot]
        if memory is None or nbytes > len(memory):
            raise ValueError(f"there are no {nbytes} bytes in memory file {slot}")
        return memoryview(memory)[:nbytes]

    def close(self) -> None:
        """Let go of the files."""
        self._memories = [None] * IN_HAND


def _mapped(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
