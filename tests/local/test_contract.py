"""Our own placements, with each rendezvous: what every gang promises (``hydrogen_magic.testing.contract``).

``test_endings`` and ``test_spark_endings`` have what is special to this machine or to Spark; what holds
for every gang is tested by the contract suite and nowhere else. All gangs of one placement run on the same
agents, so each of them also shows that the one before left nothing in its way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from hydrogen_magic import capture
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.owner.start import launch_outliving
from hydrogen_magic.testing.contract import GangContract, SessionContract
from tests.contracts import (
    DOES_NOT_JOIN,
    EXITS,
    EXITS_0,
    FINISHES_EARLY,
    FIRST_RAISES,
    HAS_VALUES,
    JAX,
    KILLED,
    LAST_RAISES,
    LIBRARY,
    PLANS,
    RAISES,
    SEGFAULT,
    SESSION,
    SILENT_END,
    STANDS_STILL,
    STARTS_AGAIN,
    STOPS,
    STOPS_JOIN,
    STOPS_WAIT,
    TENSORFLOW,
    mainly,
    only,
    rarely,
    without,
)
from tests.gangs import PATIENCE_S
from tests.scripted_kernel import Kernel

pytestmark = pytest.mark.usefixtures("warm_agents")

BY_TORCH = pytest.param("torch", marks=pytest.mark.exhaustive)
BY_HOROVOD = pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.exhaustive])


@rarely(STANDS_STILL, DOES_NOT_JOIN)  # ten seconds each
class TestLocalTorch(GangContract):
    library = LIBRARY


# How else a rank ends, or waits, is the agent's and the kernel's business (TestLocalTorch). To its peers
# SIGSEGV and _exit(0) are the same.
@without(SEGFAULT)
@rarely(FIRST_RAISES, EXITS, STOPS_JOIN)
@pytest.mark.horovod
class TestLocalHorovod(GangContract):
    rendezvous = "horovod"
    library = LIBRARY
    absent = (1, 3)
    short_limit: ClassVar[Mapping[str, str]] = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}


# Ranks import JAX, which takes seconds; ``test_jax`` has their values. Rank 0 has JAX's coordinator.
@without(EXITS_0)
@rarely(HAS_VALUES, SILENT_END, STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY, STARTS_AGAIN, STOPS)
@pytest.mark.jax
class TestLocalJax(GangContract):
    rendezvous = "jax"
    library = JAX
    absent = (1, 3)


@without(EXITS_0)
@pytest.mark.exhaustive  # each rank imports TensorFlow, which takes seconds
@pytest.mark.tensorflow
class TestLocalTensorFlow(GangContract):
    rendezvous = "tensorflow"
    library = TENSORFLOW
    absent = (1, 3)


# Agents on hosts run what those of TestLocalTorch run: here is what they say over the network.
@without(FIRST_RAISES, SEGFAULT, EXITS)
@rarely(STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY, STOPS_JOIN)
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
class TestSparkTorch(GangContract):
    placement = "spark"
    library = LIBRARY
    sees_processes = True


# The rest is the agents' doing (TestSparkTorch) or the library's (TestLocalHorovod and so on).
@only(HAS_VALUES, DOES_NOT_JOIN)
@mainly(HAS_VALUES)
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
class TestSparkHorovod(TestLocalHorovod):
    placement = "spark"
    sees_processes = True


@without(LAST_RAISES)  # the first rank has the coordinator
@only(HAS_VALUES, RAISES, DOES_NOT_JOIN)
@pytest.mark.exhaustive
@pytest.mark.jax
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
class TestSparkJax(TestLocalJax):
    placement = "spark"
    sees_processes = True


@without(LAST_RAISES)
@only(HAS_VALUES, RAISES)
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
class TestSparkTensorFlow(TestLocalTensorFlow):
    placement = "spark"
    sees_processes = True


# ``test_session`` has values of cells, and ends cells by an exception, by a killed rank, by one that
# finishes early and by Stop in a collective.
@without(HAS_VALUES, FINISHES_EARLY, FIRST_RAISES, KILLED, SEGFAULT, EXITS_0, STOPS_WAIT)
@rarely(STANDS_STILL, DOES_NOT_JOIN, RAISES, STOPS)
class TestLocalSession(SessionContract):
    library = LIBRARY


@without(SILENT_END, *PLANS, STANDS_STILL, STOPS_JOIN)
@mainly(SESSION)
@pytest.mark.horovod
class TestLocalHorovodSession(SessionContract, TestLocalHorovod):
    pass


@without(STOPS_JOIN)
@only(SESSION, RAISES, STOPS)
@pytest.mark.exhaustive
@pytest.mark.jax
class TestLocalJaxSession(SessionContract, TestLocalJax):
    pass


@without(HAS_VALUES, RAISES, STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY, STOPS)
@mainly(SESSION)
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
class TestSparkSession(SessionContract, TestSparkTorch):
    pass


@rarely(SESSION)  # TestSparkSession and TestLocalHorovodSession have it
@only(SESSION)
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
class TestSparkHorovodSession(SessionContract, TestSparkHorovod):
    pass


# ── where there is but one placement ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rendezvous", ["", BY_TORCH, BY_HOROVOD])
def test_a_kernel_that_is_killed_leaves_nothing(rendezvous: str) -> None:
    """With the name of one, ranks have workers of a DataLoader.

    On Spark ``test_spark_notebooks`` kills kernels, whose gangs agents end as they end these."""
    kernel = Kernel(rendezvous)
    try:
        kernel.wait_until_training()
        assert len(kernel.left()) >= 8
        kernel.process.send_signal(signal.SIGKILL)
        kernel.process.wait(PATIENCE_S)
        kernel.wait_until_gone()
    finally:
        kernel.close()


@pytest.mark.exhaustive  # the test above has a gang; test_session ends sessions
@pytest.mark.parametrize("doing", ["idle", "training"])
def test_a_session_whose_kernel_is_killed_leaves_nothing(doing: str) -> None:
    kernel = Kernel("session", doing)
    try:
        kernel.wait_until_idle() if doing == "idle" else kernel.wait_until_training()
        assert len(kernel.left()) >= 5
        kernel.process.send_signal(signal.SIGKILL)
        kernel.process.wait(10)
        kernel.wait_until_gone()
    finally:
        kernel.close()


OWN_GROUP = """
import torch.distributed as dist
assert not dist.is_initialized()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run(int)
assert dist.is_initialized(), "the notebook keeps the group that it had"
"""


@pytest.mark.parametrize("rendezvous", ["torch", BY_HOROVOD])
def test_a_rank_in_this_process_meets_itself(rendezvous: str) -> None:
    """Twice, in a process of its own: both libraries keep threads and pipes for ever."""
    program = (
        "import os, hydrogen_magic as hm\nfrom tests import ranks\n"
        f"run = lambda f: hm.run(f, np=1, on='inline', rendezvous={rendezvous!r}, quiet=True)\n"
        "for _ in range(2): print(run(ranks.gather))\n"
        "assert not {'RANK', 'HOROVOD_RANK'} & set(os.environ)\n"
        "def fail(): ranks.meet(); raise ValueError('bad batch 17')\n"
        "try: run(fail)\nexcept ValueError as error: print(error)\n"
        "print(run(ranks.gather))\n"
    )
    if rendezvous == "torch":
        program += OWN_GROUP
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    environ.pop(processes.OWNER, None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environ,
        timeout=4 * PATIENCE_S,
    )
    assert done.stdout.splitlines() == ["[0]", "[0]", "bad batch 17", "[0]"], done.stderr


@without(*PLANS, STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY)
@without(FIRST_RAISES, SEGFAULT, EXITS_0, EXITS)  # the agent tells them apart
@pytest.mark.exhaustive  # each of its gangs starts an owner and an agent
class TestOutliving(GangContract):
    """Gangs that outlive their kernel, which is attached."""

    library = LIBRARY

    def launch(self, function: Callable[..., Any], *args: Any, **options: Any) -> Gang:
        spec = JobSpec(
            np=options.get("np", self.np),
            env=tuple(options.get("env", {}).items()),
            retries=options.get("retries", 0),
            start_timeout_s=options.get("start_timeout", JobSpec.start_timeout_s),
            outlive=True,
        )
        captured = capture.capture_call(function, (self.library, *args), {})
        return launch_outliving(captured, spec, title="contract", planned=launcher.plan(spec))
