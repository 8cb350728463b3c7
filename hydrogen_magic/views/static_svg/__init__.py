"""The finished picture of a gang: what stays in a saved notebook when no widget draws it."""

from hydrogen_magic.views.static_svg.page import html

__all__ = ["html"]
