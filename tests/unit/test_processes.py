"""Tests of what is read from ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydrogen_magic.core import processes

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
