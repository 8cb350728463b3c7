"""Sinks, levels and extra values of loguru's logger."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hydrogen_magic.node.worker.settings.provider import Provider, Stays, Undo
from hydrogen_magic.serialization.closure import Setting

_N_LEVELS = 7
"""Those of loguru itself."""


def _read(loguru: Any) -> Iterator[Setting | Stays]:
    core = loguru.logger._core
    is_first = [*core.handlers] == [0] and core.handlers_count == 1  # that of the import
    is_changed = core.extra or core.patcher or core.activation_list
    if is_first and not is_changed and len(core.levels) == _N_LEVELS:
        return
    state, handlers = core.__getstate__(), core.handlers.items()
    sent = {key: each for key, each in handlers if type(each._sink).__name__ != "FileSink"}
    yield Setting("loguru", "loguru", "sinks and levels", {**state, "handlers": sent})
    if len(sent) < len(handlers):
        yield Stays("the file sinks of loguru")


def _apply(loguru: Any, _: str, state: dict[str, Any]) -> Undo:
    core = loguru.logger._core  # which all loggers of loguru share
    before = core.__getstate__()
    core.__setstate__(state)
    return partial(core.__setstate__, before)


PROVIDERS = {"loguru": Provider(_read, _apply)}
