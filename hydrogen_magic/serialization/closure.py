"""What the kernel sends to the ranks: plain data about the cell, and beside it the pickled names.

The plain part is read first: it says which modules must be importable before anything is unpickled.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

from hydrogen_magic.serialization.payload import Payload

__all__ = ["Header", "ImportLine", "ModuleSource", "bundle", "unbundle"]


@dataclass(frozen=True)
class ImportLine:
    """An import statement of the notebook."""

    text: str
    """One statement, as Python reads it."""
    required: bool = True
    """False: nothing the cell uses comes from it; it runs for its side effects and may fail."""


@dataclass(frozen=True)
class ModuleSource:
    """A local module in its present form."""

    source: str
    """Its text; empty for a package without ``__init__.py``."""
    path: str
    """Where the kernel read it, for tracebacks and ``__file__``; a directory without ``__init__``."""
    is_package: bool = False


@dataclass(frozen=True)
class Header:
    """What a rank must know before it reads the pickled names."""

    kind: str
    """``cell``, ``call``, ``script`` or ``module``."""
    modules: dict[str, ModuleSource] = field(default_factory=dict)
    imports: tuple[ImportLine, ...] = ()
    submodules: tuple[str, ...] = ()
    """Submodules that the kernel has imported and that are used as attributes of their package."""
    names: tuple[str, ...] = ()
    """Names of the pickled values, in the order of the stream; empty text: the call itself."""
    sources: dict[str, str] = field(default_factory=dict)
    """Texts of notebook cells by the file name that their code carries."""
    provided: tuple[str, ...] = ()
    """Names that the rank itself provides: ``get_ipython``, ``display``."""
    code: str = ""
    """The cell as Python."""
    filename: str = ""
    """File name of the cell in tracebacks."""
    line_offset: int = 0
    """What to add to line numbers of ``code`` to get those of the visible cell."""
    futures: tuple[str, ...] = ()
    """``from __future__`` features in force in the notebook."""
    out: tuple[str, ...] = ()
    """Names to bring back."""
    target: str = ""
    """Script path or module name."""
    args: tuple[str, ...] = ()
    """Arguments of the script or module."""


def bundle(header: Header, body: Payload) -> Payload:
    """Return one parcel with both."""
    return Payload(pickle.dumps(header, pickle.HIGHEST_PROTOCOL), (body.pickled, *body.buffers))


def unbundle(parcel: Payload) -> tuple[Header, Payload]:
    """Return what :func:`bundle` put together."""
    header = pickle.loads(parcel.pickled)
    if not isinstance(header, Header):
        raise ValueError("this payload is not a closure")
    payload, *buffers = parcel.buffers
    return header, Payload(memoryview(payload), tuple(buffers))
