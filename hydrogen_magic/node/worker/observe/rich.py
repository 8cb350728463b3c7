"""Observer of ``rich.progress``: its tasks become progress of the rank, which the views show.

A ``Progress`` on the rank's own output is not drawn there. One on a console of the user, such as of a file,
is drawn, and reported too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker import reporter as _reporter
from hydrogen_magic.node.worker.observe import metrics

_bars: weakref.WeakKeyDictionary[Any, dict[int, metrics.LibraryBar]] = weakref.WeakKeyDictionary()
"""``Progress`` -> the bars of its tasks, by their numbers."""


def attach(module: ModuleType) -> None:
    """Patch ``Progress``; ``module`` is ``rich.progress``."""
    kind = module.Progress
    kind.__init__ = _silenced(kind.__init__)
    kind.stop = _stopping(kind.stop)
    kind.add_task = _adding(kind.add_task)
    kind.remove_task = _removing(kind.remove_task)
    for name in ("advance", "reset", "update"):
        setattr(kind, name, metrics.seen(getattr(kind, name), _see))


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────


class _NotDrawn:
    """Replaces the ``Live`` of a ``Progress``. Threads of rich end when it is not started."""

    def __init__(self, live: Any) -> None:
        self._live = live
        self.is_started = False

    def start(self, refresh: bool = False) -> None:
        self.is_started = True

    def stop(self) -> None:
        self.is_started = False

    def refresh(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._live, name)


def _silenced(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if _reporter.current() is not None and metrics.is_own_stream(self.console.file):
            self.live = _NotDrawn(self.live)

    return __init__


def _stopping(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def stop(self: Any) -> None:
        if isinstance(self.live, _NotDrawn):
            self.live.stop()  # the original would print an empty line
        else:
            original(self)
        for bar in _bars.pop(self, {}).values():
            bar.close()

    return stop


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def _adding(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def add_task(self: Any, *args: Any, **kwargs: Any) -> int:
        number = original(self, *args, **kwargs)
        _see(self, number)
        return number

    return add_task


def _removing(original: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    @functools.wraps(original)
    def remove_task(self: Any, task_id: int) -> None:
        original(self, task_id)
        bar = _bars.get(self, {}).pop(task_id, None)
        if bar is not None:
            bar.close()

    return remove_task


@metrics.safely
def _see(progress: Any, task_id: int, *_: Any, **__: Any) -> None:
    if progress.disable or metrics.is_claimed():
        return
    task = next(each for each in progress.tasks if each.id == task_id)
    bar = _bars.setdefault(progress, {}).setdefault(task_id, metrics.LibraryBar("it"))
    if task.visible and (bar.is_open or not task.finished):
        bar.show(_plain(task.description), task.completed, task.total)
    if task.finished or not task.visible:
        bar.close()


@functools.lru_cache
def _plain(description: str) -> str:
    """Return a description without its markup, such as of colors."""
    from rich import errors, markup

    try:
        return str(markup.render(description))
    except errors.MarkupError:  # its column may take it as plain text
        return description
