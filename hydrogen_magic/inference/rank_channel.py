"""The kernel's end of one rank's channel: a socket for words, two memory files each way for tables."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.inference.chunk_queue import Chunk
from hydrogen_magic.node.prediction.shared_buffers import SlotReader, SlotWriter
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport import framing

__all__ = ["Channel"]


@dataclass(eq=False)
class Channel:
    """One rank's; what it has in hand, and since when."""

    rank: int
    sock: socket.socket
    heard: framing.FrameReader
    chunks: SlotWriter = field(default_factory=SlotWriter)
    outputs: SlotReader = field(default_factory=SlotReader)
    in_hand: deque[Chunk] = field(default_factory=deque)
    """What the rank has to answer, in this order."""
    rows: int = 0
    """Done so far."""
    since_s: float = field(default_factory=time.monotonic)
    """When it began with what is first in hand, by the monotonic clock; its set-up before."""
    is_ready: bool = False
    """Its set-up is done, and it has not gone."""
    is_there: bool = True
    """It has not left, nor been ended."""
    is_told_late: bool = False
    """Somebody has been told that it hangs."""
    knows_columns: bool = False

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a few bytes: they fit into the socket, since little is ever on its way."""
        try:
            framing.send(self.sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self.is_ready = False  # it has gone; its end is reported by its agent

    def tell_columns(self, schema: Any) -> None:
        """Tell which columns are predicted: thousands are more than fits into the socket."""
        fd = memory_file("columns")
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(schema.serialize())
            self.tell({"do": "adopt"}, [fd])
        finally:
            os.close(fd)

    def hand_out(self, chunk: Chunk) -> None:
        place, fds = self.chunks.write(chunk.table)
        self.since_s = self.since_s if self.in_hand else time.monotonic()
        self.in_hand.append(chunk)
        with ExitStack() as stack:
            for fd in fds:
                stack.callback(os.close, fd)
            self.tell(
                {"do": "predict", "chunk": chunk.number, "row": chunk.first_row, **place}, fds
            )

    def shut(self) -> None:
        """Let the rank see that nothing more comes."""
        with suppress(OSError):  # it has gone
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.chunks.close()
        self.outputs.close()
        self.heard.close()
        self.sock.close()
