"""What provides the settings of a library: its own functions, or a table of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from hydrogen_magic.serialization.closure import Setting


@dataclass(frozen=True)
class Stays:
    """A setting that is not sent."""

    name: str
    """What the user knows it by."""


Undo = Callable[[], object]


@dataclass(frozen=True)
class Provider:
    """Reads and applies the settings of one library."""

    read: Callable[[Any], Iterator[Setting | Stays]]
    """Return the settings of this process that differ from the defaults."""
    apply: Callable[[Any, str, Any], Undo]
    """Apply one setting, given the module, the key and the value."""


@dataclass(frozen=True)
class Value:
    """A setting that is read and written by functions of its library."""

    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]
    default: Any


def table(provider: str, values: Mapping[str, Value]) -> Provider:
    """Return a provider of the settings in a table."""

    def read(module: Any) -> Iterator[Setting | Stays]:
        for key, value in values.items():
            found = value.get(module)
            if found != value.default:
                yield Setting(provider, module.__name__, key, found)

    def apply(module: Any, key: str, value: Any) -> Undo:
        before = values[key].get(module)
        values[key].set(module, value)
        return partial(values[key].set, module, before)

    return Provider(read, apply)


def functions(get: str, change: str, default: Any) -> Value:
    """Return a value that two functions of the module read and write."""
    return Value(
        lambda module: attrgetter(get)(module)(),
        lambda module, value: attrgetter(change)(module)(value),
        default,
    )


def attribute(owner: Callable[[Any], Any], name: str, default: Any) -> Value:
    """Return a value that is an attribute of what ``owner`` finds in the module."""
    return Value(
        lambda module: getattr(owner(module), name),
        lambda module, value: setattr(owner(module), name, value),
        default,
    )
