"""The ports at which ranks listen for other machines, out of ``Distributed.ports``.

Gloo and NCCL listen at port 0, for which the system chooses a port, and have no setting for it. A filter of
system calls lets the agent carry out such a ``bind`` in place of the rank (seccomp_unotify(2)):

    rank ── bind(socket, (address, 0)) ──► filter ──► thread of the agent ── pidfd_getfd(2) of the socket,
         ◄──────────── result ─────────────────────┘   bind(socket, (address, a free port of the range))

The forkserver installs the filter before it imports anything, so all processes of ranks have it. Every other
call goes on as it is: of a certain port, on loopback, of another type of socket.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import os
import platform
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hydrogen_magic.core import network
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.transport import framing

_ARCHITECTURES = {"x86_64": (0xC000003E, 49, 317), "aarch64": (0xC00000B7, 200, 277)}
"""Of each: its number in filters, and the numbers of the calls ``bind`` and ``seccomp``."""
_PIDFD_GETFD = 438
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER = 1
_FLAGS = 1 << 2 | 1 << 3
"""``SPEC_ALLOW``, without which older kernels slow down all code of a process with a filter, and
``NEW_LISTENER``."""
_WAIT_KILLABLE = 1 << 5
"""Flag of Linux 5.19: a signal does not interrupt a call that is being answered."""
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_CALL, _ARCHITECTURE = 0, 4
"""Offsets in ``struct seccomp_data``."""
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_REQUEST = struct.Struct("QIIiIQ6Q")
"""``struct seccomp_notif``: number, thread, flags; call, architecture, instruction, arguments."""
_ANSWER = struct.Struct("QqiI")
"""``struct seccomp_notif_resp``: number, value, error, flags."""
_CONTINUE = 1
_MOST_BYTES = 128
"""Of a socket's address (``struct sockaddr_storage``)."""
_IPV4, _IPV6 = struct.Struct("!2xH4s"), struct.Struct("!2xHI16s")
_libc: Any = ctypes.CDLL(None, use_errno=True)


# ── in the forkserver ────────────────────────────────────────────────────────────────────────────


def install_filter(fd: int) -> None:
    """Let the agent carry out ``bind`` of this process and its children; called before there are threads.

    ``fd``: a socket of the agent, to which the filter's descriptor goes, or why there is none.
    """
    with socket.socket(fileno=fd) as sock:
        try:
            listener = _new_filter()
        except OSError as error:
            sock.send(f"this machine refuses a filter of system calls ({error.strerror})".encode())
            return
        socket.send_fds(sock, [b"\0"], [listener])
        os.close(listener)


def _new_filter() -> int:
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(0, f"not supported on {platform.machine()}")
    architecture, bind, seccomp = _ARCHITECTURES[platform.machine()]
    steps = (
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 0, 3, architecture),
        (_LOAD, 0, 0, _CALL),
        (_IF_EQUAL, 0, 1, bind),
        (_RETURN, 0, 0, _NOTIFY),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    )
    for flags in (_FLAGS | _WAIT_KILLABLE, _FLAGS):
        listener: int = _libc.syscall(seccomp, _SET_MODE_FILTER, flags, program)
        if listener < 0 and ctypes.get_errno() == errno.EACCES:
            # A user other than root may have a filter only if its processes cannot become root later.
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            listener = _libc.syscall(seccomp, _SET_MODE_FILTER, flags, program)
        if listener >= 0:
            return listener
    raise _last_error()


def _last_error() -> OSError:
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ── in the agent ─────────────────────────────────────────────────────────────────────────────────


