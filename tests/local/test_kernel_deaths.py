"""However a kernel ends, nothing of its gangs outlives it."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from hydrogen_magic import events as ev
from hydrogen_magic import processes, record
from hydrogen_magic.runner import sweep_abandoned
from tests.scripted_kernel import Kernel, agents_of


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
