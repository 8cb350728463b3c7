"""Figures of a rank appear below the cell, as those of a notebook do.

A notebook's own backend needs IPython. Backends that the user has chosen for files stay.
"""

from __future__ import annotations

from typing import Any

from hydrogen_magic.node.worker.interactive import figures

_FOR_FILES = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")


def attach(module: Any) -> None:
    """Choose the backend; ``module`` is ``matplotlib``, whose import has read ``MPLBACKEND``."""
    # Not by [], which chooses a backend and imports it.
    chosen = dict.get(module.rcParams, "backend")
    if not (isinstance(chosen, str) and chosen.lower() in _FOR_FILES):
        module.use(figures.BACKEND)
