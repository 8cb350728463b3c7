"""Points of curves: validated when they are logged, read when they are sent."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydrogen_magic.core import events as ev

_MAX_CELLS = 1 << 16
"""Points times columns in one event: about 1 MB of JSON, far below any message limit."""

_FEW_CELLS = 1 << 10
_MOST_EMPTY = 16
"""Maximum number of cells per value: calls that each log a different name would make an empty table."""

_STEPS = 1 << 63
"""Bound of 64-bit integers; events hold no larger ones."""

Point = tuple[float, int, dict[str, Any], "tuple[Any, ...]"]
"""Time, step, values, CUDA events after which the values can be read."""


def as_step(step: Any) -> int:
    """Return ``step`` as an int; raises TypeError if it is not a 64-bit integer."""
    if type(step) is not int:
        try:
            step = operator.index(step)
        except TypeError:
            kind = _type_name(step)
            raise TypeError(f"hm.log(step=…) must be an integer or None, got {kind}") from None
    if not -_STEPS <= step < _STEPS:
        raise TypeError("hm.log(step=…) must be an integer of 64 bits, got a larger one")
    return int(step)


def as_numbers(values: dict[str, Any]) -> tuple[Any, ...]:
    """Convert every value to a float, in place; return the CUDA events that some of them need.

    A CUDA tensor is replaced by a copy that can be read after those events, so that the caller does not
    wait for the GPU. Raises TypeError with the name of the metric if a value is not a number.
    """
    ready: tuple[Any, ...] = ()
    for name, value in values.items():
        if type(value) is not float:
            if getattr(value, "is_cuda", False) is True and value.numel() == 1:
                values[name], event = _copy_on_gpu(value)
                ready = (*ready, event)
            else:
                values[name] = _as_number(name, value)
    return ready


def _as_number(name: str, value: Any) -> float:
    try:
        if type(value) is int:
            return float(value)
        # detach: torch warns when a tensor that requires a gradient is converted to float
        plain = value.detach() if hasattr(value, "detach") else value
        plain = plain.item() if hasattr(plain, "item") else plain
        if isinstance(plain, (str, bytes, bytearray)):
            raise TypeError
        return float(plain)
    except OverflowError:
        most = f"{sys.float_info.max:.2g}"
        raise TypeError(f"hm.log({name}=…) must be at most {most}, got a larger integer") from None
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"hm.log({name}=…) must be a number or a tensor of one element, got {_type_name(value)}"
        ) from None


def _type_name(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    try:
        return f"{name} of shape {tuple(value.shape)}"
    except (AttributeError, TypeError):  # for example a class: its shape is a descriptor
        return name


def _copy_on_gpu(value: Any) -> tuple[Any, Any]:
    cuda = sys.modules["torch"].cuda
    copy = value.detach().clone()
    event = cuda.Event()
    event.record(cuda.current_stream(value.device))
    return copy, event


def is_computed(ready: tuple[Any, ...]) -> bool:
    try:
        return all(event.query() for event in ready)
    except RuntimeError:
        return True  # the device has failed: no more values are computed


def _read(value: Any) -> float:
    if type(value) is float:
        return value
    cuda = sys.modules["torch"].cuda
    try:
        # Our own stream: on the user's, reading would wait for all work queued there.
        with cuda.device(value.device), cuda.stream(cuda.Stream(value.device)):
            return float(value)
    except (RuntimeError, TypeError):
        return float("nan")  # the device has failed, or the tensor is complex


def chunks(points: list[Point]) -> Iterator[list[Point]]:
    """Split ``points`` so that points times columns is limited and most cells have a value."""
    chunk: list[Point] = []
    columns: set[str] = set()
    n_values = 0
    for point in points:
        n_cells = len(columns.union(point[2])) * (len(chunk) + 1)
        n_values += len(point[2])
        if chunk and n_cells > min(_MAX_CELLS, max(_FEW_CELLS, _MOST_EMPTY * n_values)):
            yield chunk
            chunk, columns, n_values = [], set(), len(point[2])
        chunk.append(point)
        columns.update(point[2])
    if chunk:
        yield chunk


def as_metrics(at_s: float, rank: int, points: Sequence[Point], skipped: int) -> ev.Metrics:
    times_s, steps, rows, _ = zip(*points, strict=True)
    names = dict.fromkeys(name for row in rows for name in row)
    values: Mapping[str, tuple[float | None, ...]] = {
        name: tuple(_read(row[name]) if name in row else None for row in rows) for name in names
    }
    return ev.Metrics(at_s, rank, steps, times_s, values, skipped)
