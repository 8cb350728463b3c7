"""Settings of Python and its standard library."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from hydrogen_magic.node.worker.settings.provider import (
    Provider,
    Stays,
    Undo,
    Value,
    attribute,
    functions,
    table,
)
from hydrogen_magic.serialization.closure import Setting

_SYS = {
    "recursion limit": functions("getrecursionlimit", "setrecursionlimit", 1000),
    "switch interval": functions("getswitchinterval", "setswitchinterval", 0.005),
}

_SOCKET = {"default timeout": functions("getdefaulttimeout", "setdefaulttimeout", None)}


def _start_method(multiprocessing: Any) -> str | None:
    """Return the start method unless it is the default, which the first use makes the chosen one."""
    method: str | None = multiprocessing.get_start_method(allow_none=True)
    return None if method == multiprocessing.get_all_start_methods()[0] else method


_MULTIPROCESSING = {
    "start method": Value(
        _start_method,
        lambda module, value: module.set_start_method(value, force=True),
        None,
    )
}


def _traps(decimal: Any) -> tuple[str, ...]:
    traps = decimal.getcontext().traps
    return tuple(sorted(signal.__name__ for signal, is_trapped in traps.items() if is_trapped))


def _set_traps(decimal: Any, names: Sequence[str]) -> None:
    traps = decimal.getcontext().traps
    for signal in list(traps):
        traps[signal] = signal.__name__ in names


_context = methodcaller("getcontext")
_DECIMAL = {
    "precision": attribute(_context, "prec", 28),
    "rounding": attribute(_context, "rounding", "ROUND_HALF_EVEN"),
    "Emin": attribute(_context, "Emin", -999999),
    "Emax": attribute(_context, "Emax", 999999),
    "capitals": attribute(_context, "capitals", 1),
    "clamp": attribute(_context, "clamp", 0),
    "traps": Value(_traps, _set_traps, ("DivisionByZero", "InvalidOperation", "Overflow")),
}

_LOCALE = ("LC_COLLATE", "LC_MONETARY", "LC_NUMERIC", "LC_TIME")
"""Categories that are those of C in any process until it changes them."""


def _read_locale(locale: Any) -> Iterator[Setting | Stays]:
    for name in _LOCALE:
        found = locale.setlocale(getattr(locale, name))
        # Qt and R take the locale of the environment; what a user chooses is another one.
        given = next(filter(None, map(os.environ.get, ("LC_ALL", name, "LANG"))), "C")
        if found not in ("C", "POSIX", given):
            yield Setting("locale", "locale", name, found)


def _apply_locale(locale: Any, key: str, value: Any) -> Undo:
    category = getattr(locale, key)
    before = locale.setlocale(category)
    locale.setlocale(category, value)
    return partial(locale.setlocale, category, before)


PROVIDERS = {
    "sys": table("sys", _SYS),
    "socket": table("socket", _SOCKET),
    "multiprocessing": table("multiprocessing", _MULTIPROCESSING),
    "decimal": table("decimal", _DECIMAL),
    "locale": Provider(_read_locale, _apply_locale),
}
