"""Protects a server without authentication from other users of this machine.

Loopback is open to every local user, and torch's ``TCPStore`` trusts every client. So the real
server listens in its own network namespace, which other users cannot reach, and this process is a
proxy for it: it accepts connections on the socket that was bound outside, looks up their user
(``/proc/net/tcp`` has the user of every socket), and forwards the connections of its own user. Of
connections from other machines it forwards those from the addresses of the gang's hosts: their
process cannot be determined here, and torch's protocol has no authentication.

If the system allows no namespaces (some containers), the server is as open as its protocol.
A server that can listen on a Unix socket needs none: the mode of the socket's directory protects it.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import functools
import os
import select
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import IO, Any

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41
_ESTABLISHED = "01"
_ACCEPTED_AT_ONCE = 256
"""Below a common limit of descriptors."""
_RETRY_S = 0.1
"""When to accept again after the system had no descriptor left."""
_BOUND_S = 0.02
"""How soon a socket is noticed that a rank has bound."""
_RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER``: closing the socket resets the connection, and the system keeps no state of it."""


def serve_guarded(
    listen_fd: int, start: Callable[[int], object], hosts: Sequence[str] = ()
) -> None:
    """Serve until this process is ended; ``start`` runs the real server on a listening descriptor.

    ``start`` is called for the first client, and its return value is kept alive. ``hosts``:
    addresses of other machines that are accepted too.
    """
    tables = _connection_tables()
    own_uid = os.getuid()
    listening = socket.socket(fileno=listen_fd)
    if _enter_private_network():
        server = _InnerServer(start, listening.getsockname()[1])
        asyncio.run(_Guard(listening, server.connect, tables, own_uid, hosts).serve())
    else:
        _serve_openly(listening, start)


def forward_guarded(listen_fd: int, path: str, hosts: Sequence[str] = ()) -> None:
    """Forward connections to the Unix socket ``path``, which may be bound later.

    Returns when this process is ended. ``hosts``: addresses of other machines that are accepted too.
    """
    listening = socket.socket(fileno=listen_fd)
    connect = functools.partial(_connect_when_bound, path)
    guard = _Guard(listening, connect, _connection_tables(), os.getuid(), hosts)
    asyncio.run(guard.serve())


class _InnerServer:
    """The real server in the private network; started for the first client, and kept alive."""

    def __init__(self, start: Callable[[int], object], port: int) -> None:
        self._start = start
        self._address = ("127.0.0.1", port)
        self._server: object = None

    async def connect(self) -> _Connected:
        if self._server is None:
            listening = socket.create_server(self._address, backlog=512)
            self._server = self._start(listening.detach())
        return await asyncio.get_running_loop().create_connection(_End, *self._address)


async def _connect_when_bound(path: str) -> _Connected:
    """Connect to a socket in a directory of this user: another one may have made a directory of its name."""
    while True:
        try:
            if os.lstat(os.path.dirname(path)).st_uid == os.getuid():
                return await asyncio.get_running_loop().create_unix_connection(_End, path)
        except (FileNotFoundError, ConnectionRefusedError):
            pass  # it is not bound yet
        await asyncio.sleep(_BOUND_S)


def _serve_openly(listening: socket.socket, start: Callable[[int], object]) -> None:
    select.select([listening], [], [])  # until the first client
    server = start(listening.detach())
    threading.Event().wait()
    del server


class _Guard:
    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], Awaitable[_Connected]],
        tables: list[IO[str]],
        own_uid: int,
        hosts: Sequence[str],
    ) -> None:
        self._listening = listening
        self._connect = connect
        self._tables = tables
        self._own_uid = own_uid
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._others = set(hosts) - {self.address[0]}
        self._admitting: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None

    async def serve(self) -> None:
        """Serve until this process is ended. Raises what the real server raises when it starts."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        loop.add_reader(self._listening, self._accept)
        self._failed = loop.create_future()
        await self._failed

    def _accept(self) -> None:
        """Accept waiting connections, and reject those of other users.

        The tables are read once for all connections: hundreds of them would otherwise cost seconds.
        """
        clients = self._accepted()
        own = self._own_clients()
        for sock, peer in clients:
            if peer[0] in self._others or _hexadecimal(*peer[:2]) in own:
                self._begin_to_admit(sock)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.close()

    def _accepted(self) -> list[tuple[socket.socket, Any]]:
        clients: list[tuple[socket.socket, Any]] = []
        try:
            while len(clients) < _ACCEPTED_AT_ONCE:
                clients.append(self._listening.accept())
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError:  # no descriptor is left: accepted connections are closed or served first
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listening)
            loop.call_later(_RETRY_S, loop.add_reader, self._listening, self._accept)
        return clients

    def _begin_to_admit(self, sock: socket.socket) -> None:
        admitting = asyncio.get_running_loop().create_task(self._admit(sock))
        self._admitting.add(admitting)
        admitting.add_done_callback(self._admitted)

    async def _admit(self, sock: socket.socket) -> None:
        """Connect a client to the real server."""
        try:
            _, inner = await self._connect()
        except OSError:  # no descriptor is left: the client finds its connection closed
            sock.close()
            return
        outer = _End()
        outer.other, inner.other = inner, outer
        await asyncio.get_running_loop().connect_accepted_socket(lambda: outer, sock)
        for end in (inner, outer):
            end.transport.resume_reading()

    def _admitted(self, admitting: asyncio.Task[None]) -> None:
        self._admitting.discard(admitting)
        error = None if admitting.cancelled() else admitting.exception()
        if error is not None and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _own_clients(self) -> set[str]:
        """Return the clients' addresses of connections to us that belong to open sockets of this user.

        A socket whose process closed it is listed with inode 0 and user 0, which is not reliable.
        """
        own: set[str] = set()
        server_end = _hexadecimal(*self.address)
        length = len(server_end)  # /proc/net/tcp6 has IPv4 addresses too, behind a prefix
        for table in self._tables:
            table.seek(0)
            for line in table:
                if server_end not in line:
                    continue
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                is_living = state == _ESTABLISHED and inode != "0"
                if is_living and remote[-length:] == server_end and int(uid) == self._own_uid:
                    own.add(local[-length:])
        return own


class _End(asyncio.Protocol):
    """One end of a forwarded connection: data it receives is sent by the other end.

    It does not read until both ends are connected.
    """

    def __init__(self) -> None:
        self.transport: Any = None
        self.other: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        if self.other.transport.can_write_eof():
            self.other.transport.write_eof()
        return True  # the other direction may continue

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


_Connected = tuple[asyncio.Transport, _End]


def _hexadecimal(address: str, port: int) -> str:
    """Return an address in the form of ``/proc/net/tcp`` and ``tcp6``: words in the machine's byte order."""
    address, _, _ = address.partition("%")  # without the zone of a link-local address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _connection_tables() -> list[IO[str]]:
    """Open the tables of the current network: they remain those of this network."""
    names = ("/proc/net/tcp", "/proc/net/tcp6")
    return [open(name) for name in names if os.path.exists(name)]


def _enter_private_network() -> bool:
    """Move this process to its own network with only loopback; False if that is not allowed.

    Open sockets stay in the network in which they were made.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0 and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING))
    return True
