"""Validation of JSON values against the types that dataclasses declare.

Messages of ranks are validated once, on arrival. The code behind does not have to handle a time
that is not a number, or an integer of a thousand digits.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeVar, Union

_T = TypeVar("_T")


class MessageError(ValueError):
    """An invalid message or event: an unexpected kind, or a missing, unknown or mistyped field."""


_SCALARS: Mapping[Any, frozenset[type]] = {
    int: frozenset({int}),
    str: frozenset({str}),
    float: frozenset({float, int}),
    float | None: frozenset({float, int, type(None)}),
}
"""Item types of columns that are checked as a whole: ranks send thousands of numbers a second."""

_PLAIN = frozenset({bool, float, str})
_AS_THEY_ARE = _PLAIN | {int, type(None)}
_LEAST, _MOST = -(2**63), 2**63 - 1
"""Range of 64-bit integers, which columns of numbers hold."""

_LONGEST_S = 10**9
"""Thirty years: a later or infinite time would break every time axis."""


Check = Callable[[Any, str], Any]
"""Returns a value as a declared type, rebuilt from JSON; the text says where it is. Raises MessageError."""


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _times(cls: Any) -> Mapping[str, int]:
    """Return the fields that hold times, columns of times, or None, with the maximum of each."""
    longest = {"_s": _LONGEST_S, "_ns": _LONGEST_S * 10**9}
    return {
        name: most for name in _hints(cls) for unit, most in longest.items() if name.endswith(unit)
    }


def checked(declared: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the declared type, rebuilt from JSON, or raise :class:`MessageError`."""
    return _check_of(declared)(value, where)


@cache
def _check_of(declared: Any) -> Check:
    """Return the check of a declared type: looked at once, not for each of its values."""
    if declared is object:  # any JSON, which the reader checks
        return lambda value, where: value
    if hasattr(declared, "__dataclass_fields__"):
        return partial(_checked_dataclass, declared)
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if origin in (Union, types.UnionType):
        return partial(_checked_union, declared)
    if origin is tuple:
        return partial(_checked_column, declared, inner[0])
    if origin is not None and issubclass(origin, Mapping):
        return partial(_checked_mapping, declared, inner[1])
    return partial(_checked_scalar, declared)


def _mistyped(declared: Any, value: Any, where: str) -> MessageError:
    return MessageError(f"{where} should be {declared}, got {type(value).__name__}")


def _checked_scalar(declared: Any, value: Any, where: str) -> Any:
    kind = type(value)
    if declared is float and kind in (int, float):
        return _as_float(value, where)
    if kind is not declared:
        raise _mistyped(declared, value, where)
    if kind is int:
        _check_integers((value,), where)
    return value


def _checked_mapping(declared: Any, item: Any, values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _mistyped(declared, values, where)
    check = _check_of(item)
    return {
        str(key): part if _is_plainly(item, part) else check(part, f"{where}[{key}]")
        for key, part in values.items()
    }


def _checked_column(declared: Any, item: Any, values: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise _mistyped(declared, values, where)
    if item is object:
        return tuple(values)
    kinds = set(map(type, values))
    if not kinds <= _SCALARS.get(item, frozenset()) or (int in kinds and item is not int):
        check = _check_of(item)
        return tuple([check(value, where) for value in values])
    if item is int:
        _check_integers(values, where)
    return tuple(values)


def _as_float(value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise MessageError(f"{where} is too large for a float") from None


def _is_plainly(declared: Any, value: Any) -> bool:
    """Tell quickly whether a value has exactly the declared type, as most have."""
    kind = type(value)
    if kind is int:
        return declared is int and _LEAST <= value <= _MOST
    return kind is declared and kind in _PLAIN


def _check_integers(values: Sequence[int], where: str) -> None:
    if values and not _LEAST <= min(values) <= max(values) <= _MOST:
        raise MessageError(f"{where} does not fit into 64 bits")


def _check_times(value: Any, longest: int, where: str) -> None:
    """Raise MessageError for a time, or a column of times, outside of a gang's possible run."""
    if type(value) is float and -longest < value < longest:
        return
    times = value if isinstance(value, tuple) else (value,)
    # A sum detects non-finite values at any position; the result of a comparison depends on it.
    if times and not (math.isfinite(sum(times)) and -longest < min(times) <= max(times) < longest):
        raise MessageError(f"{where} is not a time within a gang's run")


def _checked_dataclass(declared: Any, value: Any, where: str) -> Any:
    hints = _hints(declared)
    if not isinstance(value, dict) or not value.keys() <= hints.keys():
        raise MessageError(f"{where} should be a dict with fields of {declared.__name__} only")
    parts = {
        name: part
        if _is_plainly(hints[name], part)
        else _check_of(hints[name])(part, f"{where}.{name}")
        for name, part in value.items()
    }
    for name, longest in _times(declared).items():
        if parts.get(name) is not None:
            _check_times(parts[name], longest, f"{where}.{name}")
    try:
        return declared(**parts)
    except TypeError as error:
        raise MessageError(f"{where}: {error}") from None


def _checked_union(declared: Any, value: Any, where: str) -> Any:
    for choice in typing.get_args(declared):
        if choice is type(None):
            if value is None:
                return None
        else:
            try:
                return _check_of(choice)(value, where)
            except MessageError:
                continue
    raise _mistyped(declared, value, where)


@cache
def kinds_of(base: Any) -> Mapping[str, type[Any]]:
    """Return the kinds of messages or events that are a ``base``, by name: classes without subclasses."""
    below = base.__subclasses__()
    if not below:
        return {base.__name__: base}
    return {name: kind for each in below for name, kind in kinds_of(each).items()}


def encode(value: object) -> list[Any]:
    """Return ``[kind, fields]`` of a message or event, ready for ``json.dumps``."""
    return [type(value).__name__, plain(value)]


def decode(raw: object, expected: type[_T]) -> _T:
    """Return the message or event in ``raw``, made by :func:`encode`; raise MessageError if it is malformed.

    ``expected``: the base class of those that the caller accepts.
    """
    if not (isinstance(raw, list) and len(raw) == 2 and isinstance(raw[0], str)):
        raise MessageError(f"expected a message [kind, fields], got {type(raw).__name__}")
    kind, fields = raw
    cls = kinds_of(expected).get(kind)  # type: ignore[arg-type]  # classes are hashable
    if cls is None:
        raise MessageError(f"expected a kind of {expected.__name__}, got {kind[:80]!r}")
    message: _T = checked(cls, fields, kind)
    return message


def plain(value: Any) -> Any:
    """Return what ``json.dumps`` takes for a dataclass: the reverse of :func:`checked`."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if hasattr(kind, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in kind.__dataclass_fields__}
    if isinstance(value, tuple):
        # Columns of a type: where the first is a plain value all are, thousands of them perhaps.
        is_nested = bool(value) and hasattr(type(value[0]), "__dataclass_fields__")
        return [plain(item) for item in value] if is_nested else list(value)
    if isinstance(value, Mapping) and hasattr(
        type(next(iter(value.values()), None)), "__dataclass_fields__"
    ):
        return {key: plain(item) for key, item in value.items()}
    return value
