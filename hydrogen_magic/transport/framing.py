"""Length-prefixed JSON over a Unix stream socket, with file descriptors as ancillary data.

The format of messages between kernel and agent (those that must not go over the network), agent and
forkserver, and agent and worker. Each message has the number of its descriptors, so that they stay
in order.
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydrogen_magic.core import messages as msg

_HEADER = struct.Struct("!IB")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group (unix(7), ``SO_PEERCRED``)."""
MAX_FDS = 250
"""Linux passes at most 253 descriptors with one message (``SCM_MAX_FD``)."""
_CHUNK = 1 << 16
"""Python allocates so much for each read; malloc would map and unmap a larger one."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a blocking connection, one of them for another process.

    With ``socket.setdefaulttimeout``, which notebooks and libraries call, a new socket is non-blocking. That
    is a property of the open file, so that the other process would have it, too.
    """
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(True)
    return ours, theirs


def inherited(fd: int) -> socket.socket:
    """Return a blocking socket for the descriptor ``fd``, which it takes over; see :func:`pair`."""
    sock = socket.socket(fileno=fd)
    sock.setblocking(True)
    return sock


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    size = _CREDENTIALS.size
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.geteuid())


def send(
    sock: socket.socket, message: msg.Message | Mapping[str, Any], fds: Sequence[int] = ()
) -> None:
    """Send ``message`` and duplicates of ``fds``; blocks while the socket is full."""
    content = msg.encode(message) if isinstance(message, msg.Message) else message
    body = json.dumps(content, separators=(",", ":")).encode()
    data = memoryview(_HEADER.pack(len(body), len(fds)) + body)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], ancillary)
    sock.sendall(data[sent:])


class FrameReader:
    """Collects the data that arrives on ``sock`` and splits it into messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, flags: int = 0) -> bool:
        """Read once; return False at the end of the stream. Raises BlockingIOError if there is no
        data.

        Raises OSError when this process cannot open the descriptors that arrive: they are lost, and the
        stream is of no use any more.
        ``flags``: of ``recvmsg``; with ``MSG_DONTWAIT`` a blocking socket does not wait either.
        """
        space = socket.CMSG_SPACE(MAX_FDS * 4)
        try:
            data, ancillary, outcome, _ = self._sock.recvmsg(_CHUNK, space, flags)
        except ConnectionResetError:
            return False
        is_cut = bool(outcome & socket.MSG_CTRUNC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                for fd in received:
                    os.set_inheritable(fd, False)
                    self._fds.append(fd)
        if is_cut:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self._buffer += data
        return bool(data)

    def messages(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield the complete messages, to be decoded, with their descriptors, the caller's to close."""
        while len(self._buffer) >= _HEADER.size:
            length, n_fds = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield json.loads(body), [self._fds.popleft() for _ in range(n_fds)]

    def close(self) -> None:
        """Close descriptors that have not been taken."""
        while self._fds:
            os.close(self._fds.popleft())


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def receive(reader: FrameReader) -> tuple[Any, list[int]] | None:
    """Return the next message of a blocking socket, None at the end of the stream."""
    while True:
        for message in reader.messages():
            return message
        if not reader.feed():
            return None
