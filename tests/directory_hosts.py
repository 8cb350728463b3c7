"""A placement of tests on hosts that are directories of this machine: a small provider of hosts.

A task of a directory is a process that works there; its agent shares nothing with those of others.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hydrogen_magic.driver.placements.remote import (
    AgentLostError,
    HostProvider,
    HostTasks,
    RemoteAgentGroup,
    problem_of,
    task_error,
    unassigned,
)
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.plugins import Attempt, EventSink, JobSpec, Placement, Plan

ROOT = "TEST_DIRECTORY_HOSTS"
"""Variable: the folder of the hosts, which are its folders."""
ADDRESSES = ["127.0.0.1"]
"""Where the hosts' agents reach the kernel; none: where the package says."""
PREFIXES: dict[str, tuple[str, ...]] = {}
"""Name of a host -> command that runs the rest of its arguments there, if it is another machine."""
_POLL_S = 0.02


class DirectoryPlacement(Placement):
    """One rank in every directory."""

    on_this_machine = False

    def plan(self, spec: JobSpec) -> Plan:
        if spec.np > len(hosts()):
            raise PlacementError(f"np {spec.np}, there are {len(hosts())} directories")
        return unassigned(spec, "directories")

    def open(self, spec: JobSpec) -> RemoteAgentGroup:
        return RemoteAgentGroup(DirectoryHosts)


class DirectoryHosts(HostProvider):
    """See :class:`hydrogen_magic.driver.placements.remote.HostProvider`."""

    noun = "directories"

    def __init__(self) -> None:
        self._hosts: list[Path] = []
        self._running: list[subprocess.Popen[bytes]] = []

    async def acquire(self, attempt: Attempt, sink: EventSink) -> None:
        self._hosts = hosts()[: attempt.job.spec.np]

    async def start_agents(self, tasks: HostTasks, sink: EventSink) -> None:
        self._running = [_started(tasks, n, host) for n, host in enumerate(self._hosts)]
        while any(process.poll() is None for process in self._running):
            self._check()
            await asyncio.sleep(_POLL_S)
        self._check()

    def _check(self) -> None:
        for process, host in zip(self._running, self._hosts, strict=True):
            if process.poll():
                problem = problem_of((host / "stderr").read_text())
                ended = AgentLostError(f"the task in {host} ended with {process.returncode}")
                raise ended if problem is None else task_error(problem)

    async def release(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


def hosts() -> list[Path]:
    return sorted(Path(os.environ[ROOT]).iterdir())


def _started(tasks: HostTasks, number: int, host: Path) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile() as program, (host / "stderr").open("wb") as stderr:
        program.write(tasks.program(ADDRESSES, host.name).encode())
        program.seek(0)
        return subprocess.Popen(
            [*PREFIXES.get(host.name, ()), sys.executable, "-I", "-", str(number)],
            cwd=host,
            env={**os.environ, "TMPDIR": str(host)},
            stdin=program,
            stderr=stderr,
        )
