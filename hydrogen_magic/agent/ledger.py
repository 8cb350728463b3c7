"""What an agent keeps for a kernel on another machine: its time, its directory, its ranks' logs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from hydrogen_magic.transfer import PART_BYTES

__all__ = ["Clock", "Logs", "usable_directory"]

_SHIP_S = 0.2


class Clock:
    """The kernel's monotonic clock, as well as a question and its answer can tell."""

    def __init__(self) -> None:
        self._best_s = float("inf")
        self._offset_s = 0.0

    def note(self, sent_s: float, kernels_s: float) -> None:
        """Note that a question sent at ``sent_s`` of our clock was answered with ``kernels_s``.

        The quickest answer is the truest: it is wrong by half of what it took at most.
        """
        now_s = time.monotonic()
        if now_s - sent_s <= self._best_s:
            self._best_s = now_s - sent_s
            self._offset_s = kernels_s - (now_s + sent_s) / 2

    def here(self, kernels_s: float) -> float:
        """Return our clock at the kernel's ``kernels_s``."""
        return kernels_s - self._offset_s


class Logs:
    """Sends on what ranks' log files get, as it comes and whole: the kernel keeps the run's record."""

    def __init__(self, folder: Path, send: Callable[[int, bytes], Awaitable[None]]) -> None:
        self._folder = folder
        self._send = send
        self._sent: dict[int, int] = {}
        self._shipping: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    def begin(self) -> None:
        self._shipping = asyncio.ensure_future(self._ship())

    async def finish(self) -> None:
        """Return when everything that is there has been sent."""
        self._over.set()
        if self._shipping is not None:
            await self._shipping

    async def _ship(self) -> None:
        over = False
        while not over:
            over = self._over.is_set()  # looked at first: what was written before is sent below
            for path in sorted(self._folder.glob("rank-*.log")):
                await self._ship_file(path, int(path.stem.partition("-")[2]))
            if not over:
                try:
                    await asyncio.wait_for(self._over.wait(), _SHIP_S)
                except asyncio.TimeoutError:
                    continue

    async def _ship_file(self, path: Path, rank: int) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self._sent.get(rank, 0) < size:
                file.seek(self._sent.get(rank, 0))
                data = file.read(PART_BYTES)
                self._sent[rank] = file.tell()
                await self._send(rank, data)


def usable_directory(wanted: str, own: Path) -> str:
    """Return ``wanted``, the notebook's directory, where it is here as well; else ``own``, made."""
    if os.path.isdir(wanted) and os.access(wanted, os.R_OK | os.X_OK):
        return wanted
    own.mkdir(parents=True, exist_ok=True)
    return str(own)
