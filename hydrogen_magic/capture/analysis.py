"""Which names a cell reads before it has surely bound them itself.

Order matters: a cell that assigns ``model`` before it reads it does not need the notebook's
``model``, which may be large, stale, or unable to travel. The body of a function counts as read
where the function is next used, not where it is defined.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from hydrogen_magic.capture.flow import Flow, Inner, UnboundUse
from hydrogen_magic.capture.scopes import imported_modules

__all__ = ["CellNames", "UnboundUse", "analyse"]


@dataclass(frozen=True)
class CellNames:
    """What a cell does with global names."""

    uses: tuple[UnboundUse, ...]
    """In the order of reading; a name comes again only where fewer names are bound."""
    assigned: frozenset[str]
    """Every name that the cell binds somewhere."""
    modules: tuple[str, ...]
    """Full names of the modules that it imports itself."""
    attributes: frozenset[str]
    """Every attribute name in it."""
    has_star: bool
    """It imports ``*``: what it binds cannot be known."""


def analyse(
    tree: ast.Module,
    *,
    postponed: bool = False,
    deferred: bool = True,
    inner: Inner = lambda name: (),
) -> CellNames:
    """Return the names that ``tree``, a cell, uses of the notebook.

    ``postponed``: annotations are not evaluated. ``deferred``: bodies of functions that the cell
    defines and does not use count as read at its end. ``inner(name)``: global names read by what the
    notebook calls ``name``.
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
