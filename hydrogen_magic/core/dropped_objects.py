"""What is deleted once nothing in this process refers to an object any more."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

process_ends = threading.Event()
"""Set at the end of this process, when all objects are dropped: what is for the next one stays."""


def when_dropped(obj: object, action: Callable[[], object]) -> None:
    """Call ``action``, which must not refer to ``obj``, when nothing refers to that any more.

    Not in forks of this process, nor at its end.
    """
    owner = os.getpid()

    def act() -> None:
        if os.getpid() == owner and not process_ends.is_set():
            action()

    weakref.finalize(obj, act).atexit = False
