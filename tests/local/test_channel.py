"""The kernel's only listener: it admits agents of this kernel and nothing else."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from hydrogen_magic.core.messages import (
    AgentCommand,
    Heartbeat,
    Ping,
    Pong,
    Quit,
    StopRanks,
    decode,
    encode,
)
from hydrogen_magic.transport.channel import AgentKeys, AgentLink, Hub
from tests.gangs import PATIENCE_S, wait_until

HUB = """
import os, signal, sys
from hydrogen_magic.transport.channel import Hub
print(Hub()._directory, flush=True)
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def admitted(hub: Hub) -> tuple[AgentKeys, queue.Queue[object]]:
    received: queue.Queue[object] = queue.Queue()

    async def admit() -> AgentKeys:
        return hub.admit(lambda message, data: received.put(message))

    return asyncio.run_coroutine_threadsafe(admit(), hub.loop).result(PATIENCE_S), received


def revoke(hub: Hub, keys: AgentKeys) -> None:
    """Dismiss the agent; messages that come later are not from one of ours."""

    async def do() -> None:
        hub.revoke_key(keys.key)

    asyncio.run_coroutine_threadsafe(do(), hub.loop).result(PATIENCE_S)


def test_a_notebook_that_logs_everything_sees_no_credentials(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    keys, received = admitted(hub)
    connect(keys, until=lambda: received.get(timeout=PATIENCE_S) is not None)
    assert "CURVE" not in caplog.text


def connect(*agents: AgentKeys, until: Callable[[], bool]) -> None:
    """Connect as agents, say hello, and stay as long as ``until`` takes."""

    async def talk() -> None:
        with ExitStack() as stack:
            for keys in agents:
                link = AgentLink(keys.endpoint, keys.server_key, keys.secret)
                stack.enter_context(closing(link)).send(Pong())
            assert await asyncio.to_thread(until)

    asyncio.run(talk())


def socket_path(keys: AgentKeys) -> str:
    return keys.endpoint.removeprefix("ipc://")


def test_an_admitted_agent_is_heard_and_answered(hub: Hub) -> None:
    keys, received = admitted(hub)

    async def talk() -> AgentCommand:
        with closing(AgentLink(keys.endpoint, keys.server_key, keys.secret)) as link:
            link.send(Pong())
            assert await asyncio.to_thread(received.get, True, PATIENCE_S) == encode(Pong())
            hub.loop.call_soon_threadsafe(hub.send, keys.key, StopRanks("cafe"))
            answer, _ = await asyncio.wait_for(link.receive(), PATIENCE_S)
            return decode(answer, AgentCommand)

    assert asyncio.run(talk()) == StopRanks("cafe")


def test_a_system_without_scheduling_policies_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with musl, or in a sandbox that forbids the calls."""

    def has_none(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "sched_getscheduler", has_none)
    hub = Hub()
    try:
        admitted(hub)
    finally:
        hub.close()


def test_messages_that_come_too_fast_delay_no_stop(hub: Hub) -> None:
    """A Stop is a callback on the hub's loop; messages that wait must not keep it waiting."""
    n_messages = 1000
    seen: list[str] = []

    def take_slowly(message: object, data: memoryview | None) -> None:
        time.sleep(0.001)
        seen.append("message")

    async def admit() -> AgentKeys:
        return hub.admit(take_slowly)

    keys = asyncio.run_coroutine_threadsafe(admit(), hub.loop).result(PATIENCE_S)

    async def flood() -> None:
        with closing(AgentLink(keys.endpoint, keys.server_key, keys.secret)) as link:
            for _ in range(n_messages):
                link.send(Pong())
            await asyncio.to_thread(wait_until, lambda: len(seen) > 20)
            hub.loop.call_soon_threadsafe(seen.append, "stop")
            await asyncio.to_thread(wait_until, lambda: len(seen) > n_messages)

    asyncio.run(flood())
    assert seen.index("stop") < n_messages // 2


def test_parts_that_come_too_fast_delay_nothing_on_an_agent(hub: Hub) -> None:
    """Heartbeats, pings of tasks and Stop: an agent may write each part to a slow disk."""
    n_messages = 200
    turns_after: list[int] = []
    n_taken = 0

    async def turn() -> None:
        while True:
            turns_after.append(n_taken)
            await asyncio.sleep(0)

    async def take_slowly() -> None:
        nonlocal n_taken
        keys, received = await asyncio.to_thread(admitted, hub)
        with closing(AgentLink(keys.endpoint, keys.server_key, keys.secret)) as link:
            link.send(Pong())
            await asyncio.to_thread(received.get, True, PATIENCE_S)
            for _ in range(n_messages):
                hub.loop.call_soon_threadsafe(hub.send, keys.key, Ping())
            turning = asyncio.ensure_future(turn())
            for _ in range(n_messages):
                await link.receive()
                n_taken += 1
                time.sleep(0.005)
            turning.cancel()

    asyncio.run(take_slowly())
    gaps = [later - earlier for earlier, later in pairwise([*turns_after, n_messages])]
    assert max(gaps) < n_messages / 4, turns_after


def test_an_agent_that_was_dismissed_is_asked_to_quit(hub: Hub) -> None:
    keys, received = admitted(hub)

    async def talk() -> AgentCommand:
        with closing(AgentLink(keys.endpoint, keys.server_key, keys.secret)) as link:
            link.send(Pong())
            assert await asyncio.to_thread(received.get, True, PATIENCE_S) == encode(Pong())
            await asyncio.to_thread(revoke, hub, keys)
            link.send(Heartbeat(1.0))
            answer, _ = await asyncio.wait_for(link.receive(), PATIENCE_S)
            return decode(answer, AgentCommand)

    assert asyncio.run(talk()) == Quit()
    assert received.empty()


def test_an_agent_that_is_not_admitted_learns_it(hub: Hub) -> None:
    keys, _ = admitted(hub)
    revoke(hub, keys)

    async def knock() -> None:
        with closing(AgentLink(keys.endpoint, keys.server_key, keys.secret)) as link:
            await asyncio.wait_for(link.lost(), PATIENCE_S)

    asyncio.run(knock())


def test_an_agent_is_admitted_by_a_kernel_that_was_busy(hub: Hub) -> None:
    """For longer than a handshake may take: then ZeroMQ ends the connection, and tries again."""
    keys, received = admitted(hub)
    endpoint = asyncio.run_coroutine_threadsafe(listening(hub), hub.loop).result(PATIENCE_S)
    hub.loop.call_soon_threadsafe(time.sleep, 3.5)

    async def knock() -> None:
        with closing(AgentLink(endpoint, keys.server_key, keys.secret)) as link:
            lost = asyncio.ensure_future(link.lost())
            link.send(Pong())
            assert await asyncio.to_thread(received.get, True, PATIENCE_S) == encode(Pong())
            assert not lost.done()
            lost.cancel()

    asyncio.run(knock())


async def listening(hub: Hub) -> str:
    return hub.listen("127.0.0.1")


def test_strangers_are_not_heard(hub: Hub) -> None:
    """Nor a client without encryption; all have the same second for a message that must not arrive."""
    (keys, received), (once, heard) = admitted(hub), admitted(hub)
    revoke(hub, once)
    stranger = AgentKeys(keys.endpoint, keys.server_key.encode(), "00" * 32)  # right server key
    wrong_server = AgentKeys(keys.endpoint, zmq.curve_keypair()[0], keys.secret)

    def nobody_is_heard() -> bool:
        time.sleep(1.0)
        return received.empty() and heard.empty()

    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(keys.endpoint)
        plain.send(b'{"hello": 1}')
        connect(stranger, wrong_server, once, until=nobody_is_heard)


def test_garbage_and_silence_change_nothing(hub: Hub) -> None:
    """A megabyte of noise, an HTTP request, a TLS hello and 300 silent connections."""
    keys, received = admitted(hub)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for noise in (
        os.urandom(1 << 20),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(socket_path(keys))
            try:
                sock.sendall(noise)
            except (BrokenPipeError, ConnectionResetError):
                pass  # hung up on, as it should be
    silent = [socket.socket(socket.AF_UNIX) for _ in range(300)]
    try:
        for sock in silent:
            sock.settimeout(PATIENCE_S)
            sock.connect(socket_path(keys))
        connect(keys, until=lambda: received.get(timeout=PATIENCE_S) == encode(Pong()))
        last = silent[-1]
        while last.recv(4096):  # a greeting, then the end: dropped for want of a handshake
            pass
    finally:
        for sock in silent:
            sock.close()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 50 << 10


def test_the_directory_is_the_users_alone_and_goes(hub: Hub) -> None:
    keys, _ = admitted(hub)
    directory = Path(socket_path(keys)).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    hub.close()
    assert not directory.exists()


def test_directories_of_killed_kernels_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of other programs, of a kernel that runs, or of one that is about to listen."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setenv("TMPDIR", parent)
        monkeypatch.setattr(tempfile, "tempdir", parent)
        command = [sys.executable, "-c", HUB]
        dead = subprocess.run([*command, "dies"], capture_output=True, text=True, check=False)
        os.mkdir(f"{parent}/hydrogen-new")
        with subprocess.Popen(
            [*command, "stays"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as living:
            assert living.stdout is not None
            there = {dead.stdout.strip(), living.stdout.readline().strip()}
            for name in os.listdir(parent):
                os.utime(f"{parent}/{name}", (0, 0))
            Hub().close()
            left = {f"{parent}/{name}" for name in os.listdir(parent)}
            assert there - left == {dead.stdout.strip()} and len(left) == 2
            living.communicate()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becoming another user needs root"
)
def test_another_user_cannot_even_connect(hub: Hub) -> None:
    keys, received = admitted(hub)
    attack = textwrap.dedent(
        """
        import socket, sys
        try:
            socket.socket(socket.AF_UNIX).connect(sys.argv[1])
        except PermissionError:
            print("refused")
        """
    )
    command = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3"]
    if not Path(command[-1]).exists():
        command[-1] = sys.executable
    answer = subprocess.run(
        [*command, "-c", attack, socket_path(keys)], capture_output=True, text=True, cwd="/"
    )
    assert "refused" in answer.stdout, answer.stderr
    assert received.empty()
