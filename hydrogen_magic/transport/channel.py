"""Connections of agents, to the kernel and to each other: ZeroMQ with CURVE, both sides authenticated.

The kernel listens (:class:`Hub`), agents connect (:class:`AgentLink`). Every agent has a key pair of
its own, made by the kernel and handed over by an inherited descriptor, or computed from a seed that comes
with the task on its host; the kernel lets in only keys it made and that are still valid. An agent that
passes on a closure listens too (:class:`Listener`), for agents that the kernel names. A message of
:mod:`~hydrogen_magic.core.messages` is one frame of JSON; some have bytes in a second frame. Receivers
decode it; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import network, processes
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.transport.stale_sockets import remove_stale

_log = logging.getLogger(__name__)
_credentials_log = logging.getLogger(f"{__name__}.credentials")
# Otherwise a notebook that logs at DEBUG sees several lines for each agent that connects.
_credentials_log.setLevel(logging.WARNING)

LinkError = zmq.ZMQError
"""Of the system: a process has no descriptors or threads left, or cannot use an address."""

Blob = bytes | memoryview
Received = tuple[object, memoryview | None]
"""A message to be decoded, and the bytes that came with it."""
Receiver = Callable[[object, memoryview | None], None]
"""Takes both."""

_DOMAIN = "hydrogen"
"""Must be named on both ends: libzmq's wildcard rejects even allowed keys."""
_MAX_MESSAGE_BYTES = 64 << 20
_PREFIX, _HUB = f"hydrogen-{zlib.crc32(os.uname().nodename.encode()):08x}-", "hub"
"""Of a hub's directory in the system's one for temporary files, and its socket there.

Hosts may share that one, and sockets of other hosts refuse connections: so the name has the host.
"""
_MAX_DIRECTORY_BYTES = 100
_NEW_S = 60.0
"""A hub listens within milliseconds after its directory was made."""
_HANDSHAKE_MS = 3000
"""A connection that has not authenticated by then is dropped, including silent ones."""
_BEAT_MS = 2000
_SILENCE_MS = 40_000
"""A connection is closed after this time without a message or an answered ping. ZeroMQ's own
threads send and answer pings, so a kernel whose Python code is busy for a minute stays
connected."""
_FATES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
_ENTRY_S = 90.0
"""How long an agent tries to authenticate, which needs Python in the kernel: it may be busy for a minute."""
_TURN_S = 0.01
"""How long messages that have arrived may keep everything else on the loop waiting, such as a Stop."""
_END_S = 1.0
"""How long pending work on the loop may take to finish."""


class AgentKeys:
    """Credentials of one agent; ``secret`` is never in argv, the environment or a file."""

    def __init__(self, endpoint: str, server_key: bytes, secret: str) -> None:
        """``secret``: 32 random bytes in hexadecimal digits."""
        self.endpoint = endpoint
        self.server_key = server_key.decode()
        self.key = _pair(secret)[0].decode()
        self.secret = secret


