"""The relay's process on the driver's host, which owns the port that executors connect to.

It exits when the kernel asks for it, after :data:`_SILENCE_S` without a request of the kernel, or
with the driver's JVM. Its connections then break, and their agents notice it. It creates no files.
Standard library only: the source of this file is sent, with those that it imports.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import time
from collections.abc import Awaitable
from contextlib import suppress

from hydrogen_magic.node.spark.relay_endpoint import (
    ALIVE,
    LONGEST_WAIT_S,
    PULL,
    PUSH,
    REQUEST,
    START,
    STOP,
    check_user,
)
from hydrogen_magic.transport.multiplexer import Pump, cancelled

_CALM_S = 0.1
"""Interval between replies while all data goes one way: each costs Spark some 30 ms of work."""
_LIVELY_S = 0.5
"""After the kernel sent data, replies are not delayed: it may wait for an answer."""
_SILENCE_S = 30.0
_MOST_CONNECTIONS = 1024


def run(port: int, requests: int, jvm: int) -> None:
    """Run the daemon without a parent: the process of Spark that started it continues to its own end.

    ``port``, ``requests``: listening descriptors; ``jvm``: the driver's process, 0 if unknown.
    """
    if os.fork():
        os._exit(0)
    listeners = (socket.socket(fileno=fd) for fd in (port, requests))
    asyncio.run(_Daemon(*listeners).serve(jvm))


class _Daemon:
    """Owns the port that executors connect to; answers requests on a Unix socket."""

    def __init__(self, port: socket.socket, requests: socket.socket) -> None:
        self._port = port
        self._requests = requests
        self._pump = Pump()
        self._ending = asyncio.Event()
        self._one_pull = asyncio.Lock()
        self._pulled = (0, b"")
        """Number and reply of the last pull: a repeated request gets the same reply."""
        self._pushed = 0
        self._heard_s = self._lively_s = self._replied_s = time.monotonic()

    async def serve(self, jvm: int) -> None:
        """Serve until the kernel or the driver has exited; ``jvm``: the driver's process, 0 if unknown."""
        loop = asyncio.get_running_loop()
        # If the system lacks this call, the kernel's silence is the only criterion.
        with suppress(OSError, AttributeError):
            loop.add_reader(os.pidfd_open(jvm), self._ending.set)
        server = await asyncio.start_unix_server(self._request, sock=self._requests)
        accepting = asyncio.ensure_future(self._accept())
        while not self._ending.is_set() and self._silent_s() < _SILENCE_S:
            await _within(_SILENCE_S - self._silent_s(), self._ending.wait())
        server.close()
        await cancelled([accepting])
        await self._pump.close()

    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            while len(self._pump.lines) >= _MOST_CONNECTIONS:
                await asyncio.sleep(0.1)  # the system queues waiting connections
            try:
                sock, _ = await loop.sock_accept(self._port)
            except OSError:  # no descriptor left, or a client that did not wait
                await asyncio.sleep(0.1)
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._pump.add(number, asyncio.open_connection(sock=sock))

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            check_user(writer.get_extra_info("socket"))
            action, number, size = REQUEST.unpack(await reader.readexactly(REQUEST.size))
            body = await reader.readexactly(size)
            self._heard_s = time.monotonic()
            writer.write(ALIVE + await self._reply(action, number, body))
            await writer.drain()
        except (OSError, EOFError, struct.error):
            pass  # another user's connection, or Spark's process was ended: the kernel asks again
        finally:
            writer.close()

    async def _reply(self, action: int, number: int, body: bytes) -> bytes:
        if action == START:
            return struct.pack("!H", self._port.getsockname()[1])
        if action == PULL:
            return await self._pull(number)
        if action == PUSH and number == self._pushed + 1:
            self._pushed = number
            if self._pump.feed(body):
                self._lively_s = time.monotonic()
        if action == STOP:
            self._ending.set()
        return b""

    async def _pull(self, number: int) -> bytes:
        async with self._one_pull:
            if number == self._pulled[0] + 1:
                await self._something_to_say()
                self._pulled = (number, self._pump.take())
                self._replied_s = time.monotonic()
            return self._pulled[1]

    async def _something_to_say(self) -> None:
        await _within(LONGEST_WAIT_S, self._pump.ready.wait())
        now_s = time.monotonic()
        if now_s - self._lively_s > _LIVELY_S:
            await asyncio.sleep(max(0.0, self._replied_s + _CALM_S - now_s))


async def _within(seconds: float, awaitable: Awaitable[object]) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(awaitable, seconds)
