"""Spark's progress bar on the console, kept off while a gang runs: the gang has a view of its own.

In a notebook Spark shows it by default (``spark.ui.showConsoleProgress``): the JVM writes
``[Stage 3:>  (0 + 2) / 2]`` to the kernel's own stderr for as long as a stage runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["progress_bar_off"]

_NEVER_MS = 1 << 50
"""A time in the far future, in milliseconds since 1970."""
_DYING_MS = 5_000
"""Spark ends the last tasks of a failed stage after 2 to 4 s, and shows them until then."""


@contextlib.contextmanager
def progress_bar_off(context: Any) -> Iterator[None]:
    """Keep the bar of this SparkContext (a Py4J object) from being drawn.

    The bar is not drawn within half a second of a job's end (``ConsoleProgressBar.refresh``); the
    last job's end is put into the future. Spark puts it right itself at the end of every job, so
    that it cannot stay off, and a job of the user's that ends meanwhile lets it come back.
    """
    bar = context.progressBar()
    if bar.isEmpty():
        yield
        return
    _set_last_finish(bar.get(), _NEVER_MS)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the JVM is gone too; what is on its way says so
            _set_last_finish(bar.get(), int(time.time() * 1000) + _DYING_MS)
        raise


def _set_last_finish(bar: Any, at_ms: int) -> None:
    fields = {field.getName(): field for field in bar.getClass().getDeclaredFields()}
    field = fields.get("lastFinishTime")
    if field is not None:  # private to Spark, and another version may do without
        field.setAccessible(True)
        field.set(bar, at_ms)
