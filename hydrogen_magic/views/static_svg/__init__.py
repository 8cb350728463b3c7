"""The static picture of a gang in a saved notebook, for pages without the widget."""

from hydrogen_magic.views.static_svg.page import html

__all__ = ["html"]
