"""Gangs of tests: wait for what they do, for their end, and for the end of all their processes."""

from __future__ import annotations

import faulthandler
import io
import os
import random
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.remote import packaging, rank_assignment
from hydrogen_magic.errors import RankFailedError
from tests import seconds

PATIENCE_S = 60.0
"""Bound of every wait. What a test waits for takes a second at most; on a machine that is busy with
other tests it takes several."""
_FIRST_S, _LAST_S = 0.01, 0.05
"""Pauses between two looks: they grow, since what takes long may come a little later too."""


def pauses() -> Iterator[float]:
    """Yield how long to wait before each next look."""
    pause_s = _FIRST_S
    while True:
        yield pause_s
        pause_s = min(_LAST_S, 1.2 * pause_s)


def wait_until(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait for a condition. Its failure shows where every thread is."""
    deadline, pause_s = time.monotonic() + within_s, pauses()
    while not holds():
        if time.monotonic() > deadline:
            faulthandler.dump_traceback(sys.__stderr__)
            pytest.fail(f"not within {within_s} s")
        time.sleep(next(pause_s))


def until(gang: Gang, holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait for a condition that must hold while the gang runs."""
    deadline, pause_s = time.monotonic() + within_s, pauses()
    while not holds():
        assert not gang.wait(next(pause_s)), f"it ended early: {gang.snapshot().reason}"
        assert time.monotonic() < deadline, gang.snapshot()


def ended(gang: Gang, within_s: float = PATIENCE_S) -> Gang:
    """Wait for the gang's end; fail, and kill it, after ``within_s`` seconds."""
    if not gang.wait(within_s):
        gang.stop(kill=True)
        gang.wait(10)
        pytest.fail(f"still running after {within_s} s: {gang.snapshot()}")
    return gang


def failure_of(gang: Gang) -> RankFailedError:
    """Wait for the gang's end; return the error of the rank that it blames."""
    with pytest.raises(RankFailedError) as caught:
        ended(gang).raise_for_state()
    return caught.value


def said(gang: Gang, text: str) -> Callable[[], object]:
    """Return a condition: every rank has printed ``text``, and its pid is known.

    Its output may arrive before the event of its start.
    """
    return lambda: (
        gang.ranks and all(r.pid is not None and text in gang.logs[r.rank] for r in gang.ranks)
    )


# ── processes ──


def family_of(gang: Gang) -> list[int]:
    """Return the pids of all ranks and of their descendants."""
    pids = [rank.pid for rank in gang.ranks if rank.pid is not None]
    return [*pids, *(child.pid for pid in pids for child in processes.descendants(pid))]


def alive(pids: Iterable[int]) -> list[int]:
    """Return those of ``pids`` that run; zombies do not."""
    return [process.pid for process in processes.processes(list(pids)) if not process.has_exited]


def wait_until_gone(pids: Iterable[int], within_s: float = PATIENCE_S) -> None:
    """Wait for the end of processes."""
    pids = list(pids)
    deadline, pause_s = time.monotonic() + within_s, pauses()
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still running after {within_s} s: {left}"
        time.sleep(next(pause_s))


# ── what a gang's events say ──


def spans_of(gang: Gang, track: str) -> dict[int, list[tuple[str, float, float, int]]]:
    """Return rank -> (name, start, end, depth) of a track, times in seconds."""
    found: dict[int, list[tuple[str, float, float, int]]] = {}
    for event in gang.events():
        if isinstance(event, ev.Spans) and event.track == track:
            found.setdefault(event.rank, []).extend(seconds.rows_of(event))
    return found


def notices_of(gang: Gang) -> str:
    """Return the texts of a gang's notices, one a line."""
    return "\n".join(event.text for event in gang.events() if isinstance(event, ev.Notice))


def noticed_after_s(gang: Gang, text: str) -> float:
    """Return how long after Kill a notice with ``text`` came."""
    (killed_s,) = [e.at_s for e in gang.events() if isinstance(e, ev.StopRequested) and e.kill]
    found = [e for e in gang.events() if isinstance(e, ev.Notice) and text in e.text]
    return found[0].at_s - killed_s


def until_reported_again(gang: Gang, n: int) -> None:
    """Wait until every rank has sent ``n`` more batches of events; each of them counts steps."""
    before = len(gang.events())

    def reports() -> list[int]:
        return [event.rank for event in gang.events(before) if isinstance(event, ev.Steps)]

    until(gang, lambda: all(reports().count(rank.rank) >= n for rank in gang.ranks))


def agent_pids(kernel: int | None = None) -> list[int]:
    """Return the processes of a kernel's agents on this machine; of this one without its pid."""
    parent = os.getpid() if kernel is None else kernel
    return [
        process.pid
        for process in processes.processes()
        if process.ppid == parent
        and b"hydrogen_magic.node.agent" in processes.read(f"/proc/{process.pid}/cmdline")
    ]


def free_ports(count: int) -> list[int]:
    """Return adjacent ports that are free on loopback, below those that the system gives away."""
    while True:
        first = random.randrange(10_000, 30_000)
        ports = list(range(first, first + count))
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports


_HANGS = b"""
import signal
import time

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
"""


@contextmanager
def agents_that_hang() -> Iterator[None]:
    """Have agents that start on hosts hang when they get SIGUSR1; end those that run.

    They have the bytecode of all modules but the changed one, which takes a second off each start.
    """
    changed, link = io.BytesIO(), "hydrogen_magic/node/agent/remote_link.py"
    with (
        zipfile.ZipFile(io.BytesIO(packaging.compiled())) as old,
        zipfile.ZipFile(changed, "w") as new,
    ):
        for name in old.namelist():
            if "/__pycache__/remote_link." not in name:
                new.writestr(name, old.read(name) + (_HANGS if name == link else b""))
    local_agents.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packaging, "code", changed.getvalue)
        yield


@contextmanager
def hosts_on_other_disks(ranks: slice = slice(None)) -> Iterator[None]:
    """Have the hosts of these ranks seem to share no disk with the kernel."""

    def plan(*known: Any) -> rank_assignment.RankAssignment:
        found = meant(*known)
        return replace(found, on_other_disks=frozenset(found.placed[ranks]))

    meant = rank_assignment.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_assignment, "plan", plan)
        yield
