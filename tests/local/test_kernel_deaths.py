"""However a kernel ends, nothing of its gangs outlives it."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.driver.kernel_end import clean_up_abandoned
from tests.gangs import PATIENCE_S, agent_pids, wait_until_gone
from tests.scripted_kernel import Kernel

LAUNCH_S = 2.5
N_KILLS = 12
"""One in each twelfth of the launch."""


@pytest.mark.exhaustive
def test_kills_at_random_moments() -> None:
    """Two ranks with two DataLoader workers, one stuck, and a helper in its own session each."""
    moments = random.Random(7)
    for number in range(N_KILLS):
        kernel = Kernel()
        time.sleep(LAUNCH_S * (number + moments.random()) / N_KILLS)
        agents = agent_pids(kernel.process.pid)
        kernel.process.kill()
        kernel.process.wait()
        try:
            kernel.wait_until_gone()
            wait_until_gone(agents)
        finally:
            kernel.close()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, id="by an exception"),
        signal.SIGTERM,
        pytest.param(signal.SIGSEGV, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive),
    ],
)
def test_a_kernel_that_ends_takes_its_gang_along(how: signal.Signals) -> None:
    """SIGKILL is in the contract suite."""
    kernel = Kernel()
    try:
        kernel.wait_until_training()
        assert len(kernel.left()) >= 8
        kernel.process.send_signal(how)
        kernel.process.wait(PATIENCE_S)
        kernel.wait_until_gone()
        last = run_log.read(kernel.gang)[-1]
        assert isinstance(last, ev.GangEnded)
        assert (last.state, last.reason) == ("STOPPED", "the kernel ended")
    finally:
        kernel.close()


def test_a_stopped_agent_does_not_outlive_its_kernel() -> None:
    """It cannot end its ranks itself."""
    kernel = Kernel()
    try:
        kernel.wait_until_training()
        agents = agent_pids(kernel.process.pid)
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        kernel.process.kill()
        kernel.process.wait()
        kernel.wait_until_gone()
        wait_until_gone(agents)
    finally:
        kernel.close()


@pytest.mark.exhaustive  # other kernels die here without a fork
def test_a_fork_that_holds_the_kernels_pipes_changes_nothing() -> None:
    kernel = Kernel("forks")
    try:
        kernel.wait_until_training()
        kernel.process.kill()
        kernel.process.wait()
        kernel.wait_until_gone()
    finally:
        kernel.close()
        os.kill(kernel.forked, signal.SIGKILL)


def test_kernel_and_agent_killed_together_leave_only_what_a_sweep_finds() -> None:
    kernel = Kernel()
    try:
        kernel.wait_until_training()
        for pid in (kernel.process.pid, *agent_pids(kernel.process.pid)):
            os.kill(pid, signal.SIGKILL)
        kernel.process.wait()
        # Ranks and their workers die with the agent; the helpers in their own sessions do not.
        kernel.wait_until_gone(but=2)
        assert run_log.unfinished() == [kernel.gang]
        assert clean_up_abandoned() == [kernel.gang]
        assert run_log.unfinished() == []
        kernel.wait_until_gone()
    finally:
        kernel.close()
