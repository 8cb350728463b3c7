"""What every gang promises, for every placement with every rendezvous.

``test_endings`` and ``test_spark_endings`` have what is special to this machine or to Spark; what holds for
every gang is tested here and nowhere else. All gangs of one placement run on the same agents, so each of them
also shows that the one before left nothing in its way.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import processes
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import GangStoppedError
from tests import ranks, spark_ranks
from tests.gangs import alive, ended, failure_of, family_of, said, until, wait_until_gone
from tests.scripted_kernel import Kernel

pytestmark = pytest.mark.usefixtures("warm_agents")

LATE_S = 10
"""A start timeout that ranks keep on a machine that is busy with other tests."""

Launch = Callable[..., Gang]

HOROVOD = [pytest.mark.horovod]
SPARK = [pytest.mark.spark]
THREE = [
    pytest.param(("local", "torch"), id="local-torch"),
    pytest.param(("local", "horovod"), id="local-horovod", marks=HOROVOD),
    pytest.param(("spark", "torch"), id="spark-torch", marks=SPARK),
]
RARELY = pytest.param(
    ("spark", "horovod"), id="spark-horovod", marks=[*SPARK, *HOROVOD, pytest.mark.exhaustive]
)
on_each = pytest.mark.parametrize(
    "launch",
    [*THREE, pytest.param(("spark", "horovod"), id="spark-horovod", marks=SPARK + HOROVOD)],
    indirect=True,
    scope="module",
)
"""Every placement with every rendezvous."""
on_most = pytest.mark.parametrize(
    "launch",
    [
        *THREE,
        RARELY,
    ],
    indirect=True,
    scope="module",
)
"""Where what is tested on Spark is the agent's own doing, whatever the rendezvous."""

on_two = pytest.mark.parametrize(
    "launch",
    [
        pytest.param(("local", "torch"), id="local-torch", marks=pytest.mark.exhaustive),
        *THREE[1:],
        RARELY,
    ],
    indirect=True,
    scope="module",
)
"""Where a test waits for ten seconds: every placement and every rendezvous once."""


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, warm_agents: None) -> Launch:
    """Launches gangs of one placement with one rendezvous."""
    placement, rendezvous = request.param
    if placement == "spark":
        request.getfixturevalue("spark")
    return partial(hm.launch, on=placement, rendezvous=rendezvous)


@on_each
def test_every_rank_has_its_value(launch: Launch) -> None:
    gang = ended(launch(ranks.gather, np=4))
    assert gang.results == [[0, 1, 2, 3]] * 4


@on_each
@pytest.mark.parametrize(("culprit", "clean_up_s", "leaves"), [(0, 0.0, False), (1, 1.0, True)])
def test_who_raises_is_named_with_the_line(
    launch: Launch, culprit: int, clean_up_s: float, leaves: bool, tmp_path: Path
) -> None:
    """Peers wait in a collective, which breaks under them, with ``leaves`` before the rank has gone."""
    env = {"LAST_ACT": str(tmp_path / "last_act")}
    gang = launch(ranks.fail_on, culprit, clean_up_s, leaves, np=2, env=env)
    error = failure_of(gang)
    assert error.rank == culprit
    assert "ValueError: bad batch 17" in error.report
    assert 'raise ValueError("bad batch 17")' in error.report
    assert f"rank {1 - culprit} failed" not in error.report


@on_most
@pytest.mark.parametrize(
    ("culprit", "how", "found"),
    [
        (1, "SIGKILL", "killed by SIGKILL"),
        (0, "SIGSEGV", "killed by SIGSEGV"),
        (0, "_exit(0)", "exited with status 0 without finishing"),
        (1, "exit(3)", "SystemExit: 3"),
    ],
)
def test_who_ends_without_a_word_is_named(
    launch: Launch, culprit: int, how: str, found: str
) -> None:
    error = failure_of(launch(ranks.end_one, culprit, how, np=2))
    assert error.rank == culprit
    assert found in str(error)
    if how == "exit(3)":
        assert "sys.exit(int(how[5:-1]))" in error.report, "the line that ended it"


