"""Coroutines that run beside their caller on the event loop, and end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Keeps tasks alive while they run: the event loop itself has weak references to them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` on the running event loop; return its task."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def wait(self) -> None:
        """Return when no task runs."""
        while self._running:
            await asyncio.wait(self._running)

    def cancel(self) -> None:
        """Cancel the tasks that run."""
        for task in self._running:
            task.cancel()
