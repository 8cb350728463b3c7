"""Transfer of files in parts: closures to and between agents, rows of ``%%infer``, results and logs.

Every part is acknowledged, and the number of unacknowledged parts is limited: ZeroMQ would silently
queue a gigabyte, and need twice its memory.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hydrogen_magic.core import messages as msg
from hydrogen_magic.serialization.payload import memory_file, write_at

PART_BYTES = 4 << 20
_ON_THE_WAY = 8
"""Parts: 32 MB saturate a gigabit line with a round trip of a quarter of a second."""


Part = msg.FilePart | msg.RecordPart


class Outgoing:
    """The sender of one end. ``send``: sends a message with bytes."""

    def __init__(self, send: Callable[[Part, memoryview], None]) -> None:
        self._send = send
        self._room = asyncio.Semaphore(_ON_THE_WAY)
        self._next = 0
        self.acknowledged_s = time.monotonic()
        """When the receiver has acknowledged the last part."""

    def acknowledged(self) -> None:
        """The receiver has acknowledged a part."""
        self.acknowledged_s = time.monotonic()
        self._room.release()

    async def send(self, part: Part, data: memoryview) -> None:
        """Send one part as soon as there is room for it."""
        await self._room.acquire()
        try:
            self._send(part, data)
        except BaseException:  # nothing will be acknowledged
            self._room.release()
            raise

    async def send_file(
        self,
        label: msg.FileLabel,
        fd: int,
        on_sent: Callable[[int, int], None] = lambda sent, size: None,
        start: int = 0,
        size: int | None = None,
        part_bytes: int = PART_BYTES,
        from_disk: bool = False,
    ) -> None:
        """Send the contents of file ``fd`` from byte ``start`` on; it may be closed after this returns.

        ``on_sent``: called after every part with the bytes sent so far and the size of the file. ``size``:
        bytes of the file, None for all. ``part_bytes``: of each part but the last. ``from_disk``: read in
        a thread, since a disk may be slow. Raises OSError if the file cannot be read to its end.
        """
        self._next += 1
        number, size = self._next, os.fstat(fd).st_size if size is None else size
        for offset in range(start, max(size, 1), part_bytes):
            n_bytes = min(part_bytes, size - offset)
            if from_disk:
                data = await asyncio.to_thread(os.pread, fd, n_bytes, offset)
            else:
                data = os.pread(fd, n_bytes, offset)
            if len(data) < n_bytes:
                raise OSError(errno.EIO, "the file became shorter while it was sent")
            await self.send(msg.FilePart(label, number, size, offset), memoryview(data))
            on_sent(offset + len(data), size)

    async def pass_on(self, label: msg.ClosureLabel, file: ArrivingFile, start: int) -> None:
        """Send a file from byte ``start`` on, each part as soon as it has arrived here."""
        self._next += 1
        number, offset = self._next, start
        while not file.has(offset):
            await file.changed()
        while offset < file.size:
            while file.arrived == offset:
                await file.changed()
            data = os.pread(file.fd, min(PART_BYTES, file.arrived - offset), offset)
            await self.send(msg.FilePart(label, number, file.size, offset), memoryview(data))
            offset += len(data)


class ArrivingFile:
    """A file of which parts arrive in their order, possibly from one sender after the other."""

    def __init__(self) -> None:
        self.fd = memory_file("arriving")
        self.arrived = 0
        """Bytes."""
        self.size = -1
        """Bytes of the whole file; -1 until its first part has arrived."""
        self._changed = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        return self.arrived == self.size

    def has(self, offset: int) -> bool:
        """Whether its size is known, and the bytes up to ``offset`` have arrived."""
        return self.size >= 0 and self.arrived >= offset

    async def changed(self) -> None:
        """Return after the next part has arrived."""
        await self._changed.wait()

    def take(self, part: msg.FilePart, data: memoryview) -> None:
        """Add a part; one that does not follow the last one is left out."""
        if part.offset != self.arrived:
            return
        self.size = part.size
        write_at(self.fd, part.offset, data)
        self.arrived += data.nbytes
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        os.close(self.fd)


class Incoming:
    """The receiver of one end: files, each until it is complete."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def take(self, part: msg.FilePart, data: memoryview) -> int | None:
        """Take a part; return the whole file's descriptor, the caller's to close, with the last one.

        Parts of one file come in order.
        """
        number, offset, size = part.file, part.offset, part.size
        if number not in self._files:
            if offset > 0:
                return None  # remaining parts of a file that was dropped
            self._files[number] = memory_file("parts")
        fd = self._files[number]
        write_at(fd, offset, data)
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
    try:
        with open(fd, "rb", closefd=False) as source, arriving.open("wb") as target:
            source.seek(0)
            shutil.copyfileobj(source, target)
        arriving.rename(path)
    except OSError:
        arriving.unlink(missing_ok=True)
        raise
