"""Helpers of the observers: points of logged values, bars, callbacks, and a guard."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_Made = TypeVar("_Made")
_callbacks: dict[tuple[type[Any], type[Any]], type[Any]] = {}
"""Classes of our callbacks, by what they are made of."""


def for_each_gang(make: Callable[[], _Made]) -> Callable[[], _Made]:
    """Return a function that calls ``make`` once in each gang, and returns its result there.

    Each cell of a session is a gang with curves of its own.
    """
    made = functools.lru_cache(maxsize=1)(lambda reporter: make())
    return lambda: made(_reporter.current())


_unnumbered = for_each_gang(Counter[str])
"""Calls without a step, by the first name each of them logs."""


def log(values: Mapping[str, Any], step: Any) -> None:
    """Record values logged by a library: numbers become points, everything else is ignored.

    ``step`` may be any number; without one, the calls that log the same names are counted.
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
            with contextlib.suppress(TypeError):  # texts, images, tables: not shown
                reporter.log(at, {name: value})


def flattened(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of ``values``; those of a dict among them get its name as prefix."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            inner = flattened(value, separator)
            yield from ((f"{name}{separator}{entry}", one) for entry, one in inner)
        else:
            yield str(name), value


def _as_step(step: Any) -> int | None:
    try:
        return operator.index(step)
    except TypeError:
        pass  # a float, or not a number
    try:
        return int(step)
    except (TypeError, ValueError, OverflowError):
        return None


def _next_step(name: str) -> int:
    counts = _unnumbered()
    counts[name] += 1
    return counts[name] - 1


# ── who logs a value ─────────────────────────────────────────────────────────────────────────────


class Nesting(threading.local):
    """Whether this thread is inside of certain calls."""

    depth = 0

    def wrapping(
        self, original: Callable[..., Any], see: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        """Return ``original``, wrapped as such a call.

        ``see`` takes the arguments of each call before it, except of those inside of another one.
        """

        @wraps(original)
        def calls(*args: Any, **kwargs: Any) -> Any:
            if see is not None and not self.depth:
                see(*args, **kwargs)
            self.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1

        return calls


_claims = Nesting()
claiming = _claims.wrapping
"""Wraps a call whose writes on its thread are already recorded by its caller.

Lightning, Transformers and Accelerate pass their metrics to a ``SummaryWriter``, W&B or MLflow, on rank 0
only and partly under other names. Their observers take precedence; values that a user writes there
directly are recorded too.
"""


def followed(original: Callable[..., Any], by: Callable[..., object]) -> Callable[..., Any]:
    """Return ``original``, wrapped: ``by`` takes the result and the arguments of each call after it."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        by(result, *args, **kwargs)
        return result

    return call


def seen(original: Callable[..., Any], see: Callable[..., object]) -> Callable[..., Any]:
    """Return ``original``, wrapped: ``see`` takes the arguments of each call after it, unless claimed."""
    return followed(original, lambda _, /, *args, **kwargs: is_claimed() or see(*args, **kwargs))


def is_claimed() -> bool:
    """Return whether this thread is inside of a :func:`claiming` call."""
    return _claims.depth > 0


# ── progress ─────────────────────────────────────────────────────────────────────────────────────


class LibraryBar:
    """A progress bar of this rank; if it is shown after it was closed, a new one opens."""

    def __init__(self, unit: str = "batch") -> None:
        self._unit = unit
        self._number: int | None = None
        self._last: tuple[str, float, float | None] = ("", 0.0, None)

    @property
    def is_open(self) -> bool:
        """Whether it is shown, and not closed."""
        return self._number is not None

    def show(self, desc: str, n: float, total: float | None) -> None:
        """Report its progress; ``total`` may be None or infinite if unknown."""
        reporter = _reporter.current()
        if reporter is None:
            return
        if self._number is None:
            self._number = reporter.bars.new()
        bound = float(total) if total is not None and math.isfinite(total) else None
        self._last = (desc, float(n), bound)
        reporter.bars.update(self._number, *self._last, self._unit)

    def close(self) -> None:
        """Report its end, complete or not."""
        reporter, number = _reporter.current(), self._number
        self._number = None
        if reporter is not None and number is not None:
            reporter.bars.update(number, *self._last, self._unit, closed=True)


def is_own_stream(file: Any) -> bool:
    """Return True for streams to the rank's descriptors 1 or 2, False for a StringIO or a file."""
    if file is sys.__stdout__ or file is sys.__stderr__:
        return True
    try:
        return file.fileno() in (1, 2)
    except (AttributeError, OSError, TypeError, ValueError):
        return False


# ── callbacks ────────────────────────────────────────────────────────────────────────────────────


def callback_class(hooks: type[Any], base: type[Any]) -> type[Any]:
    """Return the class of callbacks with our ``hooks``; ``base`` is the library's own class."""

    # Users pickle and copy what holds a callback, such as a Trainer. Our class has no name by which pickle
    # could find it, but its parts have.
    def reduce(self: Any) -> tuple[Any, ...]:
        return new_callback, (hooks, base)

    if (hooks, base) not in _callbacks:
        _callbacks[hooks, base] = type("HydrogenCallback", (hooks, base), {"__reduce__": reduce})
    return _callbacks[hooks, base]


def new_callback(hooks: type[Any], base: type[Any]) -> Any:
    """Return a callback with our ``hooks``; in a process that is no rank it records nothing."""
    return callback_class(hooks, base)()


# ── the guard ────────────────────────────────────────────────────────────────────────────────────


def safely(observe: Callable[..., None]) -> Callable[..., None]:
    """Return ``observe``, wrapped: its first failure is reported, disables it, and is not raised."""
    has_failed = False

    @functools.wraps(observe)
    def observes(*args: Any, **kwargs: Any) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            observe(*args, **kwargs)
        except Exception as error:  # a different version of a library must not break the user's run
            has_failed = True
            cannot_observe(observe.__module__.rpartition(".")[2], error)

    return observes


def cannot_observe(library: str, error: Exception) -> None:
    """Report to the user that ``library`` works, but is not observed."""
    why = f"{type(error).__name__}: {error}"
    _reporter.notice("warning", f"{library} runs, but cannot be observed ({why})")
