"""Names the threads that keep a rank from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

_AFTER_S = 2.0
"""Threads that end by themselves have had time for that, and the agent has not ended the rank yet."""


def report_later(report: Callable[[tuple[str, ...]], None]) -> None:
    """Call ``report`` with the names of the threads for which the exit still waits in two seconds."""
    if _awaited():
        timer = threading.Timer(_AFTER_S, lambda: report(_awaited()))
        timer.daemon = True
        timer.start()


def _awaited() -> tuple[str, ...]:
    main = threading.main_thread()
    return tuple(one.name for one in threading.enumerate() if one is not main and not one.daemon)
