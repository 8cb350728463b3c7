"""Tasks and groups of an agent on another host, without their processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from hydrogen_magic.node.agent.remote_link import RemoteLink

KEY = ("g1", 0)


@pytest.fixture
def link(tmp_path: Path) -> Any:
    """One that serves an attempt, with a group that still sends its results."""
    link: Any = object.__new__(RemoteLink)
    link._serving, link._is_released, link._is_retiring = KEY, False, False
    link._attached, link._connections, link._ranks = {}, set(), {}
    link._group = SimpleNamespace(gang="g1", attempt=0, record_dir=str(tmp_path))
    link._link, link._logs = Mock(), None
    link._incoming = link._datasets = link._checkpoints = link._drop_partial_closure = Mock()
    link._shipping, link._channels = AsyncMock(), AsyncMock()
    return link


def test_the_next_gang_is_taken_once_the_last_one_has_sent_everything(link: Any) -> None:
    """Its end would otherwise be that of the next one, which could be neither seen nor stopped."""
    link._release(KEY)
    assert link._serving == KEY
    asyncio.run(link.finish(link._group))
    assert link._serving is None and link._group is None


def test_the_late_end_of_a_task_is_not_that_of_the_one_with_its_number(link: Any) -> None:
    hello = SimpleNamespace(number=0, gang="g1", attempt=0, place="")
    earlier, later = (Mock(hello=hello) for _ in range(2))
    link._attached[0] = later, hello
    link._group = None
    link._on_task_lost(earlier, "it ended")
    assert link._attached == {0: (later, hello)} and link._serving == KEY
    link._link.send.assert_not_called()
    link._on_task_lost(later, "it ended")
    assert link._attached == {} and link._link.send.call_count == 1
