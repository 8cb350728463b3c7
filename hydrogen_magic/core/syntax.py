"""Syntax trees of Python source, made in any thread, and without Python's warnings."""

from __future__ import annotations

import ast
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

_TRIES = 20
_WAIT_S = 1.0
"""A process that was forked while another thread held the lock must not wait for it forever."""
_lock = threading.Lock()


def parse(
    source: str,
    filename: str = "<unknown>",
    mode: str = "exec",
    flags: int = 0,
    *,
    warns: bool = False,
) -> Any:
    """Return what ``ast.parse`` returns, and raise what it raises.

    ``flags``: more flags for ``compile``. ``warns``: show Python's warnings, as of an invalid escape
    sequence; most sources have been compiled before, and those were shown then.

    Python 3.11 before 3.11.8 and 3.12 before 3.12.2 can raise a SystemError if two threads make syntax
    trees at the same time (https://github.com/python/cpython/issues/106905). Callers of this function
    wait for each other; if another thread interferes, the source is parsed again.
    """
    flags |= ast.PyCF_ONLY_AST
    is_held = _lock.acquire(timeout=_WAIT_S)
    try:
        with nullcontext() if warns else without_warnings():
            for n in range(_TRIES):
                try:
                    return compile(source, filename, mode, flags, dont_inherit=True)
                except SystemError:
                    if n == _TRIES - 1:
                        raise
    finally:
        if is_held:
            _lock.release()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Compile what has been compiled before, or will be on a rank: its warnings are shown there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of source that may not be Python; an empty one then."""
    try:
        tree: ast.Module = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # a raw cell with IPython lines, which comes twice; or an expression of thousands of parts
        return ast.Module([], [])
    return tree
