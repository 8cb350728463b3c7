"""When a rank is killed after its cell: once it does not get any further."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from hydrogen_magic.core import processes
from hydrogen_magic.node.agent import exit_watch
from hydrogen_magic.node.agent.exit_watch import FinishWatch


class Usage:
    """Takes the place of /proc and of the clock."""

    now_s = 0.0
    ticks = written = 0
    is_connected = False
    is_in_storage = False

    def __call__(self, pid: int) -> tuple[int, int]:
        return self.ticks, self.written


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> Usage:
    fake = Usage()
    monkeypatch.setattr(exit_watch, "_usage", fake)
    monkeypatch.setattr(exit_watch, "time", SimpleNamespace(monotonic=lambda: fake.now_s))
    monkeypatch.setattr(processes, "family", lambda pid: {pid})  # for pid 1, all of the machine
    monkeypatch.setattr(processes, "is_sending", lambda pids: False)
    monkeypatch.setattr(processes, "is_in_storage", lambda pids: fake.is_in_storage)
    monkeypatch.setattr(processes, "are_connected", lambda pids, spare: fake.is_connected)
    return fake


def killed_at(
    usage: Usage, *, ticks: int, written: int, delivered: bool, is_on_one_host: bool = True
) -> int:
    """Return after how many seconds of this behaviour the rank is killed; 700 for not at all."""
    watch = FinishWatch(1)
    watch.is_on_one_host = is_on_one_host
    usage.now_s = 0.0
    watch.begin()
    for second in range(1, 700):
        usage.now_s = float(second)
        if delivered and second == 1:
            watch.delivered()
        usage.ticks += ticks
        usage.written += written
        if watch.hang():
            return second
    return 700


@pytest.mark.parametrize(
    ("ticks", "written", "delivered", "expected"),
    [
        (0, 0, True, 6),  # a thread that waits for ever
        (100, 0, True, 62),  # a loop without end
        (0, 4096, True, 700),  # an upload
        (100, 0, False, 700),  # packing a large result
        (0, 0, False, 601),  # __getstate__ that never returns
    ],
)
def test_it_is_killed_when_nothing_moves(
    usage: Usage, ticks: int, written: int, delivered: bool, expected: int
) -> None:
    assert killed_at(usage, ticks=ticks, written=written, delivered=delivered) == expected


def test_the_limit_for_its_exit_begins_with_its_result(usage: Usage) -> None:
    watch = FinishWatch(1)
    watch.begin()
    usage.now_s = 500.0
    assert watch.hang() == ""
    usage.now_s = 501.0
    watch.delivered()
    assert watch.hang() == ""
    usage.now_s = 506.0
    watch.threads = [f"t{n}" for n in range(5)]
    found = "did not exit within 5 s of its result (5 threads still running: t0, t1, t2, t3 and 1 more; "
    assert found in watch.hang()
    assert watch.hang() == ""


def test_a_rank_that_is_connected_to_a_server_may_wait_longer(usage: Usage) -> None:
    usage.is_connected = True
    assert killed_at(usage, ticks=0, written=0, delivered=True) == 62
    found = killed_at(usage, ticks=0, written=0, delivered=True, is_on_one_host=False)
    assert found == 6


def test_a_rank_that_waits_for_a_disk_is_writing(usage: Usage) -> None:
    """In ``fsync`` it uses no CPU time and writes no more bytes; a file server that is gone never answers."""
    usage.is_in_storage = True
    assert killed_at(usage, ticks=0, written=0, delivered=True) == 604


def test_the_state_of_each_thread_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "read", lambda path: b"1 (a) b) S 1")
    assert not processes.is_in_storage({os.getpid()})
    monkeypatch.setattr(processes, "read", lambda path: b"1 (a) b) D 1")
    assert processes.is_in_storage({os.getpid()})


def test_a_connection_to_a_process_of_the_gang_is_none_to_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, of_system = {os.getpid()}, processes._tcp_sockets
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = f"{server.getsockname()[1]:04X}"
        monkeypatch.setattr(
            processes, "_tcp_sockets", lambda: [one for one in of_system() if port in one.ports]
        )
        assert not processes.are_connected(own, ())
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            assert processes.are_connected(own, ())
            assert not processes.are_connected(own, own)
