"""Finds the names that a cell reads before it has definitely bound them itself.

Order matters: a cell that assigns ``model`` before it reads it does not need the notebook's ``model``,
which may be large, stale, or unpicklable. The body of a function counts as read where the function is next
used, not where it is defined.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from hydrogen_magic.capture.flow import Flow, Inner, UnboundUse
from hydrogen_magic.capture.scopes import imported_modules

__all__ = ["CellNames", "UnboundUse", "analyse"]


@dataclass(frozen=True)
class CellNames:
    """A cell's use of global names."""

    uses: tuple[UnboundUse, ...]
    """In reading order; a name is repeated only if fewer names are bound."""
    assigned: frozenset[str]
    """Every name that the cell may bind."""
    modules: tuple[str, ...]
    """Full names of the modules that it imports itself."""
    attributes: frozenset[str]
    """Every attribute name in the cell."""
    has_star: bool
    """It imports ``*``: the bound names are unknown."""


def analyse(
    tree: ast.Module,
    *,
    postponed: bool = False,
    deferred: bool = True,
    inner: Inner = lambda name: (),
) -> CellNames:
    """Return the names that ``tree``, a cell, uses from the notebook.

    ``postponed``: annotations are not evaluated. ``deferred``: bodies of functions that the cell defines
    but does not use count as read at its end. ``inner(name)``: global names read by the notebook's object
    ``name``.
    """
    walker = Flow(postponed, inner)
    walker.block(tree.body)
    if deferred:
        walker.finish()
    return CellNames(
        tuple(walker.uses),
        frozenset(walker.assigned),
        tuple(imported_modules(tree)),
        frozenset(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        walker.has_star,
    )
