"""A provider of hosts beside Spark: what the machinery of remote placements promises to any of them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import processes
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.remote import HostTasks, attempt, host_tasks
from hydrogen_magic.driver.placements.remote.provider import HostsRevokedError
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.testing.contract import GangContract
from hydrogen_magic.testing.entry_points import declare
from tests import directory_hosts, ranks, spark_ranks
from tests.contracts import DOES_NOT_JOIN, FINISHES_EARLY, LIBRARY, SILENT_END, STANDS_STILL, rarely
from tests.directory_hosts import DirectoryHosts
from tests.gangs import (
    ended,
    failure_of,
    family_of,
    said,
    until,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.usefixtures("directories")
launch = partial(hm.launch, on="directories")


@pytest.fixture(scope="module")
def directories(
    tmp_path_factory: pytest.TempPathFactory, warm_agents: None
) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("remote")
    entry_point = "tests.directory_hosts:DirectoryPlacement"
    declare(folder, "hydrogen_magic.placements", {"directories": entry_point})
    for name in ("one", "other"):
        (folder / "hosts" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv(directory_hosts.ROOT, str(folder / "hosts"))
        yield directory_hosts.hosts()


@rarely(SILENT_END, STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY)
class TestDirectories(GangContract):
    placement = "directories"
    library = LIBRARY
    sees_processes = True


def test_every_host_has_an_agent_and_is_sent_the_package(directories: list[Path]) -> None:
    found = ended(launch(spark_ranks.host_and_package, np=2)).results
    assert [number for number, _ in found] == ["0", "1"]
    for (_, package), host in zip(found, directories, strict=True):
        assert Path(package).is_relative_to(host)


def test_a_task_that_is_killed_ends_its_rank(directories: list[Path]) -> None:
    gang = launch(ranks.hang, "collective", np=2)
    until(gang, said(gang, "about to hang"))
    family = family_of(gang)
    (task,) = (
        child.pid
        for child in processes.descendants(os.getpid())
        if os.path.samefile(f"/proc/{child.pid}/cwd", directories[1])
    )
    os.kill(task, signal.SIGKILL)
    error = failure_of(gang)
    assert error.rank == 1
    assert "the Python process of its task ended" in str(error)
    wait_until_gone(family)


def test_tasks_of_a_gang_that_has_succeeded_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host they return late; the provider would count them as failed."""
    seen: list[str] = []
    start_agents, release = DirectoryHosts.start_agents, DirectoryHosts.release

    async def return_late(hosts: DirectoryHosts, *arguments: Any) -> None:
        await start_agents(hosts, *arguments)
        await asyncio.sleep(3.0)
        seen.append("returned")

    async def note_release(hosts: DirectoryHosts) -> None:
        seen.append("released")
        await release(hosts)

    monkeypatch.setattr(DirectoryHosts, "start_agents", return_late)
    monkeypatch.setattr(DirectoryHosts, "release", note_release)
    assert ended(launch(ranks.gather, np=2)).result == [0, 1]
    wait_until(lambda: "released" in seen)
    assert seen == ["returned", "released"]


def test_errors_after_the_end_of_an_attempt_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Agents that had not ended their ranks when the hosts were taken away, as one that is stopped."""

    def revoked(hosts: DirectoryHosts) -> None:
        raise HostsRevokedError("the directories were taken away")

    monkeypatch.setattr(attempt, "_END_S", 0.0)
    gang = launch(ranks.hang, "sleep", np=2)
    until(gang, said(gang, "about to hang"))
    family = family_of(gang)
    monkeypatch.setattr(DirectoryHosts, "_check", revoked)
    with pytest.raises(HostsRevokedError) as caught:
        ended(gang).raise_for_state()
    local_agents.close()
    wait_until_gone(family)
    traceback.clear_frames(caught.tb)  # they hold what asyncio reports when it is freed
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_what_a_host_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = HostTasks.instructions

    def more_needed(tasks: HostTasks, *arguments: Any) -> dict[str, Any]:
        return {**instructions(tasks, *arguments), "needs": ["no_such_module"]}

    monkeypatch.setattr(HostTasks, "instructions", more_needed)
    with pytest.raises(PlacementError, match="directories have no module no_such_module"):
        ended(launch(spark_ranks.host_and_package, np=1)).raise_for_state()


def test_an_agent_exits_though_its_rank_removed_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    local_agents.close()  # those that are warm wait for a minute
    with monkeypatch.context() as patch:
        patch.setattr(host_tasks, "IDLE_S", 1.0)
        agent = ended(launch(spark_ranks.removes_its_log, np=1)).result
    wait_until_gone([agent])
