"""Transfer of files in parts: closures to and between agents, rows of ``%%infer``, results and logs.

Every part is acknowledged, and the unacknowledged bytes are limited: ZeroMQ would silently queue a
gigabyte, and need twice its memory. The limit follows the link, since everything else that is sent there,
such as a Stop, waits behind these bytes.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.serialization.payload import memory_file, write_at

PART_BYTES = 1 << 20
"""ZeroMQ closes a connection that transfers no whole message within 40 s: a link needs 26 kB/s."""
FIRST_WINDOW_BYTES = 2 << 20
MAX_WINDOW_BYTES = 32 << 20
"""Saturates a gigabit line with a round trip of a quarter of a second."""
_FIRST_PART_BYTES = 1 << 16
"""The first part is small: the time until its acknowledgement is the round trip of an empty link."""
_LATE_S = 1.0
"""A part that takes longer than the quickest one by this time has waited for others on a slow link."""


Part = msg.FilePart | msg.RecordPart


class Outgoing:
    """The sender of one end. ``send``: sends a message with bytes."""

    def __init__(self, send: Callable[[Part, memoryview], None]) -> None:
        self._send = send
        self._window_bytes = FIRST_WINDOW_BYTES
        self._unacknowledged: deque[tuple[float, int]] = deque()
        """When each part was sent, and its bytes."""
        self._unacknowledged_bytes = 0
        self._part_bytes = _FIRST_PART_BYTES
        """Of the next part of a file."""
        self._least_s = math.inf
        """How long the quickest part took."""
        self._turn = asyncio.Lock()
        """Held by the sender that waits for room, if there is one."""
        self._has_room = asyncio.Event()
        self._next = 0
        self.acknowledged_s = time.monotonic()
        """When the receiver has acknowledged the last part."""

    def acknowledged(self) -> None:
        """The receiver has acknowledged the next part."""
        self.acknowledged_s = time.monotonic()
        sent_s, n_bytes = self._unacknowledged.popleft()
        self._unacknowledged_bytes -= n_bytes
        took_s = self.acknowledged_s - sent_s
        self._least_s = min(self._least_s, took_s)
        if took_s - self._least_s > _LATE_S:
            self._window_bytes = max(self._window_bytes - n_bytes, PART_BYTES)
        elif took_s - self._least_s < _LATE_S / 2 and self._turn.locked():
            self._window_bytes = min(self._window_bytes + n_bytes, MAX_WINDOW_BYTES)
        self._has_room.set()

    async def send(self, part: Part, data: memoryview) -> None:
        """Send one part as soon as there is room for it."""
        async with self._turn:
            while self._unacknowledged_bytes + data.nbytes > self._window_bytes:
                self._has_room.clear()
                await self._has_room.wait()
            self._send(part, data)
            self._unacknowledged.append((time.monotonic(), data.nbytes))
            self._unacknowledged_bytes += data.nbytes
            self._part_bytes = PART_BYTES

    async def send_file(
        self,
        label: msg.FileLabel,
        fd: int,
        on_sent: Callable[[int, int], None] = lambda sent, size: None,
        start: int = 0,
        size: int | None = None,
        from_disk: bool = False,
    ) -> None:
        """Send the contents of file ``fd`` from byte ``start`` on; it may be closed after this returns.

        ``on_sent``: called after every part with the bytes sent so far and the size of the file. ``size``:
        bytes of the file, None for all. ``from_disk``: read in a thread, since a disk may be slow. Raises
        OSError if the file cannot be read to its end.
        """
        self._next += 1
        number, size = self._next, os.fstat(fd).st_size if size is None else size
        offset, is_empty = start, size == 0
        while offset < size or is_empty:
            n_bytes = min(self._part_bytes, size - offset)
            if from_disk:
                data = await asyncio.to_thread(os.pread, fd, n_bytes, offset)
            else:
                data = os.pread(fd, n_bytes, offset)
            if len(data) < n_bytes:
                raise OSError(errno.EIO, "the file became shorter while it was sent")
            await self.send(msg.FilePart(label, number, size, offset), memoryview(data))
            offset, is_empty = offset + n_bytes, False
            on_sent(offset, size)

    async def pass_on(self, label: msg.ClosureLabel, file: ArrivingFile, start: int) -> None:
        """Send a file from byte ``start`` on, each part as soon as it has arrived here."""
        self._next += 1
        number, offset = self._next, start
        while not file.has(offset):
            await file.changed()
        while offset < file.size:
            while file.arrived == offset:
                await file.changed()
            data = os.pread(file.fd, min(self._part_bytes, file.arrived - offset), offset)
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
        self._files: dict[int, ArrivingFile] = {}

    def take(self, part: msg.FilePart, data: memoryview) -> int | None:
        """Take a part; return the whole file's descriptor, the caller's to close, with the last one.

        Parts of one file come in order.
        """
        if part.file not in self._files:
            if part.offset > 0:
                return None  # remaining parts of a file that was dropped
            self._files[part.file] = ArrivingFile()
        file = self._files[part.file]
        file.take(part, data)
        return self._files.pop(part.file).fd if file.is_complete else None

    def drop(self) -> None:
        """Drop an incomplete file, and its remaining parts."""
        while self._files:
            self._files.popitem()[1].close()


def write_part(part: msg.FilePart, data: memoryview, path: Path) -> bool:
    """Write a part of a file that replaces ``path`` when it is complete; return whether it is.

    Parts of one file come in order. Until the last one, the file is ``.NAME.arriving``. An error, which is
    raised as OSError, deletes it, and its remaining parts are left out.
    """
    arriving = path.with_name(f".{path.name}{run_log.ARRIVING}")
    if part.offset > 0 and not arriving.exists():
        return False
    is_complete = part.offset + data.nbytes == part.size
    try:
        with arriving.open("r+b" if part.offset > 0 else "wb") as file:
            file.seek(part.offset)
            file.write(data)
        if is_complete:
            arriving.rename(path)
    except OSError:
        with suppress(OSError):
            arriving.unlink()
        raise
    return is_complete
