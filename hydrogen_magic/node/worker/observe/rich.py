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

from hydrogen_magic.node.worker.observe import helpers
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_bars: weakref.WeakKeyDictionary[Any, dict[int, helpers.LibraryBar]] = weakref.WeakKeyDictionary()
"""``Progress`` -> the bars of its tasks, by their numbers."""


def attach(module: ModuleType) -> None:
    """Patch ``Progress``; ``module`` is ``rich.progress``."""
    kind = module.Progress
    kind.__init__ = helpers.followed(kind.__init__, _silence)
    kind.stop = _stopping(kind.stop)
    kind.add_task = helpers.followed(kind.add_task, _see_new)
    kind.remove_task = helpers.followed(kind.remove_task, _forget)
    for name in ("advance", "reset", "update"):
        setattr(kind, name, helpers.seen(getattr(kind, name), _see))


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


def _silence(_: None, progress: Any, /, *args: Any, **kwargs: Any) -> None:
    if _reporter.current() is not None and helpers.is_own_stream(progress.console.file):
        progress.live = _NotDrawn(progress.live)


def _stopping(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(original)
    def stop(self: Any) -> None:
        if isinstance(self.live, _NotDrawn):
            self.live.stop()  # the original would print an empty line
        else:
            original(self)
        for bar in _bars.pop(self, {}).values():
            bar.close()

    return stop


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def _see_new(task_id: int, progress: Any, /, *_: Any, **__: Any) -> None:
    _see(progress, task_id)


def _forget(_: None, progress: Any, /, task_id: int) -> None:
    bar = _bars.get(progress, {}).pop(task_id, None)
    if bar is not None:
        bar.close()


@helpers.safely
def _see(progress: Any, /, task_id: int, *_: Any, **__: Any) -> None:
    if progress.disable or helpers.is_claimed():
        return
    task = next(each for each in progress.tasks if each.id == task_id)
    bar = _bars.setdefault(progress, {}).setdefault(task_id, helpers.LibraryBar("it"))
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
