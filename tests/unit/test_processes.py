"""Tests of what is read from ``/proc``."""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.local import LocalPlacement
from hydrogen_magic.driver.placements.spark.placement import SparkPlacement
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.agent import host_task
from hydrogen_magic.notebook import doctor

NAME = Path("/proc/self/comm")


@pytest.fixture
def own_name() -> Iterator[None]:
    name = NAME.read_bytes()
    yield
    NAME.write_bytes(name)


@pytest.mark.usefixtures("own_name")
@pytest.mark.parametrize("name", ["обучение".encode()[:15], b"a) R (b", b"caf\xc3 S 1"])
def test_a_process_may_have_any_name(name: bytes) -> None:
    NAME.write_bytes(name)  # Linux cuts names, also within a character
    (found,) = processes.processes([os.getpid()])
    assert (found.pid, found.ppid, found.state) == (os.getpid(), os.getppid(), "R")


def test_signals_without_a_name_have_their_number() -> None:
    assert processes.name_of_signal(9) == "SIGKILL"
    assert processes.name_of_signal(40) == "signal 40"


@pytest.fixture
def forbidden_pidfd(monkeypatch: pytest.MonkeyPatch) -> str:
    """A sandbox that forbids a system call which Python knows; the text of the error."""

    def pidfd_open(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    return "no pidfd_open ([Errno 1] Operation not permitted)"


@pytest.mark.parametrize("placement", [LocalPlacement(), SparkPlacement()])
def test_gangs_are_refused_where_processes_cannot_be_watched(
    placement: LocalPlacement | SparkPlacement, forbidden_pidfd: str
) -> None:
    with pytest.raises(PlacementError) as refused:
        placement.plan(JobSpec(np=2))
    assert forbidden_pidfd in str(refused.value)


def test_a_process_without_free_descriptors_is_not_an_old_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pidfd_open(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    assert processes.pidfd_fault() == ""


def test_the_doctor_says_where_processes_cannot_be_watched(
    forbidden_pidfd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "platform", lambda: "Linux-6.1")  # it would start a process
    found = doctor.system()
    assert (found.is_well, found.found) == (False, f"Linux-6.1: {forbidden_pidfd}")


def test_a_host_where_processes_cannot_be_watched_is_reported(forbidden_pidfd: str) -> None:
    sent = {"python": list(sys.version_info[:2]), "hosts": "executors", "library": "", "needs": []}
    with pytest.raises(host_task._ProblemError) as refused:
        host_task._check(sent)
    assert f"executors need Linux 5.3 or newer: {forbidden_pidfd}" in str(refused.value)
