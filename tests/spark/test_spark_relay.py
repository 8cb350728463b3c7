"""Executors reach this process through Spark Connect's server, whatever its slots are busy with."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.core.network import PortRange
from hydrogen_magic.driver.placements.spark.relay import Relay
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.spark import relay_daemon, relay_endpoint
from tests import leaks
from tests.gangs import PATIENCE_S, free_ports
from tests.spark_rig import HOST, ConnectServer, Site, connected, until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SLOTS = 4
MB = 1 << 20


# ── what the relay runs between ──────────────────────────────────────────────────────────────────


@pytest.fixture
def server(connect_server: ConnectServer) -> ConnectServer:
    """The server without relays of earlier tests: one that is not told of its end waits for 30 s."""
    until(lambda: not daemons(connect_server), PATIENCE_S)
    return connect_server


@pytest.fixture
def spark(connect: Any) -> Any:
    return connect


class Target:
    """A server in this process that serves each connection alike."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server((HOST, 0), backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed, or shut down
            while True:
                sock, _ = self._listener.accept()
                self._open.append(sock)
                threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with suppress(OSError), sock:
            self._serve(sock)

    def cut(self) -> None:
        """Break all connections; others may come."""
        for sock in self._open:
            with suppress(OSError):  # it has ended before
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(PATIENCE_S)
        self._listener.close()
        self.cut()
        for sock in self._open:
            sock.close()


def echo(sock: socket.socket) -> None:
    while data := sock.recv(1 << 16):
        sock.sendall(data)


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target(echo)
    yield target
    target.close()


@pytest.fixture
def relayed(spark: Any, target: Target) -> Iterator[tuple[str, int]]:
    """Where an echo of this process is to be had on the driver's host."""
    with relaying(spark, target.address) as address:
        yield address


@contextmanager
def relaying(spark: Any, target: tuple[str, int]) -> Iterator[tuple[str, int]]:
    relay = Relay(spark, target)
    failures: list[str] = []
    relay.on_failure = failures.append
    try:
        yield relay.start()
    finally:
        relay.close()
    assert failures == []


def daemons(server: ConnectServer) -> list[int]:
    mine = leaks.marked(leaks.LENT, server.mark)
    return [pid for pid in mine if "hydrogen_magic relay" in leaks.command(pid)]


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=PATIENCE_S)


def received(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := sock.recv(1 << 18)):
        data += piece
    return bytes(data)


def round_trip(sock: socket.socket, data: bytes) -> bytes:
    sending = threading.Thread(target=sock.sendall, args=(data,))
    sending.start()
    back = received(sock, len(data))
    sending.join()
    return back


