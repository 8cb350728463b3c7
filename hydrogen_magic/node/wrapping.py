"""Wrappers of library functions, which ``warnings`` does not take for the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function")


def transparent(function: _Function) -> _Function:
    """Return ``function`` with frames that the ``stacklevel`` of a warning does not count.

    ``warnings`` leaves out files whose names contain "importlib" and "_bootstrap", and so does ``logging``
    since Python 3.11. A library's warning then names the user's line that called the wrapper.
    """
    made = cast("FunctionType", function)
    made.__code__ = made.__code__.replace(
        co_filename=f"{made.__code__.co_filename} <importlib._bootstrap>"
    )
    return function


def wraps(original: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Return a decorator: :func:`functools.wraps` for a wrapper with such frames."""

    def decorate(wrapper: _Function) -> _Function:
        functools.update_wrapper(cast("Callable[..., Any]", transparent(wrapper)), original)
        return wrapper

    return decorate
