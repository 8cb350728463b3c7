"""A closure that arrives on a host in parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from hydrogen_magic.core.messages import (
    AgentReport,
    ClosureArriving,
    ClosureLabel,
    FetchClosure,
    FilePart,
)
from hydrogen_magic.node.agent.host_closure import HostClosure

_WHOLE = b"0123456789"


@pytest.fixture
def reports() -> list[AgentReport]:
    return []


@pytest.fixture
def closure(reports: list[AgentReport]) -> Iterator[HostClosure]:
    held = HostClosure("cafe", reports.append)
    yield held
    held.close()


def take(closure: HostClosure, start: int, until: int) -> None:
    part = FilePart(ClosureLabel("cafe"), 1, len(_WHOLE), start)
    closure.take(part, memoryview(_WHOLE[start:until]))


def test_parts_of_a_source_that_was_given_up_do_no_harm(
    closure: HostClosure, reports: list[AgentReport]
) -> None:
    take(closure, 0, 4)
    take(closure, 6, 10)
    take(closure, 2, 6)
    assert closure.file.arrived == 4 and not reports
    take(closure, 4, 10)
    assert os.pread(closure.file.fd, 100, 0) == _WHOLE
    assert reports == [ClosureArriving("cafe", 10, 10)]


def test_a_whole_closure_is_not_fetched_again(
    closure: HostClosure, reports: list[AgentReport]
) -> None:
    """The kernel must still learn that it is there."""
    take(closure, 0, 10)
    reports.clear()

    async def fetch() -> None:
        closure.fetch(FetchClosure("cafe", "tcp://127.0.0.1:1", ""), "")

    asyncio.run(fetch())
    assert reports == [ClosureArriving("cafe", 10, 10)]
