"""However a kernel ends, nothing of its gangs outlives it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hydrogen_magic import events as ev
from hydrogen_magic import processes, record
from hydrogen_magic.runner import sweep_abandoned

KERNEL = textwrap.dedent(
    """
    import os, signal, sys, time
    import hydrogen_magic as hm
    from tests import ranks

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored by what nohup started
    forked = 0
    if "forks" in sys.argv:  # a child that holds every descriptor of the kernel open
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
    rendezvous = "horovod" if "horovod" in sys.argv else "torch"
    gang = hm.launch(ranks.family, 2, True, np=2, rendezvous=rendezvous)
    print(gang.id, forked, flush=True)
    gang.wait()
    """
)


class Kernel:
    """A process that runs a gang, and everything that descends from it."""

    def __init__(self, *arguments: str) -> None:
        environ = {**os.environ, "PYTHONPATH": os.getcwd()}
        environ.pop(processes.OWNER, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert self.process.stdout is not None
        self.gang, forked = self.process.stdout.readline().split()
        self.forked = int(forked)
        self.owner = self._owner()

    def _owner(self) -> str:
        launched = record.read(self.gang)[0]
        assert isinstance(launched, ev.GangLaunched)
        return launched.owner

    def left(self) -> list[int]:
        """Return what still carries this kernel's mark."""
        mark = f"{processes.OWNER}={self.owner}".encode()
        return [
            process.pid
            for process in processes.processes()
            if process.state != "Z"
            and process.pid != self.process.pid
            and mark in _environ(process.pid)
        ]

    def wait_until_training(self) -> None:
        deadline = time.monotonic() + 60
        while not all("batch" in self._log(rank) for rank in (0, 1)):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def _log(self, rank: int) -> str:
        path = record.runs_dir() / self.gang / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def gone_within(self, seconds: float) -> bool:
        """Wait for the end of everything of this kernel."""
        deadline = time.monotonic() + seconds
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        processes.sweep_orphans(processes.OWNER, {self.owner})


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def agents_of(kernel: Kernel) -> list[int]:
    return [
        process.pid
        for process in processes.processes()
        if process.ppid == kernel.process.pid
        and b"hydrogen_magic.agent" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forty_kills_at_random_moments() -> None:
    """Two ranks with two DataLoader workers, one stuck, and a helper in its own session each."""
    moments = random.Random(7)
    for _ in range(40):
        kernel = Kernel()
        time.sleep(moments.uniform(0, 2.5))
        agents = agents_of(kernel)
        kernel.process.kill()
        kernel.process.wait()
        try:
            assert kernel.gone_within(1.0), kernel.left()
            assert _all_end(agents, 1.0)
        finally:
            kernel.close()


def _all_end(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(process.state != "Z" for process in processes.processes(pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP])
def test_a_kernel_that_ends_takes_its_gang_along(how: signal.Signals) -> None:
    kernel = Kernel()
    try:
        kernel.wait_until_training()
        assert len(kernel.left()) >= 8
        kernel.process.send_signal(how)
        kernel.process.wait(10)
        assert kernel.gone_within(1.0), kernel.left()
        last = record.read(kernel.gang)[-1]
        assert isinstance(last, ev.GangEnded) and last.reason == "the kernel ended"
    finally:
        kernel.close()


def test_a_fork_that_holds_the_kernels_pipes_changes_nothing() -> None:
    kernel = Kernel("forks")
    try:
        kernel.wait_until_training()
        kernel.process.kill()
        kernel.process.wait()
        assert kernel.gone_within(1.0), kernel.left()
    finally:
        kernel.close()
        os.kill(kernel.forked, signal.SIGKILL)


def test_kernel_and_agent_killed_together_leave_only_what_a_sweep_finds() -> None:
    kernel = Kernel()
    try:
        kernel.wait_until_training()
        for pid in (kernel.process.pid, *agents_of(kernel)):
            os.kill(pid, signal.SIGKILL)
        kernel.process.wait()
        # Ranks and their workers die with the agent; the helpers in their own sessions do not.
        deadline = time.monotonic() + 2
        while len(kernel.left()) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(kernel.left()) <= 2
        assert record.unfinished(record.is_alive) == [kernel.gang]
        assert sweep_abandoned() == [kernel.gang]
        assert record.unfinished(record.is_alive) == []
        assert kernel.gone_within(1.0), kernel.left()
    finally:
        kernel.close()
