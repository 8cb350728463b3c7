"""Processes of an outliving gang are killed at random moments: training goes on, or leaves a checkpoint."""

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

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.driver.owner.connection import attach
from hydrogen_magic.driver.state.gang_state import replay
from tests import leaks
from tests.gangs import PATIENCE_S, wait_until

STEPS = 50
KERNEL = textwrap.dedent(
    f"""
    from hydrogen_magic import capture
    from hydrogen_magic.core.job import JobSpec
    from hydrogen_magic.driver.owner.start import launch_outliving
    from tests import outliving_ranks

    captured = capture.capture_call(outliving_ranks.train, ({STEPS},), {{}})
    spec = JobSpec(np=2, gpu=False, retries=2, outlive=True, detach=True)
    launch_outliving(captured, spec, title="train").wait()
    """
)


class Killed:
    """An outliving gang, of a kernel that is a bare process, with a run log of its own."""

    def __init__(self, home: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": os.getcwd(), "HYDROGEN_MAGIC_HOME": str(home)}
        self._home = str(home)
        self.kernel = subprocess.Popen([sys.executable, "-c", KERNEL], env=environ)

    def kill(self, victim: str) -> None:
        """Kill one of its processes; wait for a moment in which it has this one."""
        if victim == "kernel":
            pids = [self.kernel.pid]
        else:
            wait_until(lambda: self.pids_of(victim) or self.kernel.poll() is not None)
            pids = self.pids_of(victim)
        if pids:
            os.kill(pids[0], signal.SIGKILL)

    def pids_of(self, victim: str) -> list[int]:
        """Return the pids of its owner, its agent, or its ranks."""
        if victim == "rank":
            states = [replay(run_log.read(found.gang)) for found in run_log.recent()]
            ranks = [rank for state in states for rank in state.ranks]
            return [rank.pid for rank in ranks if rank.pid is not None and not rank.is_over]
        module = {"owner": "driver.owner.process", "agent": "node.agent.__main__"}[victim]
        time.sleep(0.1)  # it looks at every process of the machine
        pids = leaks.marked("HYDROGEN_MAGIC_HOME", self._home)
        return [pid for pid in pids if f"hydrogen_magic.{module}" in leaks.command(pid)]

    def wait_until_gone(self, within_s: float = PATIENCE_S) -> None:
        """Wait until no process of the gang is left, its kernel included."""

        def is_gone() -> bool:
            time.sleep(0.2)  # it looks at every process of the machine
            self.kernel.poll()
            return not leaks.marked("HYDROGEN_MAGIC_HOME", self._home)

        wait_until(is_gone, within_s)


def steps_of(events: list[ev.Event], attempt: int) -> list[int]:
    """Return the steps that rank 0 logged in an attempt."""
    steps: list[int] = []
    current = 0
    for event in events:
        if isinstance(event, ev.AttemptStarted):
            current = event.attempt
        elif isinstance(event, ev.Metrics) and (event.rank, current) == (0, attempt):
            steps += event.steps
    return steps


def check(gang_id: str, victim: str) -> None:
    """Look at the gang as a new kernel does."""
    gang = attach(gang_id)
    state = gang.snapshot()
    logged = steps_of(gang.events(), state.attempt)
    assert logged == list(range(logged[0], logged[-1] + 1)) if logged else victim == "owner"
    if victim == "owner" and state.state == "STOPPED":
        assert state.reason in (ev.OWNER_ENDED, "its owner process ended unexpectedly")
        saved = gang.folder / "checkpoints"
        assert saved.exists() or not logged or logged[-1] == logged[0], list(gang.folder.iterdir())
        return
    assert (state.state, logged[-1]) == ("SUCCEEDED", STEPS - 1), state.reason
    assert gang.results == [gang.result, gang.results[1]] and gang.result == logged[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_ten_random_kills(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = random.Random(seed)
    for number in range(10):
        home = tmp_path / str(number)
        monkeypatch.setenv("HYDROGEN_MAGIC_HOME", str(home))
        victim = moments.choice(["kernel", "agent", "rank", "owner"])
        killed = Killed(home)
        if number % 5 > 0:  # else it may be a moment of the launch
            wait_until(run_log.recent)
        time.sleep(moments.uniform(0, 2))
        killed.kill(victim)
        killed.wait_until_gone()
        for found in run_log.recent():  # none if its kernel was killed before the launch
            check(found.gang, victim)
            print(
                number,
                victim,
                replay(run_log.read(found.gang)).state,
                replay(run_log.read(found.gang)).attempt,
            )
