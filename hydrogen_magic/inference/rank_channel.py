"""The kernel's end of one rank's channel: a socket for messages, two shared buffers each way for tables."""

from __future__ import annotations

import io
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.inference.chunk_queue import Chunk, RowLimit
from hydrogen_magic.node.prediction.shared_buffers import BufferReader, BufferWriter
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.transport import framing


@dataclass(eq=False)
class RankChannel:
    """The channel of one rank, and the chunks that the rank has."""

    rank: int
    sock: socket.socket
    reader: framing.FrameReader
    limit: RowLimit
    chunks: BufferWriter = field(default_factory=BufferWriter)
    outputs: BufferReader = field(default_factory=BufferReader)
    in_flight: deque[Chunk] = field(default_factory=deque)
    """Chunks that the rank has not answered, in order."""
    rows: int = 0
    """Rows done."""
    since_s: float = field(default_factory=time.monotonic)
    """When it began with the first chunk in flight, or its set-up before; by the monotonic clock."""
    is_ready: bool = False
    """It has been set up, and has not left."""
    is_connected: bool = True
    """It has neither left nor been cancelled."""
    is_reported_late: bool = False
    """The user has been warned that it hangs."""
    known_columns: Any = None
    """The predicted columns that it was sent, with their types."""
    knows_layout: bool = False
    """It has the layout of rows in blocks."""

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a short message; the socket always has room for it."""
        try:
            framing.send(self.sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self.is_ready = False  # the agent reports how it ended

    def send_columns(self, schema: Any) -> None:
        """Send the predicted columns."""
        self._send_file("adopt", schema.serialize())

    def _send_file(self, do: str, content: Any) -> None:
        """Send a message with a file: thousands of columns do not fit into the socket."""
        fd = memory_file(do)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(content)
            self.send({"do": do}, [fd])
        finally:
            os.close(fd)

    def send_chunk(self, chunk: Chunk) -> None:
        layout = getattr(chunk.table, "layout", None)
        if layout is not None and not self.knows_layout:
            self.knows_layout = True
            content = io.BytesIO()
            Pickler(content, protocol=5).dump(layout)  # ``attrs`` may have values of the notebook
            self._send_file("lay out", content.getbuffer())
        place, fds = self.chunks.write(chunk.table)
        self.since_s = self.since_s if self.in_flight else time.monotonic()
        self.in_flight.append(chunk)
        message = {"do": "predict", "chunk": chunk.number, "row": chunk.first_row}
        try:
            self.send({**message, **place}, fds)
        finally:
            framing.close_all(fds)

    def shut_down(self) -> None:
        """Let the rank see that there are no more messages."""
        with suppress(OSError):  # it has left
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for part in (self.chunks, self.outputs, self.reader, self.sock):
            part.close()
