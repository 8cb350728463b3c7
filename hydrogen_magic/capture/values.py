"""The values that callers of this package give and get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.payload import Payload

__all__ = ["Captured", "CellText", "CapturedItem"]


@dataclass(frozen=True)
class CapturedItem:
    """One thing that travels."""

    name: str
    """As the notebook calls it."""
    kind: str
    """``import``, ``module`` (a local one, by value), ``function``, ``class`` or ``value``."""
    nbytes: int
    """Bytes it adds to the closure; what several names share counts once, for the first."""
    why: str
    """``line 3``, or ``used by train() in Cell In[4], line 2``."""


@dataclass(frozen=True)
class CellText:
    """The cell to be run on the ranks."""

    body: str
    """The magic's body as typed."""
    filename: str
    """File name for tracebacks, such as ``<cell 7>``."""
    label: str
    """What people call it, such as ``Cell In[7]``."""
    first_line: int
    """Number of the body's first line in the visible cell; 2 after a one-line magic."""
    transform: Callable[[str], str]
    """IPython's ``transform_cell`` (``%`` and ``!`` lines); the identity outside IPython."""


@dataclass(frozen=True)
class Captured:
    """A closure, ready to be sent, and what there is to say about it."""

    parcel: Payload
    """For :func:`hydrogen_magic.node.worker.namespace.load`."""
    inventory: tuple[CapturedItem, ...]
    """What travels, largest first among values."""
    preload: tuple[str, ...]
    """Third-party modules, by full name, that the ranks will import."""
    cells: Mapping[str, str]
    """File names in tracebacks of ranks, and what people call those cells."""
    warnings: tuple[str, ...]
    """What the user should know although it is no error."""
    needs: tuple[str, ...] = ()
    """Of :attr:`preload`, those without which the ranks cannot run it."""
    originals: Originals = field(default_factory=Originals)
    """The notebook's objects that ``--out`` variables refer to."""
