"""Updates of displays in a Jupyter kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TypeVar

T = TypeVar("T")


def update(show: Callable[[], T]) -> T:
    """Display data in place of the previous display, from any thread.

    A thread of a detached gang carries the context of its own cell. Some clients ignore messages of a cell
    after its end; but an update is found by its id under any cell.
    """
    try:
        return Context().run(show)
    except LookupError:  # ipykernel 7.0 sends no messages outside of a cell
        return copy_context().run(show)
