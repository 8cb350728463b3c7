"""A key-value server for the rendezvous by HTTP: only PUT, GET and DELETE of small values.

The first segment of every path is a secret: requests without it are rejected, and neither learn nor change
anything. The clients are Horovod's: a new connection for every request, no pipelining, always with
``Content-Length``. They ask for a missing key again every 10 ms. Here, a request for a missing key is kept
open until the key is set, or for :data:`_HOLD_S`, so that ranks continue as soon as the last one has
arrived, and a hundred waiting ones cost nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, Sequence

_HOLD_S = 0.25
"""How long a request for a missing key is kept open; clients check their own deadline in between."""
_SILENT_S = 10.0
"""A client sends its whole request within milliseconds of connecting."""
_MAX_HEAD = 4096
_MAX_VALUE = 1 << 20
"""1 MiB: a rank's addresses are about 150 bytes for each of its peers."""
_MAX_TOTAL = 64 << 20
_MAX_STRANGERS = 512
"""Connections that have not sent the secret yet. Beyond this number the oldest is closed: clients with the
secret send it at once, and others cannot block the server by waiting. Together with connections being
accepted, that stays below 1,024 descriptors, a common limit."""
_BACKLOG = 4096
"""Connections of other users wait in the same queue as those of ranks."""
_ACCEPTED_AT_ONCE = 128
_STATUS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 413: "Too Large"}


class KeyValueStore:
    """The known keys, and the requests that wait for missing ones."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._n_bytes = 0
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> bool:
        """Store ``value`` and notify waiting requests; False if there is no more space."""
        more = len(key) + len(value)
        if self._n_bytes + more > _MAX_TOTAL:
            return False
        self.delete(key)
        self._values[key] = value
        self._n_bytes += more
        for tell in self._waiting.pop(key, []):
            tell()
        return True

    def delete(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._n_bytes -= len(key) + len(value)

    def when_put(self, key: str, tell: Callable[[], None]) -> None:
        """Call ``tell`` once, when ``key`` is put."""
        self._waiting.setdefault(key, []).append(tell)

    def forget(self, key: str, tell: Callable[[], None]) -> None:
        """Do not call ``tell`` any more."""
        waiting = self._waiting.get(key, [])
        if tell in waiting:
            waiting.remove(tell)
        if not waiting:
            self._waiting.pop(key, None)


def serve_keys(listen_fd: int, token: str, hosts: Sequence[str] = ()) -> None:
    """Serve on the listening socket until this process is ended.

    ``token``: the secret first segment of every path. ``hosts``: addresses of machines that may connect;
    empty: any that reach the socket.
    """
    asyncio.run(_serve(socket.socket(fileno=listen_fd), token, frozenset(hosts)))


async def _serve(listening: socket.socket, token: str, hosts: frozenset[str]) -> None:
    keys, strangers = KeyValueStore(), dict[_Request, None]()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Request(keys, token, hosts, strangers), sock=listening, backlog=_ACCEPTED_AT_ONCE
    )
    listening.listen(_BACKLOG)
    await server.serve_forever()


class _Request(asyncio.Protocol):
    """One connection: one request, one answer. ``strangers``: :data:`_MAX_STRANGERS`, oldest first."""

    def __init__(
        self,
        keys: KeyValueStore,
        token: str,
        hosts: frozenset[str],
        strangers: dict[_Request, None],
    ) -> None:
        self._keys = keys
        self._token = token
        self._hosts = hosts
        self._strangers = strangers
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._wanted: str | None = None
        """The key that it waits for."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if self._hosts and peer[0] not in self._hosts:
            transport.abort()
            return
        self._join_strangers()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_SILENT_S, transport.abort)

    def _join_strangers(self) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest._transport.abort()
        self._strangers[self] = None

    def data_received(self, data: bytes) -> None:
        if self._wanted is not None or self._transport.is_closing():
            return  # its request is complete
        self._received += data
        head, found, body = bytes(self._received).partition(b"\r\n\r\n")
        if len(head) > _MAX_HEAD:
            self._answer(413)
        elif found:
            self._on_head(head, body)

    def _on_head(self, head: bytes, body: bytes) -> None:
        try:
            verb, path, length = _parsed(head)
        except ValueError:
            self._answer(400)
            return
        token, _, key = path.removeprefix("/").partition("/")
        # In constant time; and clients without the secret must not occupy a megabyte.
        if not hmac.compare_digest(token.encode(), self._token.encode()) or not key:
            self._answer(403)
            return
        self._strangers.pop(self, None)
        if length > _MAX_VALUE:
            self._answer(413)
        elif len(body) >= length:
            self._respond(verb, key, body[:length])

    def _respond(self, verb: str, key: str, body: bytes) -> None:
        if verb == "PUT":
            self._answer(200 if self._keys.put(key, body) else 413)
        elif verb == "DELETE":
            self._keys.delete(key)
            self._answer(200)
        elif verb != "GET":
            self._answer(400)
        elif (value := self._keys.get(key)) is not None:
            self._answer(200, value)
        elif key.rpartition("/")[2].isdigit():
            self._hold(key)  # a rank's address, which its peers need
        else:
            self._answer(404)

    def _hold(self, key: str) -> None:
        self._stop_timer()
        self._wanted = key
        self._keys.when_put(key, self._on_put)
        self._timer = asyncio.get_running_loop().call_later(_HOLD_S, self._answer, 404)

    def _on_put(self) -> None:
        assert self._wanted is not None
        self._answer(200, self._keys.get(self._wanted) or b"")

    def _answer(self, status: int, value: bytes = b"") -> None:
        head = f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Length: {len(value)}\r\n"
        self._transport.write(f"{head}Connection: close\r\n\r\n".encode() + value)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._strangers.pop(self, None)
        if self._wanted is not None:
            self._keys.forget(self._wanted, self._on_put)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _parsed(head: bytes) -> tuple[str, str, int]:
    """Return verb, path and body length in bytes of a request's head; ValueError for malformed ones."""
    first, *lines = head.decode("ascii").split("\r\n")
    verb, path, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    named = dict(line.lower().split(": ", 1) for line in lines)
    length = int(named.get("content-length", "0"))
    if length < 0:
        raise ValueError(length)
    return verb, path, length
