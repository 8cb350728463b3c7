"""Launches where a process has as many files open as it may (RLIMIT_NOFILE)."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import hydrogen_magic as hm
from hydrogen_magic import plugins
from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.local_agent import LocalAgent
from hydrogen_magic.driver.state.gang_results import GangResults
from hydrogen_magic.errors import HydrogenError, PlacementError
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.serialization.result_stream import CELL_VALUE, Packer
from tests import plain_ranks
from tests.gangs import PATIENCE_S, ended, said, until

pytestmark = pytest.mark.usefixtures("warm_agents")


@contextmanager
def free_files(count: int) -> Iterator[None]:
    """Let this process open ``count`` more files."""
    gc.collect()  # garbage that is collected later would close some
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    # The limit is on numbers of descriptors: those below it that are free are taken, but for `count`.
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, limits[1]))
    taken: list[int] = []
    with suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    try:
        for fd in taken[:count]:
            os.close(fd)
        yield
    finally:
        for fd in taken[count:]:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_table_that_is_full_when_results_arrive_ends_the_gang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its agent, which may take a moment: the next gang has another one."""
    kill = LocalAgent._kill

    async def kill_late(agent: LocalAgent) -> None:
        await asyncio.sleep(0.5)
        await kill(agent)

    monkeypatch.setattr(LocalAgent, "_kill", kill_late)

    gang = hm.launch(plain_ranks.log_and_wait, str(tmp_path / "go"), np=2)
    until(gang, said(gang, "begun"))
    with free_files(0):
        (tmp_path / "go").mkdir()  # which opens no file
        ended(gang)
    with pytest.raises(HydrogenError, match=r"a result could not be received: .*RLIMIT_NOFILE"):
        gang.raise_for_state()
    assert ended(hm.launch(plain_ranks.rank, np=2)).results == [0, 1]


def test_a_full_table_of_the_kernel_is_named_before_anything_starts() -> None:
    """Plug-ins are looked for by the first launch of a process, which opens files, too."""
    local_agents.close()  # no warm one, and no hub
    for count in (0, 1, 20, 45):
        plugins._scanned.cache_clear(), plugins._points.cache_clear(), plugins._made.cache_clear()
        with free_files(count), pytest.raises(PlacementError) as caught:
            hm.launch(plain_ranks.rank, np=2)
        assert "(RLIMIT_NOFILE): close files, or raise the limit with" in str(caught.value)
    with free_files(50):
        assert ended(hm.launch(plain_ranks.rank, np=2)).results == [0, 1]


OF_AN_AGENT = """
import resource
import psutil
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
import hydrogen_magic as hm
from hydrogen_magic import plugins
from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import local_agents
from tests import ranks
from tests.spark_rig import until

def agent():
    (found,) = local_agents.pool().all
    return psutil.Process(found.process.pid)

for _ in range(2):
    assert hm.launch(ranks.gather, np=2).result == [0, 1]
# The forkserver, and for the next gang two workers and a rendezvous: they are started after a gang.
until(lambda: len(agent().children()) >= 4, 60)
before = agent().num_fds()
for _ in range(3):
    try:
        hm.launch(ranks.gather, np=40).result
    except hm.errors.HydrogenError as error:
        message = str(error)
assert hm.launch(ranks.gather, np=2).result == [0, 1]
until(lambda: agent().num_fds() <= before + 2, 60, lambda: f"{before}, now {agent().num_fds()}")
print(message)
"""


@pytest.mark.exhaustive  # the next tests have the kernel's table
def test_a_full_table_of_an_agent_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OF_AN_AGENT)],
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert not done.returncode, done.stderr
    # Of its 40 ranks, two may be waiting already.
    assert re.search(
        r"the ranks could not be started: the start of (38|40) ranks needs", done.stdout
    )
    assert "(RLIMIT_NOFILE)" in done.stdout


def test_results_that_the_notebook_keeps_leave_files_for_the_next_gang(tmp_path: Path) -> None:
    """Each array of a large one is in a mapped file."""
    kept = []
    with free_files(64):
        for number in range(100):
            section = Packer(Pickler).pack(CELL_VALUE, np.full(300_000, float(number)))
            sent = payload.to_memfd(section, "result")
            arrived = payload.from_memfd(sent)
            os.close(sent)
            results = GangResults("g1", tmp_path)
            results.add(0, 0, msg.ResultPart(CELL_VALUE), arrived)
            kept.append(results.value(0))
    assert [array[-1] for array in kept] == [float(number) for number in range(100)]
