"""What the observers of libraries share: points of whatever a library logs, bars, and a guard."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hydrogen_magic.node.worker import reporter as _reporter

__all__ = ["LibraryBar", "cannot_observe", "claimed", "claiming", "is_claimed", "log", "safely"]

_unnumbered: Counter[str] = Counter()
"""Calls without a step, by the first name each of them logs."""


class _Claims(threading.local):
    depth = 0


_claims = _Claims()


def log(values: Mapping[str, Any], step: Any) -> None:
    """Record what a library logs: numbers become points, everything else is passed over.

    ``step`` may be any number; without one, the calls that log the same are counted.
    """
    reporter = _reporter.current()
    if reporter is None or not values:
        return
    named = {str(name): value for name, value in values.items()}
    at = _as_step(step)
    if at is None:
        at = _next_step(next(iter(named)))
    try:
        reporter.log(at, dict(named))
    except TypeError:
        for name, value in named.items():
            with contextlib.suppress(TypeError):  # texts, images, tables: not ours to show
                reporter.log(at, {name: value})


def _as_step(step: Any) -> int | None:
    try:
        return operator.index(step)
    except TypeError:
        pass  # a float, or no number at all
    try:
        return int(step)
    except (TypeError, ValueError, OverflowError):
        return None


def _next_step(name: str) -> int:
    _unnumbered[name] += 1
    return _unnumbered[name] - 1


# ── who logs what ────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def claimed() -> Iterator[None]:
    """Say that what this thread writes meanwhile is recorded already, by whoever calls the writer.

    Lightning, Transformers and Accelerate hand their metrics on to a ``SummaryWriter``, on rank 0
    alone and partly under other names. They win; what a user writes there directly is seen too.
    """
    _claims.depth += 1
    try:
        yield
    finally:
        _claims.depth -= 1


def claiming(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original``, run inside of :func:`claimed`."""

    @functools.wraps(original)
    def claims(*args: Any, **kwargs: Any) -> Any:
        with claimed():
            return original(*args, **kwargs)

    return claims


def is_claimed() -> bool:
    """Return whether this thread is inside of :func:`claimed`."""
    return _claims.depth > 0


# ── progress ─────────────────────────────────────────────────────────────────────────────────────


class LibraryBar:
    """A progress bar of this rank; after it was closed, showing it opens a new one."""

    def __init__(self, unit: str = "batch") -> None:
        self._unit = unit
        self._number: int | None = None
        self._last: tuple[str, float, float | None] = ("", 0.0, None)

    def show(self, desc: str, n: float, total: float | None) -> None:
        """Report how far it is; ``total`` may be None or infinite where nobody knows."""
        reporter = _reporter.current()
        if reporter is None:
            return
        if self._number is None:
            self._number = reporter.new_bar()
        bound = float(total) if total is not None and math.isfinite(total) else None
        self._last = (desc, float(n), bound)
        reporter.progress(self._number, *self._last, self._unit)

    def close(self) -> None:
        """Report that it is over, however far it came."""
        reporter, number = _reporter.current(), self._number
        self._number = None
        if reporter is not None and number is not None:
            reporter.progress(number, *self._last, self._unit, closed=True)


# ── the guard ────────────────────────────────────────────────────────────────────────────────────


def safely(observe: Callable[..., None]) -> Callable[..., None]:
    """Return ``observe`` so that its failing is told once, ends it, and never reaches the user."""
    has_failed = False

    @functools.wraps(observe)
    def observes(*args: Any, **kwargs: Any) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            observe(*args, **kwargs)
        except Exception as error:  # another version of a library must not break the user's run
            has_failed = True
            cannot_observe(observe.__module__.rpartition(".")[2], error)

    return observes


def cannot_observe(library: str, error: Exception) -> None:
    """Tell the person in front that ``library`` works, but is not seen."""
    reporter = _reporter.current()
    if reporter is not None:
        why = f"{type(error).__name__}: {error}"
        reporter.notice("warning", f"{library} runs, but cannot be observed ({why})")
