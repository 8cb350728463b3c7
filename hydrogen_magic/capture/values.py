"""What a capture takes and returns: the text of a cell, and a closure with a list of what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.capture.ownership import SessionUse
from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.payload import Payload


@dataclass(frozen=True)
class CapturedItem:
    """One object that is sent."""

    name: str
    """Its name in the notebook."""
    kind: str
    """``import``, ``module`` (a local one, by value), ``function``, ``class`` or ``value``."""
    nbytes: int
    """Bytes it adds to the closure; objects shared by several names count for the first."""
    why: str
    """``line 3``, or ``used by train() in Cell In[4], line 2``."""


@dataclass(frozen=True)
class CellText:
    """The cell to run on the ranks."""

    body: str
    """The magic's body as typed."""
    filename: str
    """File name for tracebacks, such as ``<Cell In[7]>``."""
    label: str
    """Display name, such as ``Cell In[7]``."""
    first_line: int
    """Number of the body's first line in the visible cell; 2 after a one-line magic."""
    transform: Callable[[str], str]
    """IPython's ``transform_cell`` (``%`` and ``!`` lines); the identity outside of IPython."""

    @property
    def visible(self) -> str:
        """The body with the line numbers of the visible cell."""
        return "\n" * (self.first_line - 1) + self.body


@dataclass(frozen=True)
class Captured:
    """A closure that is ready to be sent, and messages about it."""

    payload: Payload
    """For :func:`hydrogen_magic.node.worker.namespace.load`."""
    inventory: tuple[CapturedItem, ...]
    """Objects that are sent, largest first among values."""
    preload: tuple[str, ...]
    """Third-party modules, by full name, that the ranks will import."""
    cells: Mapping[str, str]
    """File names in tracebacks of ranks, and display names of those cells."""
    warnings: tuple[str, ...]
    """Warnings for the user."""
    hints: tuple[str, ...] = ()
    """What applies to all cells of the notebook: a kernel shows each text with one gang only."""
    required_modules: tuple[str, ...] = ()
    """Those of :attr:`preload` without which the ranks cannot run the closure."""
    originals: Originals = field(default_factory=Originals)
    """The notebook's objects that ``--out`` variables refer to."""
    params: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Numbers, flags and short texts among the captured values, which tell runs apart."""
    digests: Callable[[], Mapping[str, str]] = dict
    """Returns a digest of every captured value by its name; see :mod:`hydrogen_magic.capture.fingerprint`."""
    digest_of: Callable[[Any], str] = repr
    """Returns the digest of another value that the ranks of the cell get."""
    setting_digests: Callable[[], Mapping[str, str]] = dict
    """Returns those of settings that are objects and do not affect results."""
    source: str = ""
    """Text of the cell as typed; empty for a script or a function."""
    assigned: frozenset[str] | None = None
    """Every name that a cell may assign; None if its code does not show all of them."""
    datasets: Mapping[str, str] = field(default_factory=dict)
    """Data of ``hm.dataset`` that it refers to and only this machine has: its name -> its folder."""
    data_places: tuple[str, ...] = ()
    """Paths and URLs of all data of ``hm.dataset`` that it refers to."""
    session: SessionUse | None = None
    """What happens to the names that a cell of a session uses."""