def ends(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_come_back_as_they_went_beside_intruders(
    server: ConnectServer, relayed: tuple[str, int]
) -> None:
    """8 MB, and smaller ones beside it, some of them empty."""
    with intruders(server, relayed):
        assert_all_come_back(relayed)
    assert len(daemons(server)) == 1


def assert_all_come_back(relayed: tuple[str, int]) -> None:
    sizes = (8 * MB, MB, 5, 0, 70_000)
    sent = [os.urandom(size) for size in sizes]
    back: dict[int, bytes] = {}

    def one(index: int) -> None:
        with connect(relayed) as sock:
            back[index] = round_trip(sock, sent[index])
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [back[index] == data for index, data in enumerate(sent)] == [True] * len(sizes)


@contextmanager
def intruders(server: ConnectServer, relayed: tuple[str, int]) -> Iterator[None]:
    """Silent ones, garbage to the port, and garbage to the socket of requests."""
    silent = [connect(relayed) for _ in range(200)]
    try:
        with connect(relayed) as sock:
            sock.sendall(os.urandom(MB))
        names = request_sockets(server)
        assert names
        for name in names:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(name)
                sock.sendall(os.urandom(4096))
        yield
    finally:
        for sock in silent:
            sock.close()


def request_sockets(server: ConnectServer) -> list[str]:
    """Return the names of the sockets of requests that processes of the server have open."""
    links = {link for pid in leaks.marked(leaks.LENT, server.mark) for link in leaks._links(pid)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    relays = [row for row in rows if row[-1].startswith("@hydrogen_magic/relay/")]
    return [f"\0{row[7][1:]}" for row in relays if f"socket:[{row[6]}]" in links]


@contextmanager
def busy(spark: Any, folder: Path) -> Iterator[None]:
    """Have a barrier job hold every slot."""

    def hold(batches: Any) -> Iterator[Any]:
        import os

        (folder / f"task-{os.getpid()}").touch()
        deadline = time.monotonic() + 120
        while not (folder / "enough").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        (folder / f"left-{os.getpid()}").touch()
        yield from batches

    rows = spark.range(0, SLOTS, 1, SLOTS).mapInArrow(hold, "id long", barrier=True)
    job = threading.Thread(target=rows.collect)
    job.start()
    try:
        until(lambda: len(list(folder.glob("task-*"))) == SLOTS, PATIENCE_S)
        yield
    finally:
        (folder / "enough").touch()
        job.join(PATIENCE_S)


@pytest.mark.exhaustive  # half a gigabyte
def test_a_reader_that_stalls_does_not_stall_others(
    server: ConnectServer, spark: Any, relayed: tuple[str, int]
) -> None:
    """128 MB are sent to a reader that does not read: little of it is kept on the way."""

    def flood(sock: socket.socket) -> None:
        if sock.recv(1) == b"f":
            piece = bytes(MB)
            for _ in range(128):
                sock.sendall(piece)
        echo(sock)

    flooding = Target(flood)
    with relaying(spark, flooding.address) as address, connect(address) as stalled:
        stalled.sendall(b"f")
        assert len(stalled.recv(1)) == 1
        with connect(address) as other:
            other.sendall(b"e")
            for size in (10, 2 * MB, 10):
                data = os.urandom(size)
                assert round_trip(other, data) == data
        kept = [resident_mb(pid) for pid in daemons(server)]
        assert max(kept) < 64
    flooding.close()


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_a_connection_to_the_server_that_breaks_loses_nothing(server: ConnectServer) -> None:
    """All connections between this process and the server are cut three times, each in the middle of 2 MB."""
    there = (HOST, int(server.url.rpartition(":")[2]))
    between = Target(lambda sock: pass_on(sock, there))
    cuts: list[int] = []

    def cut_and_echo(sock: socket.socket) -> None:
        n_bytes = 0
        while data := sock.recv(1 << 16):
            n_bytes += len(data)
            if n_bytes >= (2 * len(cuts) + 1) * MB:
                cuts.append(n_bytes)
                between.cut()
            sock.sendall(data)

    target = Target(cut_and_echo)
    try:
        with (
            connected(f"sc://{HOST}:{between.address[1]}") as spark,
            relaying(spark, target.address) as address,
            connect(address) as sock,
        ):
            for _ in range(3):
                data = os.urandom(2 * MB)
                assert round_trip(sock, data) == data
            assert len(cuts) == 3
    finally:
        target.close()
        between.close()


@pytest.mark.exhaustive
def test_a_pause_of_the_drivers_host_loses_nothing(
    server: ConnectServer, relayed: tuple[str, int]
) -> None:
    """The relay's process stops for longer than a request waits for its answer."""
    with connect(relayed) as sock:
        assert round_trip(sock, b"before") == b"before"
        paused = daemons(server)
        try:
            for pid in paused:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(relay_endpoint.LONGEST_WAIT_S + relay_endpoint._REACH_S + 2)
        finally:
            for pid in paused:
                os.kill(pid, signal.SIGCONT)
        assert paused and round_trip(sock, b"after") == b"after"


def pass_on(sock: socket.socket, there: tuple[str, int]) -> None:
    """Be a wire between ``sock`` and an address until one of them ends."""
    with socket.create_connection(there) as other:
        back = threading.Thread(target=copy, args=(other, sock))
        back.start()
        copy(sock, other)
        back.join()


def copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for sock in (source, target):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


# ── endings ────────────────────────────────────────────────────────────────────────


def test_messages_pass_while_all_slots_are_busy_and_nothing_is_left_when_it_is_closed(
    server: ConnectServer, spark: Any, target: Target, tmp_path: Path
) -> None:
    relay = Relay(spark, target.address)
    address = relay.start()
    with connect(address) as sock:
        with busy(spark, tmp_path):
            for number in range(5):
                assert round_trip(sock, b"%02d" % number) == b"%02d" % number
            assert not (tmp_path / "enough").exists() and len(list(tmp_path.glob("left-*"))) == 0
        closed = time.monotonic()
        relay.close()
        relay.close()
        assert ends(sock)
    until(lambda: not daemons(server), PATIENCE_S)
    assert time.monotonic() - closed < relay_daemon._SILENCE_S / 2, "it ended for want of messages"
    assert request_sockets(server) == []
    assert spark.range(3).count() == 3


@pytest.mark.exhaustive
def test_a_driver_that_is_killed_leaves_nothing(spark_site: Site, target: Target) -> None:
    """Agents and the kernel notice it. The server is its own, since it is killed."""
    failures: queue.Queue[str] = queue.Queue()
    server = ConnectServer(spark_site, f"local[{SLOTS}]")
    try:
        with connected(server.url) as spark:
            spark.release_session_on_close = False  # the server is gone: tried for ten minutes
            relay = Relay(spark, target.address)
            relay.on_failure = failures.put
            with connect(relay.start()) as sock:
                assert round_trip(sock, b"x") == b"x"
                os.kill(jvm(server), signal.SIGKILL)
                assert ends(sock)
            until(lambda: not daemons(server), PATIENCE_S)
            assert "failed" in failures.get(timeout=PATIENCE_S)
            relay.close()
            assert failures.empty()
    finally:
        server.close()


def jvm(server: ConnectServer) -> int:
    mine = leaks.marked(leaks.LENT, server.mark)
    return next(pid for pid in mine if "SparkConnectServer" in leaks.command(pid))


def test_an_address_that_is_not_the_drivers_is_refused(
    server: ConnectServer, spark: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(spark.conf), "get", lambda *_: "203.0.113.1"
    )  # of a documentation's net
    with pytest.raises(PlacementError, match="Cannot assign requested address"):
        Relay(spark, target.address).start()
    assert daemons(server) == []


@pytest.mark.exhaustive
def test_executors_connect_to_a_port_of_the_range(
    server: ConnectServer, spark: Any, target: Target
) -> None:
    taken, free = free_ports(2)
    with socket.create_server((HOST, taken)):
        relay = Relay(spark, target.address, PortRange(taken, free))
        try:
            address = relay.start()
            assert address == (HOST, free)
            with connect(address) as sock:
                assert round_trip(sock, b"x") == b"x"
            full = f"all ports of {taken}-{free} are in use there"
            with pytest.raises(PlacementError, match=full):
                Relay(spark, target.address, PortRange(taken, free)).start()
        finally:
            relay.close()
    until(lambda: not daemons(server), PATIENCE_S)