@on_two
def test_who_stands_still_is_named(launch: Launch) -> None:
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"} if _by_horovod(launch) else {}
    error = failure_of(launch(ranks.end_one, 1, "SIGSTOP", 10.0, np=2, env=env))
    assert error.rank == 1
    assert "SIGSTOP" in str(error)


@on_two
def test_who_does_not_come_is_named(launch: Launch) -> None:
    """torch has a bound of its own for this, and one absent rank is who did not come."""
    by_horovod = _by_horovod(launch)
    absent = [1, 3] if by_horovod else [1]
    options = {"start_timeout": LATE_S} if by_horovod else {}
    error = failure_of(launch(ranks.do_not_come, absent, np=4 if by_horovod else 2, **options))
    assert error.rank == 1
    if by_horovod:
        assert f"ranks 1 and 3 did not enter hvd.init within {LATE_S} s" in str(error)
    else:
        assert str(error).startswith("rank 1 never entered the init_process_group its peers were")


@on_each
def test_who_finishes_before_a_collective_of_the_others_is_named(launch: Launch) -> None:
    gang = launch(ranks.one_collective_more, 0.0, np=2)
    collective = "(allreduce|collective)" if _by_horovod(launch) else "all_reduce"
    headline = f"rank 1 never entered the {collective} its peers were waiting in"
    assert re.match(rf"{headline} \(rank 1 had already finished\)", str(failure_of(gang)))


@on_each
def test_it_is_started_again_with_a_fresh_meeting(launch: Launch, tmp_path: Path) -> None:
    gang = launch(spark_ranks.fail_once, str(tmp_path / "tried"), np=2, retries=1)
    assert ended(gang).result == [0, 1]
    assert gang.snapshot().attempt == 1


@on_each
@pytest.mark.parametrize("how", ["collective", "meeting"])
def test_stop_interrupts_a_wait_for_other_ranks(launch: Launch, how: str) -> None:
    """In an all_reduce, and in the rendezvous, whose timeouts are half an hour."""
    if how == "meeting":
        gang = launch(ranks.do_not_come, [1], 1800.0, np=2)
        until(gang, lambda: gang.ranks and all(rank.phase == "running" for rank in gang.ranks))
    else:
        gang = launch(ranks.hang, "collective", np=2)
        until(gang, lambda: bool(gang.ranks[0].waiting_in))
    family = family_of(gang)
    gang.stop()
    wait_until_gone(family)
    with pytest.raises(GangStoppedError, match="stopped by you"):
        ended(gang).raise_for_state()


@on_most
def test_a_stop_takes_workers_and_helpers_along(launch: Launch) -> None:
    gang = launch(ranks.family, 1, True, np=2)
    until(gang, said(gang, "batch"))
    family = family_of(gang)
    assert len(family) >= 6, "two ranks with a worker and a helper in its own session each"
    gang.stop()
    ended(gang)
    assert not alive(family)


def _by_horovod(launch: Launch) -> bool:
    return isinstance(launch, partial) and launch.keywords["rendezvous"] == "horovod"


# ── where there is but one placement ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rendezvous", ["torch", pytest.param("horovod", marks=HOROVOD)])
def test_a_kernel_that_is_killed_leaves_nothing(rendezvous: str) -> None:
    """On Spark ``test_spark_notebooks`` kills kernels, whose gangs agents end as they end these."""
    kernel = Kernel(rendezvous)
    try:
        kernel.wait_until_training()
        assert len(kernel.left()) >= 8
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


@pytest.mark.parametrize("rendezvous", ["torch", pytest.param("horovod", marks=HOROVOD)])
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
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60
    )
    assert done.stdout.splitlines() == ["[0]", "[0]", "bad batch 17", "[0]"], done.stderr
