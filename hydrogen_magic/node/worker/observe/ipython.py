"""What code on a rank displays through IPython appears below the cell.

Without this, IPython would print it: a rank has no shell of IPython.
"""

from __future__ import annotations

from types import ModuleType

from hydrogen_magic.node.worker.interactive import display_functions


def attach(module: ModuleType) -> None:
    """Replace the functions of a module that has them.

    ``IPython.core.display_functions``; ``IPython.core.display`` before IPython 8; ``IPython.display``.
    """
    for name in vars(module).keys() & {*display_functions.__all__}:
        setattr(module, name, getattr(display_functions, name))
