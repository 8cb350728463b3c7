"""A kernel without Jupyter: a process that runs a gang, for tests that end it in every way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes, run_log
from tests import leaks
from tests.gangs import PATIENCE_S, wait_until

KERNEL = textwrap.dedent(
    """
    import os, signal, sys, time
    import hydrogen_magic as hm
    from tests import plain_ranks, ranks

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored by what nohup started
    forked = 0
    if "forks" in sys.argv:  # a child that holds every descriptor of the kernel open
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
    rendezvous = next((name for name in ("torch", "horovod") if name in sys.argv), "")
    session = "lab" if "session" in sys.argv else None
    family = (plain_ranks.leave_helper if "idle" in sys.argv else plain_ranks.family,)
    if rendezvous:  # DataLoader itself, whose workers are stuck
        family = (ranks.family, 2, True)
    gang = hm.launch(*family, np=2, rendezvous=rendezvous or "torch", session=session)
    print(gang.id, forked, flush=True)
    gang.wait()
    time.sleep(1000 if session else 0)
    """
)


class Kernel:
    """A process that runs a gang, and everything that descends from it.

    With the name of a rendezvous its ranks have workers of a DataLoader, else processes like these.
    """

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
        launched = run_log.read(self.gang)[0]
        assert isinstance(launched, ev.GangLaunched)
        return launched.owner

    def left(self) -> list[int]:
        """Return what still carries this kernel's mark."""
        marked = leaks.marked(processes.OWNER, self.owner)
        return [pid for pid in marked if pid != self.process.pid]

    def wait_until_training(self) -> None:
        self._wait_until(lambda: all("batch" in self._log(rank) for rank in (0, 1)))

    def wait_until_idle(self) -> None:
        """Wait for the end of its gang, whose session stays."""
        self._wait_until(lambda: isinstance(run_log.read(self.gang)[-1], ev.GangEnded))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        wait_until(lambda: holds() or self.process.poll() is not None)
        assert self.process.poll() is None

    def _log(self, rank: int) -> str:
        path = run_log.runs_dir() / self.gang / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def wait_until_gone(self, but: int = 0) -> None:
        """Wait for the end of everything of this kernel, or of all ``but`` so many processes."""
        deadline = time.monotonic() + PATIENCE_S
        while len(left := self.left()) > but:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.1)  # it looks at every process of the machine

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        processes.kill_marked(processes.OWNER, {self.owner})
