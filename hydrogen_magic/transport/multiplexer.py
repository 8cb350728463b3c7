"""Multiplexes many TCP connections into one stream of frames, on both sides of the relay.

The contents are opaque to it. A connection with a stalled reader does not delay the others, and the
amount of buffered data is bounded. Standard library only: the source of this file is sent.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_FRAME = struct.Struct("!IBI")
"""Connection, kind, and a number of bytes: the length of ``_DATA``, or the room that ``_ROOM`` grants."""
_OPEN, _DATA, _END, _GONE, _ROOM = range(1, 6)
"""Connection opened; its data; end of its data; connection broken; room for more bytes."""
_WINDOW_BYTES = 4 << 20
"""Bytes on their way, for one connection and direction."""
_PIECE_BYTES = 1 << 18
_OUTBOX_BYTES = 16 << 20
"""Bytes of all connections that wait to be fetched; above it, no connection is read."""
_FLUSH_S = 5.0
"""Time to pass on the data that preceded the break of a connection."""
MOST_BYTES = 4 << 20
"""Bytes of frames taken at once: 0.2 s through Spark Connect, far below its limit of 128 MiB."""


class Pump:
    """The TCP connections of this side; their data is taken out as frames, and frames are fed in.

    ``connect`` is called for a connection to the other side. Use it on one event loop.
    """

    def __init__(self, connect: Callable[[], Awaitable[Streams]] | None = None) -> None:
        self.ready = asyncio.Event()
        """Set while there are frames to take."""
        self.room = asyncio.Event()
        """Set while more data may be read."""
        self.room.set()
        self.lines: dict[int, _Connection] = {}
        self._connect = connect
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0

    def add(self, number: int, opening: Awaitable[Streams]) -> None:
        """Add a connection to this side, and open its counterpart on the other side."""
        self.put(number, _OPEN)
        self.lines[number] = _Connection(self, number, opening)

    def put(self, number: int, kind: int, body: bytes = b"", n_bytes: int = 0) -> None:
        """Queue a frame to be taken."""
        frame = _FRAME.pack(number, kind, len(body) or n_bytes) + body
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        self._tell()

    def take(self) -> bytes:
        """Return frames of about :data:`MOST_BYTES`, each only once."""
        taken, room_bytes = [], MOST_BYTES
        while self._outbox and room_bytes > 0:
            taken.append(self._outbox.popleft())
            room_bytes -= len(taken[-1])
        data = b"".join(taken)
        self._outbox_bytes -= len(data)
        self._tell()
        return data

    def _tell(self) -> None:
        _set(self.ready, bool(self._outbox))
        _set(self.room, self._outbox_bytes < _OUTBOX_BYTES)

    def feed(self, data: bytes) -> bool:
        """Process frames of the other side; True if they were more than grants of room."""
        kinds = set()
        at = 0
        while at < len(data):
            number, kind, size = _FRAME.unpack_from(data, at)
            at += _FRAME.size
            kinds.add(kind)
            if kind == _OPEN and self._connect is not None:
                self.lines[number] = _Connection(self, number, self._connect())
            elif number in self.lines:
                self.lines[number].take(kind, data[at : at + size] if kind == _DATA else b"", size)
            at += size if kind == _DATA else 0
        return bool(kinds - {_ROOM})

    async def close(self) -> None:
        """Break all connections."""
        await cancelled([line.task for line in self.lines.values()])


class _Connection:
    """One connection of a multiplexer."""

    def __init__(self, pump: Pump, number: int, opening: Awaitable[Streams]) -> None:
        self._pump = pump
        self._number = number
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        """Limited by the window; an empty one marks the end."""
        self._window = _WINDOW_BYTES
        self._has_window = asyncio.Event()
        self._has_window.set()
        self._is_gone = False
        self._halves: list[asyncio.Future[None]] = []
        self.task = asyncio.ensure_future(self._run(opening))

    def take(self, kind: int, body: bytes, size: int) -> None:
        """Process a frame of the other side."""
        if kind == _DATA:
            self._inbox.put_nowait(body)
        elif kind == _ROOM:
            self._window += size
            self._has_window.set()
        else:
            self._inbox.put_nowait(b"")
            self._is_gone = self._is_gone or kind == _GONE
            if self._is_gone:
                self._leave()

    def _leave(self) -> None:
        """Stop reading; earlier data may still be written, if the reader takes it soon."""
        for half in self._halves[:1]:
            half.cancel()
        asyncio.get_running_loop().call_later(_FLUSH_S, self.task.cancel)

    async def _run(self, opening: Awaitable[Streams]) -> None:
        try:
            reader, writer = await opening
            self._halves = [
                asyncio.ensure_future(h) for h in (self._read(reader), self._write(writer))
            ]
            await self._both(writer)
        except OSError:
            if not self._is_gone:
                self._pump.put(self._number, _GONE)
        finally:
            del self._pump.lines[self._number]

    async def _both(self, writer: asyncio.StreamWriter) -> None:
        if self._is_gone:  # while it was being opened
            self._halves[0].cancel()
        try:
            done, _ = await asyncio.wait(self._halves, return_when=asyncio.FIRST_EXCEPTION)
            for half in done:
                if not half.cancelled():
                    half.result()
            writer.close()  # after the data that is still to be sent
        except BaseException:
            writer.transport.abort()
            raise
        finally:
            await cancelled(self._halves)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            await self._pump.room.wait()
            await self._has_window.wait()
            data = await reader.read(min(self._window, _PIECE_BYTES))
            if not data:
                break
            self._window -= len(data)
            _set(self._has_window, self._window > 0)
            self._pump.put(self._number, _DATA, data)
        self._pump.put(self._number, _END)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        owed_bytes = 0
        while data := await self._inbox.get():
            writer.write(data)
            await writer.drain()
            owed_bytes += len(data)
            if owed_bytes >= _WINDOW_BYTES // 4:  # rarely: each grant is a separate request
                self._pump.put(self._number, _ROOM, n_bytes=owed_bytes)
                owed_bytes = 0
        writer.write_eof()


def _set(event: asyncio.Event, is_set: bool) -> None:
    event.set() if is_set else event.clear()


async def cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks`` and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
