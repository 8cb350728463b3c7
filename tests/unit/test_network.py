"""Ranges of ports, and addresses of both families as text."""

from __future__ import annotations

import errno

import pytest

from hydrogen_magic.core import network
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.node.rendezvous.connection_guard import _hexadecimal


def test_a_range_of_ports() -> None:
    assert PortRange.parse("40000 - 40100") == PortRange(40000, 40100)
    assert str(PortRange(40000, 40100)) == "40000-40100"
    for wrong in ("40000", "40100-40000", "80-90", "1024-65536", "a-b", ""):
        with pytest.raises(ValueError, match="a range of ports like 40000-40100"):
            PortRange.parse(wrong)


def test_the_first_free_port_is_taken() -> None:
    taken, tried = {5, 6}, []

    def to_port(port: int) -> None:
        tried.append(port)
        if port in taken:
            raise OSError(errno.EADDRINUSE, "in use")

    network.bind(PortRange(5, 9), to_port)
    assert tried == [5, 6, 7]
    network.bind(None, to_port)
    assert tried[3:] == [0]
    with pytest.raises(OSError, match="all ports of 5-6 are in use; set a larger range"):
        network.bind(PortRange(5, 6), to_port)


def test_an_error_other_than_a_taken_port_is_raised_at_once() -> None:
    def to_port(port: int) -> None:
        raise OSError(errno.EADDRNOTAVAIL, f"not here: {port}")

    with pytest.raises(OSError, match="not here: 5"):
        network.bind(PortRange(5, 9), to_port)


@pytest.mark.parametrize("host", ["127.0.0.1", "node-1", "::1", "fd00::2"])
def test_an_endpoint_has_an_ipv6_address_in_brackets(host: str) -> None:
    made = network.endpoint(host, 5000)
    assert made == (f"tcp://[{host}]:5000" if ":" in host else f"tcp://{host}:5000")
    assert network.host_and_port(made) == (host, 5000)
    assert network.endpoint(f"[{host}]" if ":" in host else host, 5000) == made


def test_addresses_in_the_form_of_the_kernels_tables() -> None:
    assert _hexadecimal("127.0.0.1", 80) == "0100007F:0050"
    assert _hexadecimal("::1", 80) == "00000000000000000000000001000000:0050"
    assert _hexadecimal("fe80::1%lo", 80) == "000080FE000000000000000001000000:0050"


def test_the_interface_of_an_address() -> None:
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("2001:db8::1") == ""
