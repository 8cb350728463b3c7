"""Ranks meet at a store that only their own user can reach."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.rendezvous.torch import TorchRendezvous
from hydrogen_magic.errors import RankFailedError, RendezvousError
from hydrogen_magic.node.rendezvous import torch_address
from tests import ranks
from tests.gangs import PATIENCE_S, ended, until, wait_until

pytestmark = pytest.mark.usefixtures("warm_agents")

CONNECT = textwrap.dedent(
    """
    import socket, sys
    try:
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60) as sock:
            sock.settimeout(float(sys.argv[2]))
            print("closed" if sock.recv(1) == b"" else "answered")
    except ConnectionResetError:  # at once, or while it waits
        print("closed")
    except TimeoutError:
        print("open")  # it waits for a request
    """
)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[str]:
    """The store's port while a gang trains, which must not be disturbed."""
    file = tmp_path / "port"
    gang = hm.launch(ranks.reduce_and_tell_port, str(file), np=2)
    found: list[str] = []  # both ranks write it: later it may be empty for a moment

    def is_known() -> bool:
        found.extend(filter(None, [file.read_text() if file.exists() else ""]))
        return bool(found)

    until(gang, is_known)
    yield found[0]
    assert gang.state == "RUNNING"
    gang.stop()
    ended(gang)


def connect(port: str, *prefix: str, waits_s: float = PATIENCE_S) -> str:
    """Return what becomes of another process's connection: closed, or open after ``waits_s``."""
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    answer = subprocess.run(
        [*prefix, python, "-c", CONNECT, port, str(waits_s)],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=2 * PATIENCE_S,
    )
    return answer.stdout.strip() or answer.stderr


def test_a_store_survives_noise_and_refuses_other_users(port: str) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
        with socket.create_connection(("127.0.0.1", int(port)), timeout=PATIENCE_S) as sock:
            sock.sendall(noise)
    silent = [socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S) for _ in range(100)]
    for sock in silent:
        sock.close()
    assert connect(port, waits_s=0.5) == "open", "its own user is admitted"
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root")
    assert connect(port, "setpriv", "--reuid=65534", "--clear-groups") == "closed"


CROWD = textwrap.dedent(
    """
    import select, socket, sys, time
    def connection():
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", int(sys.argv[1])))
        poll.register(sock, select.POLLIN)
        return sock
    poll = select.poll()
    crowd = {sock.fileno(): sock for sock in (connection() for _ in range(600))}
    print("here", flush=True)
    while True:  # for each connection that is closed, another one
        time.sleep(0.1)
        for fd, _ in poll.poll():
            poll.unregister(fd)
            crowd.pop(fd).close()
            sock = connection()
            crowd[sock.fileno()] = sock
    """
)