def _pair(secret: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key as ZeroMQ takes them."""
    encoded = z85.encode(bytes.fromhex(secret))
    return zmq.curve_public(encoded), encoded


class _LoopTurns:
    """Gives everything else on the loop a turn: messages that have arrived are returned without one."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    async def give(self) -> None:
        """Give a turn if the last one is some time ago."""
        if time.monotonic() - self._last_s > _TURN_S:
            await asyncio.sleep(0)
            self._last_s = time.monotonic()


class Listener:
    """A socket that agents connect to, on the running event loop."""

    def __init__(self) -> None:
        self._endpoints: dict[tuple[str, PortRange | None], str] = {}
        """Address and ports -> endpoint for agents of other machines."""
        self._server_key, self._server_secret = zmq.curve_keypair()
        self._receivers: dict[str, Receiver] = {}
        self._routes: dict[str, bytes] = {}

    @property
    def server_key(self) -> str:
        return self._server_key.decode()

    def open(self) -> None:
        """Accept messages from now on."""
        self._context = context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(context, log=_credentials_log)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=self)
        self._socket = context.socket(zmq.ROUTER)
        self._configure(self._socket)
        self._receiving = asyncio.ensure_future(self._receive())

    def close(self) -> None:
        """Break all connections."""
        self._receiving.cancel()
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def listen(self, address: str, ports: PortRange | None = None) -> str:
        """Listen for agents of other machines too; return the endpoint (``tcp://address:port``).

        ``address``: an address or name of this machine. Raises PlacementError on failure.
        """
        key = address, ports
        if key not in self._endpoints:
            self._socket.ipv6 = network.family_of(address) == socket.AF_INET6
            try:
                network.bind(ports, lambda port: self._bind(address, port))
            except OSError as error:
                text = f"cannot listen on {address} for agents: {error.strerror}"
                raise PlacementError(text) from None
            self._endpoints[key] = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self._endpoints[key]

    def _bind(self, address: str, port: int) -> None:
        try:
            self._socket.bind(network.endpoint(address, port or "*"))
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None

    def admit_key(self, key: str, on_message: Receiver) -> None:
        """Let in the agent with this public key, whose messages go to ``on_message``."""
        self._receivers[key] = on_message

    def revoke_key(self, key: str) -> None:
        """Revoke the key of this agent."""
        self._receivers.pop(key, None)
        self._routes.pop(key, None)

    def send(self, key: str, message: msg.Message, blob: Blob | None = None) -> None:
        """Send to the agent of this key, which must have sent a message before."""
        route = self._routes.get(key)
        if route is not None:
            self._socket.send_multipart([route, *_parts(message, blob)])

    def _configure(self, sock: zmq.asyncio.Socket) -> None:
        sock.curve_server = True
        sock.curve_secretkey = self._server_secret
        sock.curve_publickey = self._server_key
        sock.zap_domain = _DOMAIN.encode()
        sock.maxmsgsize = _MAX_MESSAGE_BYTES
        sock.handshake_ivl = _HANDSHAKE_MS
        # Hundreds of unauthenticated connections at once must not block an agent.
        sock.backlog = 1024
        sock.linger = 0
        sock.rcvhwm = sock.sndhwm = 0
        sock.router_handover = True

    def callback(self, domain: str, key: bytes) -> bool:
        """Decide whether a client's public key may connect (pyzmq's interface for credentials)."""
        return key.decode() in self._receivers

    async def _receive(self) -> None:
        turns = _LoopTurns()
        while True:
            await turns.give()
            parts = await self._socket.recv_multipart(copy=False)
            # The key that the handshake proved, not a claim in the message.
            key = str(parts[-1].get("User-Id"))
            receiver = self._receivers.get(key)
            if receiver is None:  # a dismissed agent, which would wait for answers forever
                self._socket.send_multipart([parts[0].bytes, *_parts(msg.Quit(), None)])
            if receiver is None or len(parts) not in (2, 3):
                continue
            self._routes[key] = parts[0].bytes
            try:
                receiver(*_received(parts[1:]))
            except Exception:  # one agent's bad message must not deafen us to the others
                _log.exception("a message of an agent could not be taken")