class PortSupervisor:
    """Carries out ``bind`` for the processes of ranks."""

    def __init__(self, ports: PortRange) -> None:
        self._ports = ports
        self.problem = ""
        """Why ranks listen at other ports, or cannot listen; empty if nothing is wrong."""

    def follow(self) -> int:
        """Return a socket for :func:`install_filter` in a new forkserver; it is the caller's."""
        ours, theirs = framing.pair()
        name = "hydrogen_magic ports of ranks"
        threading.Thread(target=self._serve, args=(ours,), name=name, daemon=True).start()
        return theirs.detach()

    def _serve(self, sock: socket.socket) -> None:
        """Answer until all processes with the filter have ended; before Linux 5.9, forever."""
        with sock:
            text, fds, *_ = socket.recv_fds(sock, _MOST_BYTES, 1)
        if not fds:
            self._note(text.decode())
            return
        (listener,) = fds
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        try:
            while any(found & select.POLLIN for _, found in waiting.poll()):
                self._answer(listener)
        finally:
            os.close(listener)  # calls that nothing answers fail

    def _note(self, why: str) -> None:
        if why:  # else the forkserver has ended
            self.problem = (
                f"{os.uname().nodename}: ranks may listen at ports outside of {self._ports}: {why}"
            )

    def _answer(self, listener: int) -> None:
        request = bytearray(_REQUEST.size)
        # A call may be interrupted at any moment, and then comes again.
        with suppress(FileNotFoundError, InterruptedError):
            fcntl.ioctl(listener, _RECEIVE, request)
            number, thread, *_, fd, address, length, _, _, _ = _REQUEST.unpack(request)
            flags = failed = 0
            try:
                flags = 0 if self._bind(thread, fd, address, length) else _CONTINUE
            except OSError as error:
                failed = error.errno or errno.EIO
                if failed == errno.EADDRINUSE:
                    self.problem = f"{os.uname().nodename}: {error.strerror}"
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, -failed, flags))

    def _bind(self, thread: int, fd: int, address: int, length: int) -> bool:
        """Bind the socket of a process to a port of the range; return False if its call is to go on.

        Raises OSError with the result of its call.
        """
        try:
            where = _at_any_port(_memory(thread, address, min(length, _MOST_BYTES)))
            sock = _duplicate(thread, fd) if where is not None else None
        except PermissionError as error:
            self._note(f"the agent may not access their sockets ({error.strerror})")
            return False
        except Exception:  # no socket, no address, a process that has ended: the call goes on
            return False
        if where is None or sock is None:
            return False
        with sock:
            if sock.type != socket.SOCK_STREAM:
                return False
            if not sock.getsockname()[1]:  # else by an answer that came too late
                self._bind_in_range(sock, where)
        return True

    def _bind_in_range(self, sock: socket.socket, where: tuple[Any, ...]) -> None:
        host, _, *rest = where

        def bind() -> None:
            network.bind(self._ports, lambda port: sock.bind((host, port, *rest)))

        # With these options two sockets could get one port, of which one could not listen.
        with _turned_off(sock, socket.SO_REUSEPORT):
            try:
                with _turned_off(sock, socket.SO_REUSEADDR):
                    bind()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                bind()  # also at ports whose last connections have just ended, if it has the option


@contextmanager
def _turned_off(sock: socket.socket, option: int) -> Iterator[None]:
    value = sock.getsockopt(socket.SOL_SOCKET, option)
    sock.setsockopt(socket.SOL_SOCKET, option, 0)
    try:
        yield
    finally:
        sock.setsockopt(socket.SOL_SOCKET, option, value)


def _memory(thread: int, address: int, length: int) -> bytes:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(length)


def _at_any_port(address: bytes) -> tuple[Any, ...] | None:
    """Return the address of an IPv4 or IPv6 socket with port 0, as Python has it.

    ``address``: its ``struct sockaddr``. None for other addresses, and for those on loopback.
    """
    (family,) = struct.unpack_from("H", address) if len(address) >= 2 else (0,)
    if family == socket.AF_INET and len(address) >= _IPV4.size:
        port, packed = _IPV4.unpack_from(address)
        rest: tuple[int, ...] = ()
    elif family == socket.AF_INET6 and len(address) >= _IPV6.size:
        port, flow, packed = _IPV6.unpack_from(address)
        scope = address[_IPV6.size : _IPV6.size + 4]
        rest = flow, int.from_bytes(scope, "little")
    else:
        return None
    host = ipaddress.ip_address(packed)
    is_loopback = (getattr(host, "ipv4_mapped", None) or host).is_loopback
    return None if port or is_loopback else (str(host), port, *rest)


def _duplicate(thread: int, fd: int) -> socket.socket:
    """Return a socket of another process, given by one of its threads."""
    with open(f"/proc/{thread}/status") as status:
        pid = next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))
    process = os.pidfd_open(pid)
    try:
        copied = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if copied < 0:
            raise _last_error()
        return socket.socket(fileno=copied)
    finally:
        os.close(process)
