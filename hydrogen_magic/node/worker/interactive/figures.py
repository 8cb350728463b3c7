"""Figures of a rank below the cell."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from hydrogen_magic.node.worker.interactive.display_functions import display, shows_below_cell

BACKEND = "module://hydrogen_magic.node.worker.interactive.figure_backend"
"""Matplotlib's name of the backend."""


def show(*_: object, **__: object) -> None:
    """Show all open figures, then close them, as a notebook does."""
    from matplotlib import pyplot

    try:
        for number in pyplot.get_fignums() if shows_below_cell() else ():
            display(pyplot.figure(number))
    finally:
        pyplot.close("all")


def show_open() -> None:
    """Show figures that are open at the end of a cell; one that cannot be drawn does not fail the cell."""
    _finish(show)


def close_open() -> None:
    """Close figures that a stopped cell has left open: the next one of its session would draw into them."""
    _finish(lambda: sys.modules["matplotlib.pyplot"].close("all"))


def _finish(end: Callable[[], object]) -> None:
    pyplot = sys.modules.get("matplotlib.pyplot")
    try:
        if pyplot is not None and pyplot.get_fignums() and _is_chosen():
            end()
    except Exception:
        traceback.print_exc()


def _is_chosen() -> bool:
    import matplotlib

    return str(matplotlib.get_backend()) == BACKEND
