"""Files in parts: how many bytes are on the way follows the link, and where they arrive."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.core.messages import ClosureLabel, FilePart, RankFile, SavedCheckpoint
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport import file_transfer
from hydrogen_magic.transport.file_transfer import (
    MAX_WINDOW_BYTES,
    PART_BYTES,
    Outgoing,
    Part,
)


class Link:
    """A link with a clock of its own, whose receiver acknowledges each part as it arrives."""

    def __init__(self, bytes_per_s: float, round_trip_s: float) -> None:
        self.now_s = 0.0
        self._bytes_per_s = bytes_per_s
        self._round_trip_s = round_trip_s
        self._acknowledged_s: deque[float] = deque()
        self._idle_s = 0.0
        """When the last of the bytes has left."""
        self.waits_s: list[float] = []
        """How long a message that follows each part waits until the bytes before it have left."""

    def send(self, _: Part, data: memoryview) -> None:
        self._idle_s = max(self._idle_s, self.now_s) + data.nbytes / self._bytes_per_s
        self._acknowledged_s.append(self._idle_s + self._round_trip_s)
        self.waits_s.append(self._idle_s - self.now_s)

    async def carry(self, outgoing: Outgoing, n_bytes: int) -> float:
        """Transfer a file; return the seconds until its last part was acknowledged."""
        began_s, fd = self.now_s, memory_file("file")
        os.truncate(fd, n_bytes)
        sending = asyncio.ensure_future(outgoing.send_file(ClosureLabel("cafe"), fd))
        while not sending.done() or self._acknowledged_s:
            for _ in range(5):  # the sender's turns, until it waits for room
                await asyncio.sleep(0)
            self.now_s = self._acknowledged_s.popleft()
            outgoing.acknowledged()
        os.close(fd)
        return self.now_s - began_s


def link(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, round_trip_s: float) -> Link:
    link = Link(bytes_per_s, round_trip_s)
    monkeypatch.setattr(file_transfer, "time", SimpleNamespace(monotonic=lambda: link.now_s))
    return link


@pytest.mark.parametrize("round_trip_s", [0.01, 1.5])
@pytest.mark.parametrize(
    ("n_before", "before_bytes"), [(0, 0), (100, 0), (100, 1000), (1, MAX_WINDOW_BYTES)]
)
def test_a_stop_does_not_wait_long_on_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, n_before: int, before_bytes: int, round_trip_s: float
) -> None:
    """Whatever was sent while the link was fast."""
    slow = link(monkeypatch, bytes_per_s=1e9, round_trip_s=round_trip_s)

    async def transfer() -> None:
        outgoing = Outgoing(slow.send)
        for _ in range(n_before):
            await slow.carry(outgoing, before_bytes)
        slow._bytes_per_s = PART_BYTES / 2
        slow.waits_s.clear()
        await slow.carry(outgoing, 100 * PART_BYTES)

    asyncio.run(transfer())
    assert max(slow.waits_s[50:]) <= 4.0
    if before_bytes < PART_BYTES:
        assert max(slow.waits_s) <= 4.0


@pytest.mark.parametrize("round_trip_s", [0.25, 1.5])
def test_a_long_fast_link_is_saturated(
    monkeypatch: pytest.MonkeyPatch, round_trip_s: float
) -> None:
    """As far as the maximum of bytes on the way allows."""
    fast = link(monkeypatch, bytes_per_s=125e6, round_trip_s=round_trip_s)
    n_bytes = 500 * PART_BYTES

    async def transfer() -> float:
        return await fast.carry(Outgoing(fast.send), n_bytes)

    assert asyncio.run(transfer()) < 1.5 * n_bytes / min(125e6, MAX_WINDOW_BYTES / round_trip_s)


def test_a_part_that_could_not_be_sent_takes_no_room() -> None:
    def fail(part: Part, data: memoryview) -> None:
        raise ValueError("a message has too many bytes")

    async def transfer() -> None:
        outgoing, fd = Outgoing(fail), memory_file("file")
        os.truncate(fd, PART_BYTES)
        for _ in range(2 * MAX_WINDOW_BYTES // PART_BYTES):
            with pytest.raises(ValueError, match="too many"):
                await asyncio.wait_for(outgoing.send_file(ClosureLabel("cafe"), fd), 10)
        os.close(fd)

    asyncio.run(transfer())


class CheckpointReceiver:
    """The kernel's end of an agent whose rank 0 saves checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agent: Any = RemoteAgent(Mock(), Mock(), "")
        self.agent.attempt, self.agent.sink = ("cafe", 1), Mock()
        self.agent.job = SimpleNamespace(job=SimpleNamespace(checkpoints=folder, now_s=lambda: 0.0))

    def take(self, whole: bytes, start: int, until: int, attempt: int = 1) -> None:
        label = RankFile("cafe", attempt, 0, SavedCheckpoint("checkpoint"))
        part = FilePart(label, 1, len(whole), start)
        self.agent.take(part, memoryview(whole[start:until]))

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def notices(self) -> list[str]:
        events = [call.args[0] for call in self.agent.sink.emit.call_args_list]
        return [event.text for event in events if isinstance(event, ev.Notice)]


def test_a_checkpoint_is_written_as_it_arrives(tmp_path: Path) -> None:
    """The one before stays until its end; a part of an attempt that is over is left out."""
    receiver = CheckpointReceiver(tmp_path / "checkpoints")
    receiver.take(b"before", 0, 6)
    receiver.take(b"0123456789", 0, 4)
    receiver.take(b"##########", 4, 8, attempt=0)
    assert receiver.files() == {"checkpoint": b"before", ".checkpoint.arriving": b"0123"}
    receiver.take(b"0123456789", 4, 10)
    assert receiver.files() == {"checkpoint": b"0123456789"}
    receiver.take(b"of a lost host", 0, 4)
    run_log.drop_incomplete(receiver.folder)
    assert receiver.files() == {"checkpoint": b"0123456789"} and receiver.notices() == []


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    """It is reported once, and the rest of it is left out."""
    receiver = CheckpointReceiver(tmp_path)
    receiver.take(b"before", 0, 6)
    for _ in range(2):
        (tmp_path / ".checkpoint.arriving").mkdir()  # which no file replaces
        receiver.take(b"0123456789", 0, 4)
        (tmp_path / ".checkpoint.arriving").rmdir()
        receiver.take(b"0123456789", 4, 10)
        assert receiver.files() == {"checkpoint": b"before"}
    assert len(receiver.notices()) == 1 and "cannot be kept here (Is a" in receiver.notices()[0]
    receiver.take(b"after", 0, 5)
    assert receiver.files() == {"checkpoint": b"after"}
