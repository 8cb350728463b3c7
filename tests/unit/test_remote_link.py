"""Tasks and groups of an agent on another host, without their processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from hydrogen_magic.core.messages import RankFile, SavedCheckpoint
from hydrogen_magic.node.agent.remote_link import RemoteLink
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport.background_tasks import BackgroundTasks
from tests.open_files import open_files

KEY = ("g1", 0)


@pytest.fixture
def link(tmp_path: Path) -> Any:
    """One that serves an attempt, with a group that still sends its results."""
    link: Any = object.__new__(RemoteLink)
    link._serving, link._is_released, link._is_retiring = KEY, False, False
    link._attached, link._connections, link._ranks = {}, set(), {}
    link._group = SimpleNamespace(gang="g1", attempt=0, record_dir=str(tmp_path))
    link._link, link._logs = Mock(), None
    link._incoming = link._files = Mock()
    link._shipping, link._channels = AsyncMock(), AsyncMock()
    link._next_checkpoints = {}
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


def test_only_the_newest_checkpoint_follows_the_one_that_is_sent(link: Any) -> None:
    """A rank saves faster than the link transfers; states of another name are independent."""
    sent: list[tuple[str, bytes]] = []
    is_free = asyncio.Event()

    async def send_file(file: Any, fd: int, on_sent: Any) -> None:
        sent.append((file.content.file_name, os.pread(fd, 9, 0)))
        await is_free.wait()

    async def save(name: str, state: bytes) -> None:
        fd = memory_file(name)
        os.write(fd, state)
        link.send_file(RankFile(*KEY, 0, SavedCheckpoint(name)), fd)
        os.close(fd)
        await asyncio.sleep(0)

    async def train() -> None:
        link._shipping, link._outgoing = BackgroundTasks(), SimpleNamespace(send_file=send_file)
        before = open_files()
        for epoch in range(5):
            await save("checkpoint", b"epoch %d" % epoch)
        await save("elastic", b"state")
        is_free.set()
        await link.finish(link._group)
        first, last = ("checkpoint", b"epoch 0"), ("checkpoint", b"epoch 4")
        assert sent == [first, ("elastic", b"state"), last]
        assert link._next_checkpoints == {} and open_files() <= before

    asyncio.run(train())
