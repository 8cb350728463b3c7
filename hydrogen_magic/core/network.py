"""Addresses and ports of TCP listeners, without packages that a host may lack."""

from __future__ import annotations

import errno
import fcntl
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

_SIOCGIFADDR = 0x8915
_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")


@dataclass(frozen=True)
class PortRange:
    """Ports that listeners may have, both ends included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Return the range in ``40000-40100``, or raise ValueError."""
        match = _RANGE.fullmatch(text.replace(" ", ""))
        if match is None or not 1024 <= int(match[1]) <= int(match[2]) <= 65535:
            raise ValueError(
                f"should be a range of ports like 40000-40100, from 1024 on, got {text!r}"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def bind(ports: PortRange | None, to_port: Callable[[int], object]) -> None:
    """Call ``to_port`` with the first free port of ``ports``; with 0, any port, if there is no range.

    ``to_port`` raises OSError if the port is in use. Raises OSError if all are.
    """
    if ports is None:
        to_port(0)
        return
    for port in range(ports.first, ports.last + 1):
        try:
            to_port(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    text = f"all ports of {ports} are in use; set a larger range (`%config Distributed.ports`)"
    raise OSError(errno.EADDRINUSE, text)


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address or name: IPv4 where a name has both, or cannot be resolved."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return socket.AF_INET
    return min(family for family, *_ in found)


def endpoint(host: str, port: int | str) -> str:
    """Return ``tcp://host:port``, with an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the parts of ``tcp://host:port``; an IPv6 address without its brackets."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def interface_of(address: str) -> str:
    """Return the name of the interface with an address; empty if there is none."""
    return _with_ipv6(address.partition("%")[0]) if ":" in address else _with_ipv4(address)


def _with_ipv6(address: str) -> str:
    wanted = socket.inet_pton(socket.AF_INET6, address).hex()
    with open("/proc/net/if_inet6") as table:
        rows = [line.split() for line in table]
    return next((row[-1] for row in rows if row[0] == wanted), "")


def _with_ipv4(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:  # in the ``ifreq``'s ``sockaddr_in``
                return name
    return ""
