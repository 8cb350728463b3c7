"""Transfer of files in parts: closures to agents, results and logs to the kernel.

Every part is acknowledged, and the number of unacknowledged parts is limited: ZeroMQ would silently
queue a gigabyte, and need twice its memory.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hydrogen_magic.core.messages import (
    CheckpointCopy,
    ClosureLabel,
    FilePart,
    LogPart,
    RankFile,
    TimelinePart,
)
from hydrogen_magic.serialization.payload import memory_file

PART_BYTES = 4 << 20
_ON_THE_WAY = 8
"""Parts: 32 MB saturate a gigabit line with a round trip of a quarter of a second."""


Part = FilePart | LogPart | TimelinePart


class Outgoing:
    """The sender of one end. ``send``: sends a message with bytes."""

    def __init__(self, send: Callable[[Part, memoryview], None]) -> None:
        self._send = send
        self._room = asyncio.Semaphore(_ON_THE_WAY)
        self._next = 0

    def acknowledged(self) -> None:
        """The receiver has acknowledged a part."""
        self._room.release()

    async def send(self, part: Part, data: memoryview) -> None:
        """Send one part as soon as there is room for it."""
        await self._room.acquire()
        self._send(part, data)

    async def send_file(
        self,
        label: RankFile | ClosureLabel | CheckpointCopy,
        fd: int,
        on_sent: Callable[[int, int], None] = lambda sent, size: None,
    ) -> None:
        """Send the contents of file ``fd``, which may be closed after this returns.

        ``on_sent``: called after every part with the bytes sent so far and the size of the file.
        """
        self._next += 1
        size = os.fstat(fd).st_size
        number = self._next
        if size == 0:
            await self.send(FilePart(label, number, size, 0), memoryview(b""))
            return
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped:
            for offset in range(0, size, PART_BYTES):
                # A copy: queued messages must not refer to memory that is unmapped by then.
                data = memoryview(mapped[offset : offset + PART_BYTES])
                await self.send(FilePart(label, number, size, offset), data)
                on_sent(offset + len(data), size)


class Incoming:
    """The receiver of one end: files, each until it is complete."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def take(self, part: FilePart, data: memoryview) -> int | None:
        """Take a part; return the whole file's descriptor, the caller's to close, with the last one.

        Parts of one file come in order.
        """
        number, offset, size = part.file, part.offset, part.size
        if number not in self._files:
            if offset > 0:
                return None  # remaining parts of a file that was dropped
            self._files[number] = memory_file("parts")
        fd = self._files[number]
        rest, position = data, offset
        while rest.nbytes:
            written = os.pwrite(fd, rest, position)
            rest, position = rest[written:], position + written
        if offset + data.nbytes < size:
            return None
        return self._files.pop(number)

    def drop(self) -> None:
        """Drop an incomplete file, and its remaining parts."""
        while self._files:
            os.close(self._files.popitem()[1])


def keep(fd: int, path: Path) -> None:
    """Write the contents of file ``fd``, which stays open, to ``path``: completely or not at all.

    The file has the suffix ``.arriving`` until then. Raises OSError.
    """
    arriving = path.with_name(".arriving")
    with open(fd, "rb", closefd=False) as source, arriving.open("wb") as target:
        source.seek(0)
        shutil.copyfileobj(source, target)
    arriving.rename(path)
