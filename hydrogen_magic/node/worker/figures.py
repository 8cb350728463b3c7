"""Figures of a rank below the cell."""

from __future__ import annotations

import sys

from hydrogen_magic.node.worker.display_functions import display, shows_below_cell

BACKEND = "module://hydrogen_magic.node.worker.figure_backend"
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
    """Show the figures that are open at the end of a cell."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and pyplot.get_fignums() and _is_chosen():
        show()


def _is_chosen() -> bool:
    import matplotlib

    return str(matplotlib.get_backend()) == BACKEND
