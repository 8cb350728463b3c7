"""The Unix socket on which an owner listens; only processes of the same user reach it."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydrogen_magic.core.run_log import OWNER_SOCKET


def listen(folder: Path) -> socket.socket:
    """Return a socket that listens in ``folder``, a directory that only its user can enter.

    Raises OSError, for example on a file system without sockets.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _address(folder) as address:
            listener.bind(address)
        os.chmod(folder / OWNER_SOCKET, 0o600)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connect(folder: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the owner of a gang. Raises OSError if none listens."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        with _address(folder) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


@contextmanager
def interrupted_at_hang_up(connection: socket.socket) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block, in the main thread, if the other end closes the connection."""
    is_over, over = os.pipe()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.register(is_over, select.POLLHUP)

    def watch() -> None:
        if connection.fileno() in dict(poll.poll()):
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch, daemon=True)
    try:
        watcher.start()
        yield
    finally:
        os.close(over)
        watcher.join()
        os.close(is_over)
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Yield the socket's address: the path itself may exceed the 107 bytes that the system accepts."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{OWNER_SOCKET}"
    finally:
        os.close(fd)
