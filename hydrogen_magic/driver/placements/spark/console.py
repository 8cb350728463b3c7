"""Spark's progress bar on the console, hidden while a gang runs: the gang has its own view.

In a notebook Spark shows it by default (``spark.ui.showConsoleProgress``): the JVM writes
``[Stage 3:>  (0 + 2) / 2]`` to the kernel's own stderr for as long as a stage runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

_NEVER_MS = 1 << 50
"""A time in the far future, in milliseconds since 1970."""
_DYING_MS = 5_000
"""Spark ends the last tasks of a failed stage after 2 to 4 s, and shows them until then."""

_lock = threading.Lock()
_n_gangs: Counter[str] = Counter()
"""Application -> number of gangs that hide its bar."""


@contextlib.contextmanager
def progress_bar_off(bar: Any, application: str) -> Iterator[None]:
    """Hide the bar of an application: a Scala Option of Spark's object, or None if it cannot be had.

    The bar is not drawn within half a second of a job's end (``ConsoleProgressBar.refresh``), so the last
    job's end is set to a time in the future. Spark corrects it at the end of every job, so the bar cannot
    stay hidden. This includes the end of a gang's stage while the gang of the next cell runs, for which it
    is hidden again; a job of the user that ends meanwhile shows the bar again.
    """
    if bar is None or bar.isEmpty():
        yield
        return
    _count(application, 1)
    with contextlib.suppress(Exception):  # private to Spark: then the bar is seen
        _set_last_finish(bar.get(), _NEVER_MS)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the JVM has exited too; pending calls report it
            _set_last_finish(bar.get(), int(time.time() * 1000) + _DYING_MS)
        raise
    finally:
        if _count(application, -1):
            with contextlib.suppress(Exception):
                _set_last_finish(bar.get(), _NEVER_MS)


def _count(application: str, more: int) -> int:
    """Return how many gangs hide the bar, after adding ``more``."""
    with _lock:
        _n_gangs[application] += more
        return _n_gangs[application]


def _set_last_finish(bar: Any, at_ms: int) -> None:
    fields = {field.getName(): field for field in bar.getClass().getDeclaredFields()}
    field = fields.get("lastFinishTime")
    if field is not None:  # private to Spark, and other versions may lack it
        field.setAccessible(True)
        field.set(bar, at_ms)
