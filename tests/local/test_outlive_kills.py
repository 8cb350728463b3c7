"""Processes of an outliving gang, or of its notebook, are killed at random moments: training goes on, or
leaves a checkpoint.

``test_outlive`` has the restart and the death of a kernel and the death of an owner alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import websocket  # type: ignore[import-untyped]

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes, run_log
from hydrogen_magic.driver.owner.connection import attach
from hydrogen_magic.driver.state.gang_state import GangState, replay
from tests import leaks
from tests.browser.server import Server
from tests.gangs import PATIENCE_S, wait_until
from tests.kernels import NEWEST

STEPS = 100
TRAINING = f"""%%distributed --np 2 --cpu --with jax --retries 2 --outlive
import time
import hydrogen_magic as hm
began = hm.checkpoint.load() or 0
with open(f"{{folder}}/steps-{{hm.rank()}}", "a", buffering=1) as done:
    for step in range(began, {STEPS}):
        hm.log(step=step, loss=1 / (step + 1))
        hm.checkpoint.save(step + 1)
        print(step, file=done)
        time.sleep(0.02)
began
"""
"""With JAX, which ranks import on first use: each of the forty agents would import torch."""
VICTIMS = ("kernel", "agent", "rank", "owner", "tab", "server")
_LOOK_S = 0.5
"""Interval of looks at every process of the machine, each of which takes tens of milliseconds."""
_PROGRAMS = {
    "owner": "hydrogen_magic.driver.owner.process",
    "agent": "hydrogen_magic.node.agent.__main__",
    "kernel": "ipykernel",
}
"""What is in their command lines."""


class Tab:
    """What a browser's tab has of a notebook: a connection to its kernel, by way of the server."""

    def __init__(self, server: Server, kernel_id: str) -> None:
        address = server.address(f"api/kernels/{kernel_id}/channels")
        self._socket: Any = websocket.create_connection(
            address.replace("http", "ws", 1), timeout=PATIENCE_S
        )

    def run(self, code: str) -> None:
        """Send a cell, and return at once."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
        header |= {"username": "", "session": "tab"}
        message = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell"}
        self._socket.send(json.dumps({**message, "content": {"code": code, "silent": False}}))

    def crash(self) -> None:
        """End the connection abruptly, as a browser that is killed."""
        at_once = struct.pack("ii", 1, 0)
        self._socket.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self._socket.sock.close()


class Killed:
    """An outliving gang of a notebook with a server, a kernel and a tab, and a run log of its own."""

    def __init__(self, folder: Path, server: Server) -> None:
        folder.mkdir()
        self.folder = folder
        self.home = str(folder / "home")
        self._server = server
        self._kernel = server.new_kernel(NEWEST, {"HYDROGEN_MAGIC_HOME": self.home})
        self._tab = Tab(server, self._kernel)
        self._tab.run(f"%load_ext hydrogen_magic\nfolder = {str(folder)!r}")
        self._tab.run(TRAINING)

    def kill(self, victim: str) -> None:
        """Kill one of its processes; wait for a moment in which it has this one."""
        if victim == "tab":
            self._tab.crash()
        elif victim == "server":
            os.kill(self._server.pid, signal.SIGKILL)
            self._server.stop()
        else:
            pids: list[int] = []

            def is_there() -> bool:
                pids[:] = self.pids_of(victim)
                return bool(pids)

            wait_until(is_there)
            processes.send_signal(pids[0], signal.SIGKILL)

    def pids_of(self, victim: str) -> list[int]:
        """Return the pids of its kernel, its owner, its agent, or its ranks."""
        if victim == "rank":
            ranks = [rank for state in _recorded() for rank in state.ranks]
            return [rank.pid for rank in ranks if rank.pid is not None and not rank.is_over]
        time.sleep(0.1)  # it looks at every process of the machine
        pids = leaks.marked("HYDROGEN_MAGIC_HOME", self.home)
        return [pid for pid in pids if _PROGRAMS[victim] in leaks.command(pid)]

    def wait_until_gone(self, within_s: float = PATIENCE_S) -> None:
        """Wait for the end of the gang, if there is one; end the kernel, and wait for all the rest."""

        def has_ended() -> bool:
            time.sleep(_LOOK_S)
            return not self.pids_of("owner") and not self.pids_of("agent")

        wait_until(has_ended, within_s)
        if self._server.is_alive:
            wait_until(self._is_kernel_ended, within_s)

        def is_gone() -> bool:
            time.sleep(_LOOK_S)
            return not leaks.marked("HYDROGEN_MAGIC_HOME", self.home)

        wait_until(is_gone, within_s)

    def _is_kernel_ended(self) -> bool:
        """End the kernel; the server refuses that while it starts one again that was killed."""
        try:
            self._server.request("DELETE", f"kernels/{self._kernel}")
        except HTTPError as error:
            return error.code == HTTPStatus.NOT_FOUND
        return True


def _recorded() -> list[GangState]:
    return [replay(run_log.read(found.gang)) for found in run_log.recent()]


def steps_of(events: list[ev.Event], rank: int, attempts: Collection[int]) -> list[int]:
    """Return the steps that a rank logged in these attempts."""
    steps: list[int] = []
    current = 0
    for event in events:
        if isinstance(event, ev.AttemptStarted):
            current = event.attempt
        elif isinstance(event, ev.Metrics) and event.rank == rank and current in attempts:
            steps += event.steps
    return steps


def lost_steps(folder: Path, events: list[ev.Event]) -> dict[int, list[int]]:
    """Return each rank's steps, all attempts together, that it has finished and the record lacks."""
    lost = {}
    for rank in range(2):
        done = folder / f"steps-{rank}"
        steps = Counter(map(int, done.read_text().split() if done.exists() else []))
        lost[rank] = [*(steps - Counter(steps_of(events, rank, range(3)))).elements()]
    return lost


