"""The ports at which ranks listen for other machines, out of ``Distributed.ports``.

Gloo and NCCL listen at port 0, for which the system chooses a port, and have no setting for it. A filter of
system calls lets the agent carry out such a ``bind`` in place of the rank (seccomp_unotify(2)):

    rank ── bind(socket, (address, 0)) ──► filter ──► thread of the agent ── pidfd_getfd(2) of the socket,
         ◄──────────── result ─────────────────────┘   bind(socket, (address, a free port of the range))

The forkserver installs the filter before it imports anything, so all processes of ranks have it. Every other
call goes on as it is: with a fixed port, on loopback, of another type of socket.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import os
import platform
import re
import select
import socket
import struct
import sys
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
_RECEIVE, _SEND, _IS_VALID = 0xC0502100, 0xC0182101, 0x40082102
_REQUEST = struct.Struct("QIIiIQ6Q")
"""``struct seccomp_notif``: number, thread, flags; call, architecture, instruction, arguments."""
_ANSWER = struct.Struct("QqiI")
"""``struct seccomp_notif_resp``: number, value, error, flags."""
_CONTINUE = 1
_MOST_BYTES = 128
"""Of a socket's address (``struct sockaddr_storage``)."""
_SIZES: dict[int, int] = {socket.AF_INET: 16, socket.AF_INET6: 24}
"""Of the addresses of each family, of IPv6 without its scope."""
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_OLDEST = (5, 6)
"""The first Linux with ``pidfd_getfd``."""
_libc: Any = ctypes.CDLL(None, use_errno=True)


# ── in the forkserver ────────────────────────────────────────────────────────────────────────────


def install_filter(fd: int) -> None:
    """Let the agent carry out calls of ``bind`` by this process and its children.

    Call it before there are threads. ``fd``: a socket of the agent, which receives the filter's descriptor,
    or a text that says why there is none.
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
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < _OLDEST:
        raise OSError(0, f"Linux {platform.release()} is older than 5.6")
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
        self._refusal = ""
        """Why ranks may listen at other ports."""
        self._shortage = ""
        """That there was no port for the last socket."""

    @property
    def problem(self) -> str:
        """Why ranks listen at other ports, or cannot listen; empty if nothing is wrong."""
        return self._refusal or self._shortage

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
            host = os.uname().nodename
            self._refusal = f"{host}: ranks may listen at ports outside of {self._ports}: {why}"

    def _answer(self, listener: int) -> None:
        request = bytearray(_REQUEST.size)
        # Its thread may end at any moment, or be interrupted and call again.
        with suppress(FileNotFoundError, InterruptedError):
            fcntl.ioctl(listener, _RECEIVE, request)
            number, thread, *_, fd, address, length, _, _, _ = _REQUEST.unpack(request)
            found = self._bindable(thread, fd, address, min(length, _MOST_BYTES))
            # Only now is it certain that all this was of the thread that called (seccomp_unotify(2)).
            fcntl.ioctl(listener, _IS_VALID, struct.pack("Q", number))
            flags, failed = (_CONTINUE, 0) if found is None else (0, self._bind(*found))
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, -failed, flags))

    def _bindable(
        self, thread: int, fd: int, address: int, length: int
    ) -> tuple[socket.socket, bytes] | None:
        """Return a duplicate of a thread's socket and its address, None if the call is to go on."""
        try:
            wanted = _memory(thread, address, length)
            if not _is_at_any_port(wanted):
                return None
            sock = _duplicate(thread, fd)
        except OSError as error:
            if error.errno in _REFUSALS:
                self._note(f"the agent may not access their sockets ({error.strerror})")
            return None  # else it is no socket, or no address: the system says so itself
        except Exception:  # the process has ended
            return None
        if sock.type != socket.SOCK_STREAM or sock.family not in _SIZES:
            sock.close()
            return None
        return sock, wanted

    def _bind(self, sock: socket.socket, address: bytes) -> int:
        """Bind a socket to a port of the range; return the number of the error, 0 if there was none."""
        self._shortage = ""
        with sock:
            try:
                if not sock.getsockname()[1]:  # else by an answer that came too late
                    self._bind_in_range(sock, address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    self._shortage = f"{os.uname().nodename}: {error.strerror}"
                return error.errno or errno.EIO
        return 0

    def _bind_in_range(self, sock: socket.socket, address: bytes) -> None:
        def bind() -> None:
            network.bind(self._ports, lambda port: _bind_to(sock, address, port))

        # With these options two sockets could get one port, of which one could not listen.
        with _turned_off(sock, socket.SO_REUSEPORT):
            try:
                with _turned_off(sock, socket.SO_REUSEADDR):
                    bind()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                bind()  # also to ports whose last connections have just ended, if it has the option


@contextmanager
def _turned_off(sock: socket.socket, option: int) -> Iterator[None]:
    value = sock.getsockopt(socket.SOL_SOCKET, option)
    sock.setsockopt(socket.SOL_SOCKET, option, 0)
    try:
        yield
    finally:
        sock.setsockopt(socket.SOL_SOCKET, option, value)


def _bind_to(sock: socket.socket, address: bytes, port: int) -> None:
    wanted = address[:2] + port.to_bytes(2, "big") + address[4:]
    if _libc.bind(sock.fileno(), wanted, len(wanted)):
        raise _last_error()


def _memory(thread: int, address: int, length: int) -> bytes:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(length)


def _is_at_any_port(address: bytes) -> bool:
    """Whether a ``struct sockaddr`` is of IPv4 or IPv6, has port 0, and is not on loopback."""
    family = int.from_bytes(address[:2], sys.byteorder)
    if len(address) < _SIZES.get(family, _MOST_BYTES + 1) or any(address[2:4]):
        return False
    is_ipv4 = family == socket.AF_INET
    host = ipaddress.ip_address(address[4:8] if is_ipv4 else address[8:24])
    return not (getattr(host, "ipv4_mapped", None) or host).is_loopback


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