@pytest.mark.exhaustive  # other users are refused above
def test_a_crowd_of_strangers_does_not_keep_ranks_out() -> None:
    """Another user keeps 600 connections to the port that is reserved for the next gang."""
    meets_within_s = 12.0  # less than TCP takes to repeat a connection attempt four times
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root")
    local_agents.close()
    local_agents.warm_up(())
    wait_until(lambda: [agent for agent in local_agents.pool().idle if agent.is_ready])
    port = local_agents.pool().idle[0].held[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    crowd = subprocess.Popen(
        ["setpriv", "--reuid=65534", "--clear-groups", python, "-c", CROWD, str(port)],
        stdout=subprocess.PIPE,
        cwd="/",
    )
    try:
        assert crowd.stdout is not None and crowd.stdout.readline() == b"here\n"
        for _ in range(2):  # on a store of its own, and on one that was begun ahead
            assert ended(hm.launch(ranks.meet, meets_within_s, np=2)).results == [0, 1]
    finally:
        crowd.kill()
        crowd.wait()


def test_a_store_that_dies_ends_the_gang() -> None:
    gang = hm.launch(ranks.hang, "collective", np=2)
    until(
        gang,
        lambda: (
            gang.ranks and all(rank.phase == "running" for rank in gang.ranks) and bool(stores())
        ),
    )
    for pid in stores():
        os.kill(pid, signal.SIGKILL)
    ended(gang)
    with pytest.raises(RendezvousError, match=r"serve_store\) exited unexpectedly \(SIGKILL\)"):
        gang.raise_for_state()


def test_a_server_that_cannot_start_ends_its_process() -> None:
    """Which ends the gang: otherwise ranks would wait for it until their timeout."""
    code = """
import sys
from hydrogen_magic.node.rendezvous.connection_guard import serve_guarded
def start(fd): raise NotImplementedError("cannot listen there")
serve_guarded(int(sys.argv[1]), start)
"""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = subprocess.Popen(
            [sys.executable, "-c", code, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stderr=subprocess.PIPE,
        )
        with socket.create_connection(listening.getsockname(), PATIENCE_S):
            _, printed = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 1 and b"cannot listen there" in printed


def stores() -> list[int]:
    """Return our processes in a network of their own."""
    here = os.readlink("/proc/self/ns/net")
    found: list[int] = []
    for process in processes.descendants(os.getpid()):
        with suppress(OSError):  # it may have exited
            if os.readlink(f"/proc/{process.pid}/ns/net") != here:
                found.append(process.pid)
    return found


def test_a_rank_that_exits_early_does_not_break_the_joins_of_others() -> None:
    assert hm.run(ranks.join, np=8, start_timeout=PATIENCE_S) == (8, False)


def test_ranks_that_join_without_one_that_has_ended_are_released(tmp_path: Path) -> None:
    finished = "rank 0 finished before ranks 1 and 2 had joined the process group"
    with pytest.raises(RankFailedError, match=finished) as caught:
        hm.run(ranks.join_without_first, np=3)
    assert "rank 1 was waiting here:" in caught.value.report
    assert hm.run(ranks.join_apart, str(tmp_path / "store"), np=3) == -1, "a group of their own"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(("by_url", "total"), [(False, 4.0), (True, 2.0)])
def test_ranks_meet_at_an_address_of_their_code(by_url: bool, total: float) -> None:
    port = free_port()
    assert hm.run(ranks.meet_as_in_tutorials, port, by_url=by_url, np=2) == total


@pytest.mark.parametrize(
    "start_method",
    [pytest.param("spawn", marks=pytest.mark.exhaustive), "fork"],  # which imports torch anew
)
def test_processes_that_a_rank_starts_meet_apart_from_the_gang(
    start_method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hm.run(ranks.meet_as_children, start_method, free_port(), np=1)
    apart = "starts 2 processes of its own"
    assert apart not in capsys.readouterr().out
    hm.run(ranks.meet_as_children, start_method, np=2)
    assert capsys.readouterr().out.count(f"rank 0: {apart}") == 1
    hm.run(ranks.meet_as_children, start_method, with_ranks_port=True, np=2)


def test_a_rank_meets_a_process_that_it_has_started() -> None:
    hm.run(ranks.meet_with_child, free_port(), np=1)


def test_the_start_of_a_process_changes_no_variable_of_the_rank() -> None:
    assert len(hm.run(ranks.spawn_from_thread, np=1)) == 1


def test_a_thread_may_join_after_the_cell() -> None:
    hm.run(ranks.join_in_thread, np=2)


def test_all_ranks_join_after_some_have_had_a_group_of_their_own() -> None:
    assert hm.run(ranks.join_after_a_smaller_group, np=2) == 2


def test_launchers_on_each_rank_do_not_share_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with pytest.raises(RankFailedError, match=f"each of the 3 ranks starts .* meet at port {port}"):
        hm.run(ranks.launch_by_torchs_agent, port, np=3)
    assert "starts 2 processes of its own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("port", "text"),
    [
        (
            "12355",
            "each of the 2 ranks starts processes that meet at port 12355: launch with --np 1",
        ),
        ("200", "all join with rank 0 at port 300: launch as many ranks"),
    ],
)
def test_processes_that_cannot_open_a_store_say_what_to_do(
    port: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_use(url: str) -> Iterator[None]:
        raise RuntimeError("code: -98, name: EADDRINUSE")
        yield

    monkeypatch.setenv("HYDROGEN_MAGIC_LEFT_STORE", "2 200 300")
    with pytest.raises(RuntimeError, match=text):
        next(torch_address.at_any_store(in_use)(f"tcp://localhost:{port}"))


def test_ranks_of_several_hosts_do_not_wait_at_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {torch_address.STORE: "10.0.0.1:1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    stores = torch_address.at_any_store(lambda url: iter(()))
    with pytest.raises(ValueError, match=r"localhost:29500, which ranks on other hosts cannot"):
        next(stores("tcp://localhost:29500"))


def test_a_group_of_more_ranks_than_the_gang_is_refused() -> None:
    with pytest.raises(RankFailedError, match=r"world_size=3.* this gang of 2 .* --np 3"):
        hm.run(ranks.meet_with_one_more, np=2)


def test_ranks_that_join_with_the_number_of_others_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert hm.run(ranks.join_in_reverse, np=2) == 1
    assert "rank 0: called init_process_group(rank=1); if two" in capsys.readouterr().out


def test_the_environment_of_two_hosts() -> None:
    slots = tuple(
        Slot(rank, rank % 2, rank // 2, 4, 2, 2, f"host{rank // 2}", None) for rank in range(4)
    )
    meeting = TorchRendezvous().prepare(
        Plan(slots), "10.0.0.1", 4321, spec=JobSpec(np=4, retries=2), gang="a1b2", attempt=1
    )
    last = meeting.environments[3]
    assert (last["RANK"], last["LOCAL_RANK"], last["GROUP_RANK"]) == ("3", "1", "1")
    assert (last["MASTER_ADDR"], last["MASTER_PORT"]) == ("10.0.0.1", "4321")
    assert "GLOO_SOCKET_IFNAME" not in last, "loopback does not reach the other host"
