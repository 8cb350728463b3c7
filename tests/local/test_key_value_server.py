"""The key-value server by which Horovod's ranks find each other: three verbs, a secret, one gang."""

from __future__ import annotations

import http.client
import math
import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.frameworks.horovod.rendezvous import HorovodRendezvous
from tests.gangs import PATIENCE_S

TOKEN = "5ecre7"
SERVE = (
    "import sys; from hydrogen_magic.frameworks.horovod.node import key_value_server\n"
    "key_value_server._HOLD_S = float(sys.argv[2]) or key_value_server._HOLD_S\n"
    f"key_value_server.serve_keys(int(sys.argv[1]), {TOKEN!r}, sys.argv[3:])\n"
)


class Server:
    """A server process on a socket of ours, as an agent has it. ``hold_s``: 0 for the usual time."""

    def __init__(self, *hosts: str, hold_s: float = 0.0) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=512) as held:
            self.port = held.getsockname()[1]
            fd = held.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(fd), str(hold_s), *hosts], pass_fds=[fd]
            )

    def ask(self, verb: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(verb, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def send_raw(self, data: bytes) -> bytes:
        """Send bytes and no more, and return the beginning of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as sock:
            try:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                return sock.recv(65536)
            except OSError:
                return b""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Tests have keys of their own, or put them first."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_what_is_put_can_be_had_until_it_is_deleted(server: Server) -> None:
    value = os.urandom(100_000)
    assert server.ask("PUT", f"/{TOKEN}/a-0:1/global/0", value) == (200, b"")
    assert server.ask("GET", f"/{TOKEN}/a-0:1/global/0") == (200, value)
    assert server.ask("GET", f"/{TOKEN}/a-1:1/global/0")[0] == 404, "another attempt's"
    assert server.ask("DELETE", f"/{TOKEN}/a-0:1/global/0") == (200, b"")
    assert server.ask("GET", f"/{TOKEN}/a-0:1/global/0")[0] == 404


def test_a_get_is_held_until_the_key_is_put() -> None:
    server = Server(hold_s=600)
    request = f"GET /{TOKEN}/global/7 HTTP/1.1\r\n\r\n".encode()
    held = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(5)]
    try:
        for sock in held:
            sock.sendall(request)
        assert server.ask("DELETE", f"/{TOKEN}/global/9")[0] == 200  # by now it has read them
        assert select.select(held, [], [], 0)[0] == []
        assert server.ask("PUT", f"/{TOKEN}/global/7", b"here") == (200, b"")
        answers = [sock.makefile("rb").read() for sock in held]
    finally:
        for sock in held:
            sock.close()
        server.close()
    assert [(answer[:12], answer[-4:]) for answer in answers] == [(b"HTTP/1.0 200", b"here")] * 5


def test_a_get_of_a_missing_key_is_answered_in_the_end(server: Server) -> None:
    """The client has a deadline of its own, and asks again."""
    assert server.ask("GET", f"/{TOKEN}/global/8")[0] == 404


@pytest.mark.parametrize("path", ["/wrong/global/0", "/global/0", "/", f"/{TOKEN}", f"/{TOKEN}/"])
def test_a_client_without_the_secret_changes_nothing(server: Server, path: str) -> None:
    server.ask("PUT", f"/{TOKEN}/global/0", b"mine")
    for verb in ("PUT", "GET", "DELETE"):
        assert server.ask(verb, path, b"theirs") == (403, b"")
    assert server.ask("GET", f"/{TOKEN}/global/0") == (200, b"mine")


def test_other_hosts_are_refused() -> None:
    server = Server("10.0.0.1", "10.0.0.2")
    try:
        assert server.send_raw(f"GET /{TOKEN}/global/0 HTTP/1.1\r\n\r\n".encode()) == b""
    finally:
        server.close()


@pytest.mark.parametrize("length", [-5, 99999999999])
def test_a_value_has_a_bound(server: Server, length: int) -> None:
    head = f"PUT /{TOKEN}/a HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
    assert server.send_raw(head.encode()).startswith(b"HTTP/1.0 413")


def test_half_a_value_is_not_kept(server: Server) -> None:
    head = f"PUT /{TOKEN}/half HTTP/1.1\r\nContent-Length: 8\r\n\r\n"
    assert server.send_raw(head.encode() + b"half") == b""
    assert server.ask("GET", f"/{TOKEN}/half")[0] == 404


@pytest.mark.parametrize(
    "noise",
    [
        random.Random(7).randbytes(200) + b"\r\n\r\n",
        b"\r\n\r\n",
        f"PUT /{TOKEN}/a HTTP/1.1\r\nContent-Length: five\r\n\r\n".encode(),
        f"PATCH /{TOKEN}/a HTTP/1.1\r\n\r\n".encode(),
        b"x" * 100_000,
        b"PUT /wrong/a HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + b"x" * 1000,
    ],
)
def test_noise_does_no_harm(server: Server, noise: bytes) -> None:
    assert b" 200 " not in server.send_raw(noise)
    assert server.ask("PUT", f"/{TOKEN}/global/0", b"x")[0] == 200


def test_silent_connections_make_room_for_new_ones(own_server: Server) -> None:
    """Sooner than by their silence: otherwise other users could keep ranks from meeting."""
    address = ("127.0.0.1", own_server.port)
    silent = [socket.create_connection(address, PATIENCE_S) for _ in range(600)]
    try:
        assert own_server.ask("PUT", f"/{TOKEN}/global/0", b"x")[0] == 200
        assert silent[0].recv(1) == b"", "the oldest is closed"
        silent[-1].sendall(f"GET /{TOKEN}/global/0 HTTP/1.1\r\n\r\n".encode())
        assert b" 200" in silent[-1].recv(100), "there is room for the newest"
    finally:
        for sock in silent:
            sock.close()


def test_many_ranks_meet(server: Server) -> None:
    """Each puts its address and asks for all others', one after the other, as Gloo does."""
    n = 32

    def meet(rank: int) -> int:
        server.ask("PUT", f"/{TOKEN}/meet/{rank}", str(rank).encode())
        found = 0
        for peer in range(n):
            while (answer := server.ask("GET", f"/{TOKEN}/meet/{peer}"))[0] == 404:
                pass
            found += int(answer[1])
        return found

    with ThreadPoolExecutor(n) as pool:
        assert set(pool.map(meet, range(n))) == {sum(range(n))}


def test_the_environment_of_unequal_hosts() -> None:
    """Two ranks here, one there, three elsewhere; two machines of one name."""
    n_ranks = (2, 1, 3)
    slots: list[Slot] = []
    for node, (host, count) in enumerate(zip(("a", "b", "b"), n_ranks, strict=True)):
        for local_rank in range(count):
            slots.append(
                Slot(
                    len(slots),
                    local_rank,
                    node,
                    6,
                    count,
                    3,
                    host,
                    None,
                    f"10.0.0.{node}",
                    "eth0" if node else "",
                )
            )
    meeting = HorovodRendezvous().prepare(
        Plan(tuple(slots)), "10.0.0.0", 4321, spec=JobSpec(np=6), gang="a1b2", attempt=1
    )

    def column(name: str) -> list[str]:
        return [environment.get(f"HOROVOD_{name}", "") for environment in meeting.environments]

    assert column("RANK") == ["0", "1", "2", "3", "4", "5"]
    assert column("SIZE") == ["6"] * 6
    assert column("LOCAL_RANK") == ["0", "1", "0", "0", "1", "2"]
    assert column("LOCAL_SIZE") == ["2", "2", "1", "3", "3", "3"]
    assert column("CROSS_RANK") == ["0", "0", "1", "2", "1", "0"]
    assert column("CROSS_SIZE") == ["3", "2", "3", "3", "2", "1"]
    assert len(set(column("HOSTNAME"))) == 3
    assert column("GLOO_IFACE") == ["", "", "eth0", "eth0", "eth0", "eth0"]
    assert {*column("CONTROLLER"), *column("CPU_OPERATIONS")} == {"gloo"}
    assert set(column("ELASTIC")) == {"0"}, "whatever another launcher has set"
    assert set(column("GLOO_RENDEZVOUS_PORT")) == {"4321"}
    first = meeting.environments[0]
    assert (first["RANK"], first["WORLD_SIZE"], first["GROUP_WORLD_SIZE"]) == ("0", "6", "3")
    assert "MASTER_ADDR" not in first
    address = first["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    assert address.startswith("10.0.0.0:4321/") and address.endswith("/a1b2-1")
    assert meeting.service is not None
    assert meeting.service.options["hosts"] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]


def test_hosts_without_ipv4_are_refused() -> None:
    slots = tuple(Slot(n, n, 0, 2, 2, 1, "here", address="fd00::1") for n in range(2))
    with pytest.raises(
        PlacementError, match="IPv4 only, but the other hosts know host here by fd00::1"
    ):
        HorovodRendezvous().prepare(
            Plan(slots), "fd00::1", 4321, spec=JobSpec(), gang="a1b2", attempt=0
        )


def bound_of(spec: JobSpec) -> str:
    """Return how long Gloo waits, for ranks to come and in every collective."""
    plan = Plan((Slot(0, 0, 0, 1, 1, 1, "a"),))
    meeting = HorovodRendezvous().prepare(
        plan, "127.0.0.1", 4321, spec=spec, gang="a1b2", attempt=0
    )
    return meeting.environments[0]["HOROVOD_GLOO_TIMEOUT_SECONDS"]


def test_a_bound_of_the_users_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = HorovodRendezvous()
    assert rendezvous.join_timeout_s(JobSpec(start_timeout_s=7)) == 7
    given = JobSpec(env=(("HOROVOD_GLOO_TIMEOUT_SECONDS", "600"),))
    assert rendezvous.join_timeout_s(given) == 597, "before Gloo aborts those who wait"
    assert bound_of(given) == "600"
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "20")
    assert bound_of(JobSpec()) == "20"


@pytest.mark.parametrize("given", ["abc", "0", "-1", "1.5", "", "1_0", "3000000000"])
def test_an_invalid_bound_is_refused_before_a_rank_starts(given: str) -> None:
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": given}
    with pytest.raises(PlacementError, match=f"SECONDS should be .* got '{given}'"):
        hm.launch(print, np=2, rendezvous="horovod", env=env)


def test_a_short_start_does_not_shorten_collectives() -> None:
    assert bound_of(JobSpec(start_timeout_s=3)) == "120"
    assert bound_of(JobSpec(start_timeout_s=600)) == "603"
    assert int(bound_of(JobSpec(start_timeout_s=math.inf))) in range(10**8, 2**31)
