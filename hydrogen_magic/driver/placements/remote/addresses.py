"""The addresses of this machine."""

from __future__ import annotations

import socket


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this machine's active interfaces, without loopback."""
    import psutil

    is_up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in is_up and entry.family == socket.AF_INET
    ]
    return tuple(address for address in found if not address.startswith("127."))
