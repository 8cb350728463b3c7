"""Levels, handlers and filters of loggers."""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeGuard

from hydrogen_magic.node.worker.settings.provider import Provider, Stays, Undo
from hydrogen_magic.serialization.closure import Setting

_OWN_LOGGERS = re.compile(
    r"(asyncio|IPython|ipykernel|jedi|parso|prompt_toolkit|tornado|traitlets|zmq|Comm|comm|"
    r"hydrogen_magic|[A-Za-z]+App|alembic|huey|sqlalchemy\.engine|ContinuousBatchingLogger)(\.|$)"
    r"|c10d-|strobelight_"
)
"""Those of the notebook's own machinery, of torch and Transformers under other names, and those that MLflow
configures."""
_OWN_HANDLERS = {"absl", "_pytest", "ipykernel", "IPython", "hydrogen_magic", "mlflow"}
"""Packages that add handlers to the root logger, or to those of others, when they are imported."""


def _read_logging(module: Any) -> Iterator[Setting | Stays]:
    root = logging.getLogger()
    if root.manager.disable:
        yield Setting("logging", "logging", "disable", root.manager.disable)
    if getattr(logging, "_warnings_showwarning", None) is not None:
        yield Setting("logging", "logging", "captureWarnings", True)
    for name, logger in [("root", root), *root.manager.loggerDict.items()]:
        # Of hundreds of loggers nearly all are as they were made, so that is looked at first.
        if _is_configured(logger) and not _OWN_LOGGERS.match(name):
            yield from _read_logger(name, logger)


def _filters(owner: logging.Filterer) -> list[Any]:
    """Return the notebook's filters; libraries add theirs when they are imported."""
    return [
        one
        for one in owner.filters
        if type(one) is logging.Filter
        or "__main__" in (type(one).__module__, getattr(one, "__module__", None))
    ]


def _is_configured(logger: logging.Logger | logging.PlaceHolder) -> TypeGuard[logging.Logger]:
    return isinstance(logger, logging.Logger) and bool(
        logger.level or logger.handlers or logger.filters or logger.disabled or not logger.propagate
    )


def _read_logger(name: str, logger: logging.Logger) -> Iterator[Setting | Stays]:
    home = name.partition(".")[0]
    module = sys.modules.get(home) if name != "root" else None
    filters = _filters(logger)
    if "-packages" in str(getattr(module, "__file__", "")):
        # A library configures its loggers when it is imported; users change their levels.
        if logger.level or filters:
            of_library: Any = (logger.level, logger.propagate, logger.disabled, [], filters)
            yield Setting("logging", home, name, of_library)
        return
    if _is_of_library(logger):
        return
    handlers = []
    for handler in logger.handlers:
        stream = _stream_name(handler)
        makers = (type(handler), type(getattr(handler, "stream", None)))
        owners = {maker.__module__.partition(".")[0] for maker in makers}
        if stream is not None:
            formatter = _formatter(handler.formatter)
            kept = None if isinstance(formatter, Stays) else formatter
            handlers.append((stream, handler.level, kept, _filters(handler)))
            yield from (one for one in [formatter] if isinstance(one, Stays))
        elif not isinstance(handler, logging.NullHandler) and not owners & _OWN_HANDLERS:
            yield Stays(f"the {type(handler).__name__} of the logger {name!r}")
    default = logging.WARNING if name == "root" else logging.NOTSET
    state = (logger.level, logger.propagate, logger.disabled, handlers, filters)
    if state != (default, True, False, [], []):
        yield Setting("logging", "logging" if module is None else home, name, state)


def _is_of_library(logger: logging.Logger) -> bool:
    """Whether a library has made a logger of its own class, with its own formatter, as pyspark does."""
    maker = type(logger).__module__.partition(".")[0]
    formatters = (type(handler.formatter).__module__ for handler in logger.handlers)
    is_notebooks = maker in ("logging", "__main__")
    return not is_notebooks and any(name.partition(".")[0] == maker for name in formatters)


def _stream_name(handler: logging.Handler) -> str | None:
    """Return ``stdout`` or ``stderr`` for a plain handler of such a stream."""
    if type(handler) is not logging.StreamHandler:
        return None
    for name in ("stdout", "stderr"):
        streams = (getattr(sys, name), getattr(sys, f"__{name}__"))
        if handler.stream in streams or getattr(handler.stream, "name", "") in (name, f"<{name}>"):
            return name
    return None


def _formatter(formatter: logging.Formatter | None) -> Any:
    """Return a formatter in plain form if it is one of Python's own; only the notebook's own are sent."""
    if type(formatter).__module__ not in ("logging", "__main__", "builtins"):
        return Stays(f"a {type(formatter).__name__} of logging")
    if type(formatter) is not logging.Formatter:
        return formatter
    styles: dict[Any, str] = {style: kind for kind, (style, _) in logging._STYLES.items()}
    return (formatter._fmt, formatter.datefmt, styles.get(type(formatter._style), "%"))


def _apply_logging(module: Any, key: str, value: Any) -> Undo:
    if key in ("disable", "captureWarnings"):
        before = logging.getLogger().manager.disable if key == "disable" else False
        getattr(logging, key)(value)
        return partial(getattr(logging, key), before)
    logger = logging.getLogger(None if key == "root" else key)
    level, propagate, disabled, handlers, filters = value
    added: list[logging.Handler] = []
    undo = partial(
        _restore_logger, logger, (logger.level, logger.propagate, logger.disabled), added
    )
    _set_filters(logger, filters)
    if logger.level != level:  # each change clears the caches of all loggers
        logger.setLevel(level)
    logger.propagate, logger.disabled = propagate, disabled
    present = {_stream_name(handler) for handler in logger.handlers}
    for stream, handler_level, formatter, own_filters in handlers:
        if stream not in present:
            handler = logging.StreamHandler(getattr(sys, stream))
            handler.setLevel(handler_level)
            handler.filters[:] = own_filters
            handler.setFormatter(_made_formatter(formatter))
            logger.addHandler(handler)
            added.append(handler)
    return undo


def _made_formatter(form: Any) -> logging.Formatter | None:
    return logging.Formatter(*form) if isinstance(form, tuple) else form


_sent_filters: weakref.WeakKeyDictionary[logging.Logger, list[Any]] = weakref.WeakKeyDictionary()


def _set_filters(logger: logging.Logger, filters: list[Any]) -> None:
    """Add the notebook's filters, in place of those that it had before."""
    for one in _sent_filters.get(logger, ()):
        logger.removeFilter(one)
    for one in filters:
        logger.addFilter(one)
    _sent_filters[logger] = filters


def _restore_logger(
    logger: logging.Logger, state: tuple[Any, ...], added: Sequence[logging.Handler]
) -> None:
    level, logger.propagate, logger.disabled = state
    logger.handlers[:] = [handler for handler in logger.handlers if handler not in added]
    _set_filters(logger, [])
    logger.setLevel(level)


PROVIDERS = {"logging": Provider(_read_logging, _apply_logging)}
