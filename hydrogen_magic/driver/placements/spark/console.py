"""Spark's progress bar on the console, kept off while a gang runs: the gang has a view of its own.

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

__all__ = ["progress_bar_off"]

_NEVER_MS = 1 << 50
"""A time in the far future, in milliseconds since 1970."""
_DYING_MS = 5_000
"""Spark ends the last tasks of a failed stage after 2 to 4 s, and shows them until then."""

_lock = threading.Lock()
_n_gangs: Counter[str] = Counter()
"""Application -> how many gangs keep its bar off."""


@contextlib.contextmanager
def progress_bar_off(context: Any) -> Iterator[None]:
    """Keep the bar of this SparkContext (a Py4J object) from being drawn.

    The bar is not drawn within half a second of a job's end (``ConsoleProgressBar.refresh``); the
    last job's end is put into the future. Spark puts it right itself at the end of every job, so
    that it cannot stay off. So does the end of a gang's stage when the next cell's gang runs already,
    for which it is put off again; a job of the user's that ends meanwhile lets the bar come back.
    """
    bar = context.progressBar()
    if bar.isEmpty():
        yield
        return
    application = str(context.applicationId())
    _count(application, 1)
    _set_last_finish(bar.get(), _NEVER_MS)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the JVM is gone too; what is on its way says so
            _set_last_finish(bar.get(), int(time.time() * 1000) + _DYING_MS)
        raise
    finally:
        if _count(application, -1):
            with contextlib.suppress(Exception):
                _set_last_finish(bar.get(), _NEVER_MS)


def _count(application: str, more: int) -> int:
    """Return how many gangs keep the bar off, with ``more`` than there were."""
    with _lock:
        _n_gangs[application] += more
        return _n_gangs[application]


def _set_last_finish(bar: Any, at_ms: int) -> None:
    fields = {field.getName(): field for field in bar.getClass().getDeclaredFields()}
    field = fields.get("lastFinishTime")
    if field is not None:  # private to Spark, and another version may do without
        field.setAccessible(True)
        field.set(bar, at_ms)
