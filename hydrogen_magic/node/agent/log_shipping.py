"""State of an agent for a kernel on another machine: its clock, its directory, and its ranks' logs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent.timeline_following import ShippedFile
from hydrogen_magic.transport.file_transfer import PART_BYTES

_SHIP_S = 0.2
_QUICK_S = 0.005
_MOST_ANSWERS = 5
"""If no answer is quick, as through a relay, the best of this many is used."""


class Clock:
    """An estimate of the kernel's monotonic clock, from requests and their answers."""

    def __init__(self) -> None:
        self._n_answers = 0
        self._best_s = float("inf")
        self._offset_s = 0.0

    def note(self, sent_s: float, kernels_s: float) -> bool:
        """Record that a request sent at ``sent_s`` of our clock was answered with ``kernels_s``.

        The quickest answer is the most accurate: its error is at most half of its round trip.
        Returns whether it is accurate enough; the first request also waits until the connection is
        established, possibly for seconds.
        """
        self._n_answers += 1
        now_s = time.monotonic()
        if now_s - sent_s <= self._best_s:
            self._best_s = now_s - sent_s
            self._offset_s = kernels_s - (now_s + sent_s) / 2
        return self._best_s < _QUICK_S or self._n_answers >= _MOST_ANSWERS

    def here(self, kernels_s: float) -> float:
        """Return the time on our clock at the kernel's ``kernels_s``."""
        return kernels_s - self._offset_s


@dataclass
class LogShipper:
    """Sends new data of the ranks' log files in full: the kernel keeps the run's record."""

    gang: str
    folder: Path
    timelines: Sequence[ShippedFile]
    """Those of libraries, sent up to their last complete object."""
    send: Callable[[msg.RecordPart, bytes], Awaitable[None]]
    """Takes a part and its bytes."""
    _sent: dict[Path, int] = field(default_factory=dict)
    _shipping: asyncio.Task[None] | None = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        self._shipping = asyncio.ensure_future(self._ship())

    async def finish(self) -> None:
        """Return when all existing data has been sent."""
        self._over.set()
        if self._shipping is not None:
            await self._shipping

    async def _ship(self) -> None:
        over = False
        while not over:
            over = self._over.is_set()  # checked first: data written before is sent below
            for path in sorted(self.folder.glob("rank-*.log")):
                with suppress(OSError):  # removed by its rank, or with our folder
                    await self._ship_file(path, path.stat().st_size)
            for kept in tuple(self.timelines):
                with suppress(OSError):
                    await self._ship_file(kept.path, kept.settled, end="]")
            if not over:
                try:
                    await asyncio.wait_for(self._over.wait(), _SHIP_S)
                except asyncio.TimeoutError:
                    continue

    async def _ship_file(self, path: Path, until: int, end: str = "") -> None:
        sent = self._sent.get(path, 0)
        if sent == until:
            return
        with path.open("rb") as file:
            file.seek(sent)
            while data := file.read(min(PART_BYTES, until - sent)):
                await self.send(msg.RecordPart(self.gang, path.name, sent, end), data)
                sent = self._sent[path] = file.tell()


def usable_directory(wanted: str, own: Path) -> str:
    """Return ``wanted``, the notebook's directory, if it exists here; otherwise ``own``."""
    is_usable = os.path.isdir(wanted) and os.access(wanted, os.R_OK | os.X_OK)
    return wanted if is_usable else str(own)
