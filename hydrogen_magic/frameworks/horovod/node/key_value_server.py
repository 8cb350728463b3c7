"""A key-value server for the rendezvous by HTTP: only PUT, GET and DELETE of small values.

The first segment of every path is a secret: requests without it are rejected, and neither learn nor change
anything. The clients are Horovod's: a new connection for every request, no pipelining, always with
``Content-Length``. They ask for a missing key again every 10 ms. Here, a request for a missing key is kept
open until the key is set, or for :data:`_HOLD_S`, so that ranks continue as soon as the last one has
arrived. A waiting request costs a thread.
"""

from __future__ import annotations

import hmac
import socket
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOLD_S = 0.25
"""How long a request for a missing key is kept open; clients check their own deadline in between."""
_SILENT_S = 10.0
"""A client sends its whole request within milliseconds of connecting."""
_MAX_VALUE = 1 << 20
"""1 MiB: a rank's addresses are about 150 bytes for each of its peers."""
_MOST_STRANGERS = 512
"""Connections that may be open without having shown the secret: then the oldest one is closed."""
_BACKLOG = 4096
"""Connections of other users wait in the same queue as those of ranks."""


def serve_keys(listen_fd: int, token: str, hosts: Sequence[str] = ()) -> None:
    """Serve on the listening socket until this process is ended.

    ``token``: the secret first segment of every path. ``hosts``: addresses of machines that may connect;
    empty: any that reach the socket.
    """
    _Server(socket.socket(fileno=listen_fd), token, frozenset(hosts)).serve_forever()


class _Server(ThreadingHTTPServer):
    """The known keys. Each connection has a thread of its own."""

    request_queue_size = _BACKLOG

    def __init__(self, listening: socket.socket, token: str, hosts: frozenset[str]) -> None:
        super().__init__(listening.getsockname(), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_activate()
        self.token = token
        self.values: dict[str, bytes] = {}
        self.arrivals: dict[str, threading.Event] = {}
        """For each key, what is set when it is put."""
        self.strangers = OrderedDict[socket.socket, None]()
        """Connections that have not shown the secret, oldest first."""
        self._hosts = hosts

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return not self._hosts or client_address[0] in self._hosts

    def process_request(self, request: Any, client_address: Any) -> None:
        self.strangers[request] = None
        if len(self.strangers) > _MOST_STRANGERS:
            with suppress(OSError):  # closed meanwhile
                self.strangers.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.strangers.pop(request, None)
        super().shutdown_request(request)


class _Request(BaseHTTPRequestHandler):
    """One connection: one request, one answer."""

    server: _Server
    timeout = _SILENT_S

    def do_PUT(self) -> None:
        key, length = self._key(), int(self.headers.get("Content-Length", "0"))
        if not key:
            self._answer(403)
        elif not 0 <= length <= _MAX_VALUE:
            self._answer(413)
        elif len(value := self.rfile.read(length)) == length:  # else its rank was killed meanwhile
            self.server.values[key] = value
            self._arrival(key).set()
            self._answer(200)

    def do_GET(self) -> None:
        key, values = self._key(), self.server.values
        if not key:
            self._answer(403)
            return
        if key not in values and key.rpartition("/")[2].isdigit():
            self._arrival(key).wait(_HOLD_S)  # a rank's address, which its peers need
        value = values.get(key)
        if value is None:
            self._answer(404)
        else:
            self._answer(200, value)

    def do_DELETE(self) -> None:
        key = self._key()
        if not key:
            self._answer(403)
            return
        self.server.values.pop(key, None)
        self.server.arrivals.pop(key, None)
        self._answer(200)

    def _key(self) -> str:
        """Return the key; empty if there is none, or if the client does not know the secret."""
        token, _, key = self.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return ""
        self.server.strangers.pop(self.connection, None)
        return key

    def _arrival(self, key: str) -> threading.Event:
        return self.server.arrivals.setdefault(key, threading.Event())

    def _answer(self, status: int, value: bytes = b"") -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)