class Hub(Listener):
    """The kernel's end: an event loop in its own thread, and the socket that agents connect to.

    All control of gangs runs on this loop, one callback at a time, so it needs no locks: other methods than
    :meth:`close` are called there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._directory = _short_private_directory()
        self._endpoint = f"ipc://{self._directory}/{_HUB}"
        self.loop = asyncio.new_event_loop()
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hydrogen-hub", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise PlacementError(f"cannot listen for agents: {self._failure}") from self._failure

    def admit(self, on_message: Receiver, secret: str = "") -> AgentKeys:
        """Return keys for a new agent, whose messages go to ``on_message`` on the loop.

        ``secret``: see :class:`AgentKeys`; empty: a new one.
        """
        keys = AgentKeys(self._endpoint, self._server_key, secret or secrets.token_hex(32))
        self.admit_key(keys.key, on_message)
        return keys

    def close(self) -> None:
        """End the thread and remove the socket's directory. Called from any thread.

        All agents must have been dismissed before.
        """
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(timeout=5)
        shutil.rmtree(self._directory, ignore_errors=True)

    # ── the loop ──

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            processes.use_batch_scheduling()
            self.loop.run_until_complete(self._serve())
        except Exception as error:
            self._failure = error
        finally:
            self._started.set()
            self.loop.close()

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        self.open()
        self._socket.bind(self._endpoint)
        self._started.set()
        await self._closing.wait()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:  # everything that gangs have left on this loop
            task.cancel()
        await asyncio.wait(tasks, timeout=_END_S)
        super().close()


def _parts(message: msg.Message, blob: Blob | None) -> list[Any]:
    data = json.dumps(msg.encode(message), separators=(",", ":")).encode()
    return [data, *([] if blob is None else [blob])]


def _received(parts: list[zmq.Frame]) -> Received:
    return json.loads(parts[0].bytes), parts[1].buffer if len(parts) > 1 else None


def _short_private_directory() -> str:
    """Make a directory, mode 0700, whose name leaves room for a socket path: at most 107 bytes in all."""
    made = tempfile.mkdtemp(prefix=_PREFIX)
    if len(os.fsencode(made)) > _MAX_DIRECTORY_BYTES:
        os.rmdir(made)
        made = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    remove_stale(os.path.dirname(made), _PREFIX, _HUB, _NEW_S)
    return made


class AgentLink:
    """The agent's end of a connection."""

    def __init__(
        self, endpoint: str, server_key: str, secret: str, silence_ms: int = _SILENCE_MS
    ) -> None:
        """``secret``: :attr:`AgentKeys.secret`.

        ``silence_ms``: after this time without a message or an answered ping, the connection is closed.
        """
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = server_key.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = _pair(secret)
        self._socket.zap_domain = _DOMAIN.encode()
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        self._socket.linger = 500
        self._socket.rcvhwm = self._socket.sndhwm = 0
        if not endpoint.startswith("ipc:"):
            self._socket.heartbeat_ivl = _BEAT_MS
            self._socket.heartbeat_timeout = silence_ms
        self._socket.ipv6 = endpoint.startswith("tcp://[")
        self._monitor = self._socket.get_monitor_socket(_FATES)
        self._turns = _LoopTurns()
        self._socket.connect(endpoint)

    def send(self, message: msg.Message, blob: Blob | None = None) -> None:
        """Queue ``message``; ZeroMQ delivers in order.

        Raises ValueError if it is too large: ZeroMQ would drop it, and close the connection.
        """
        parts = _parts(message, blob)
        if len(parts[0]) > _MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message has {len(parts[0])} bytes; at most {_MAX_MESSAGE_BYTES} are allowed"
            )
        self._socket.send_multipart(parts)

    async def receive(self) -> Received:
        """Return the next message of the other end, to be decoded, and the bytes that came with it."""
        await self._turns.give()
        return _received(await self._socket.recv_multipart(copy=False))

    async def lost(self, entry_s: float = _ENTRY_S) -> None:
        """Return when there is no reason left to wait for the other end.

        Either an established connection has ended, and messages on their way may be lost with it,
        or none will be established: our key was revoked, or there was no answer for ``entry_s``.
        """
        with suppress(asyncio.TimeoutError):
            if await asyncio.wait_for(self._was_let_in(), entry_s):
                while await self._fate() != zmq.EVENT_DISCONNECTED:
                    pass

    async def _was_let_in(self) -> bool:
        """Return the result of the connection attempt; ZeroMQ retries if the kernel was too busy."""
        while True:
            fate = await self._fate()
            if fate in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                return fate == zmq.EVENT_HANDSHAKE_SUCCEEDED

    async def _fate(self) -> int:
        return int(parse_monitor_message(await self._monitor.recv_multipart())["event"])

    def clean_up_after_hub(self) -> None:
        """Remove the socket's directory on behalf of a kernel that was killed."""
        scheme, _, path = self._endpoint.partition("://")
        if scheme == "ipc":
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)

    def close(self) -> None:
        with suppress(zmq.ZMQError), warnings.catch_warnings():
            self._socket.disable_monitor()
            self._context.destroy(linger=200)
