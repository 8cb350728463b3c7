"""What ranks run that listen on ports of their own."""

from __future__ import annotations

import os
import socket

PORT = "MY_PORT"
"""Variable with the rank's port."""


def listen() -> tuple[int, bool]:
    """Serve on this rank's port; return that, and whether it is held from sockets that do not share it."""
    port = int(os.environ[PORT])
    with socket.socket() as other, socket.socket() as mine:
        is_held = other.connect_ex(("127.0.0.1", port)) != 0 and not _can_bind(port)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for connections in TIME_WAIT
        mine.bind(("", port))
        mine.listen()
        for _ in range(8):  # all of them come here
            with socket.create_connection(("127.0.0.1", port)), mine.accept()[0]:
                pass
    return port, is_held


def _can_bind(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
