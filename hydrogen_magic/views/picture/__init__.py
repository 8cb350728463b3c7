"""The finished picture of a gang: what stays in a saved notebook when no widget draws it."""

from hydrogen_magic.views.picture.page import html

__all__ = ["html"]
