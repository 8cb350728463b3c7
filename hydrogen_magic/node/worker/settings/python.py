"""Settings of Python and its standard library."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from hydrogen_magic.node.worker.settings.provider import Value, attribute, functions, table

_SYS = {"recursion limit": functions("getrecursionlimit", "setrecursionlimit", 1000)}

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


_context = methodcaller("getcontext")
_DECIMAL = {
    "precision": attribute(_context, "prec", 28),
    "rounding": attribute(_context, "rounding", "ROUND_HALF_EVEN"),
}

PROVIDERS = {
    "sys": table("sys", _SYS),
    "socket": table("socket", _SOCKET),
    "multiprocessing": table("multiprocessing", _MULTIPROCESSING),
    "decimal": table("decimal", _DECIMAL),
}
