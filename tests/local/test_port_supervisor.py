"""The filter by which an agent binds its ranks' sockets: signals, and what a machine may refuse.

``test_remote_hosts`` has ranks that listen.
"""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys

import pytest

from hydrogen_magic.core.network import PortRange
from hydrogen_magic.node.agent import port_supervisor
from hydrogen_magic.node.agent.port_supervisor import PortSupervisor
from tests.gangs import free_ports, wait_until

_BINDS = """
import ctypes, signal, socket, sys
from hydrogen_magic.node.agent import port_supervisor
port_supervisor.install_filter(int(sys.argv[1]))
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for _ in range(100):
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        print(sock.getsockname()[1])
libc = ctypes.CDLL(None)
assert libc.bind(sock.fileno(), bytes(16), 16) < 0  # closed, and an address of no family
with socket.socket() as sock:
    assert libc.bind(sock.fileno(), bytes([10]) + bytes(27), 28) < 0  # of the other family
try:
    socket.socket().bind(("192.0.2.99", 0))  # no address of this machine
except OSError as error:
    print(error.errno)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def bound(supervisor: PortSupervisor) -> list[int]:
    """Return the ports of the sockets of a process, and the error of one that cannot be bound."""
    fd = supervisor.follow()
    done = subprocess.run(
        [sys.executable, "-c", _BINDS, str(fd)],
        pass_fds=[fd],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    os.close(fd)
    return [int(line) for line in done.stdout.split()]


@pytest.fixture
def ports() -> PortRange:
    found = free_ports(4)
    return PortRange(found[0], found[-1])


def test_signals_do_not_disturb_a_call_that_is_answered(ports: PortRange) -> None:
    supervisor = PortSupervisor(ports)
    *found, error = bound(supervisor)
    assert len(found) == 100 and error == errno.EADDRNOTAVAIL
    assert all(ports.first <= port <= ports.last for port in found), found
    assert supervisor.problem == ""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_an_agent_that_may_not_access_sockets_says_so(
    error: int, ports: PortRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without the capability; the system chooses the ports then."""

    def refused(thread: int, fd: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(port_supervisor, "_duplicate", refused)
    supervisor = PortSupervisor(ports)
    assert len(bound(supervisor)) == 101
    assert f"not access their sockets ({os.strerror(error)})" in supervisor.problem


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("machine", "riscv64", "(not supported on riscv64)"),
        ("release", "5.4.0-1106-aws", "(Linux 5.4.0-1106-aws is older than 5.6)"),
    ],
)
def test_a_machine_without_such_filters_says_so(
    name: str, value: str, said: str, ports: PortRange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, name, lambda: value)
    supervisor = PortSupervisor(ports)
    port_supervisor.install_filter(supervisor.follow())
    wait_until(lambda: supervisor.problem)
    assert said in supervisor.problem
