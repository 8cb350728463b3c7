"""The addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket


def own_addresses() -> tuple[str, ...]:
    """Return the addresses of this machine's active interfaces that others may reach, IPv4 first.

    Not those of loopback, nor IPv6 addresses that are valid on one link only.
    """
    import psutil

    is_up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    entries = [
        entry
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in is_up and entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    entries.sort(key=lambda entry: entry.family)
    return tuple(entry.address for entry in entries if _is_reachable(entry.address))


def _is_reachable(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or (parsed.version == 6 and parsed.is_link_local))