def check(gang_id: str, killed: Killed, victim: str) -> None:
    """Look at the gang as a new kernel does."""
    gang = attach(gang_id)
    state = gang.snapshot()
    assert lost_steps(killed.folder, gang.events()) == {0: [], 1: []}
    logged = steps_of(gang.events(), 0, [state.attempt])
    assert logged == list(range(logged[0], logged[-1] + 1)) if logged else victim == "owner"
    if victim == "owner" and state.state == "STOPPED":
        assert state.reason in (ev.OWNER_ENDED, "its owner process ended unexpectedly")
        saved = gang.folder / "checkpoints"
        assert saved.exists() or not logged or logged[-1] == logged[0], list(gang.folder.iterdir())
        return
    assert (state.state, logged[-1]) == ("SUCCEEDED", STEPS - 1), state.reason
    assert gang.results == [gang.result, gang.results[1]] and gang.result == logged[0]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """Return what starts a server; all of them end with the test."""
    started: list[Server] = []

    def start() -> Server:
        started.append(Server(tmp_path / f"server-{len(started)}", has_pages=False))
        return started[-1]

    yield start
    for server in started:
        server.stop()


# They wait most of the time: one worker would take ten minutes.
_SEEDS = [pytest.param(seed, marks=pytest.mark.xdist_group(f"kills {seed}")) for seed in range(7)]


@pytest.mark.exhaustive
@pytest.mark.jax
@pytest.mark.parametrize("seed", _SEEDS)
def test_each_is_killed_at_a_random_moment(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: Callable[[], Server]
) -> None:
    moments = random.Random(seed)
    server = start_server()
    for number, victim in enumerate(moments.sample(VICTIMS, len(VICTIMS))):
        if not server.is_alive:
            server = start_server()
        killed = Killed(tmp_path / str(number), server)
        monkeypatch.setenv("HYDROGEN_MAGIC_HOME", killed.home)
        if number > 0 or victim == "tab":  # else it may be a moment of the launch
            wait_until(run_log.recent)
        time.sleep(moments.uniform(0, 2))
        killed.kill(victim)
        killed.wait_until_gone()
        print(number, victim, [(state.state, state.attempt) for state in _recorded()])
        for found in run_log.recent():  # none if its kernel was killed before the launch
            check(found.gang, killed, victim)
