"""The backend of matplotlib on ranks; only matplotlib itself imports it."""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

from hydrogen_magic.node.worker.interactive.figures import show

__all__ = ["FigureCanvas", "show"]
