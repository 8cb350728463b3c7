"""The event loop of a rank of a session: the tasks of a cell go on in later cells."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any


class SessionLoop:
    """Runs the coroutines of a rank's cells, one after another; the loop stops in between."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end. Other tasks stay, also if it fails or is interrupted."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        asyncio.set_event_loop(loop)  # ``asyncio.run`` in a cell leaves none
        main = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(main)
        except BaseException:
            if not main.done():
                main.cancel()
                loop.run_until_complete(asyncio.wait([main]))
            if not main.cancelled():
                main.exception()  # asyncio logs exceptions that were never retrieved
            raise

    def close(self) -> None:
        """Cancel the tasks that are left, and close the loop, as ``asyncio.run`` does."""
        loop = self._loop
        # A child that a cell has forked shares the selector with the rank.
        if loop is None or loop.is_closed() or os.getpid() != self._pid:
            return
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
