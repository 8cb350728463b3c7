"""The closure that the kernel sends to the ranks: plain data about the cell, and pickled values.

Ranks read the plain part first: it lists the modules that must be importable before unpickling.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.serialization.object_paths import Path
from hydrogen_magic.serialization.payload import Payload


@dataclass(frozen=True)
class ImportLine:
    """An import statement of the notebook."""

    text: str
    """One statement of Python source."""
    required: bool = True
    """False: no name in the cell comes from it; it runs for its side effects and may fail."""
    binds: bool = True
    """False: the notebook has no module of that name, and the ranks may have something else."""


@dataclass(frozen=True)
class ModuleSource:
    """The current source of a local module."""

    source: str
    """Its source; empty for a package without ``__init__.py``."""
    path: str
    """Its path in the kernel, for tracebacks and ``__file__``; a directory without ``__init__``."""
    is_package: bool = False


@dataclass(frozen=True)
class Setting:
    """A setting of the notebook that differs from a library's default."""

    provider: str
    """Which provider of :mod:`hydrogen_magic.node.worker.settings` applies it."""
    module: str
    """The module that it belongs to: it is applied once that is imported."""
    key: str
    value: Any

    @property
    def label(self) -> str:
        """The name by which the user knows it; it is not the name of a variable."""
        return f"{self.module}.{self.key}" if self.is_own else f"{self.provider}: {self.key}"

    @property
    def is_own(self) -> bool:
        """Whether the notebook itself has set it, in a module."""
        return self.provider in ("attribute", "assignment", "deletion")


@dataclass(frozen=True)
class SessionSends:
    """The names that a cell sends to ranks that have names of earlier cells."""

    ranks: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The ranks that take the notebook's value, by name; the others keep their own."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Digests of the values of settings, by label. A rank leaves one alone that it has got before."""
    matched: Mapping[str, Mapping[Path, int]] = field(default_factory=dict)
    """Numbers of the notebook's copies of objects that ranks have made, by variable and path."""

    def taken_by(self, rank: int) -> frozenset[str]:
        """Return the names of which the rank and the notebook have the same values afterwards."""
        return frozenset(name for name, ranks in self.ranks.items() if rank in ranks)

    def kept_by(self, rank: int) -> frozenset[str]:
        """Return the names that are sent to other ranks only."""
        return frozenset(self.ranks) - self.taken_by(rank)


@dataclass(frozen=True)
class ClosureManifest:
    """The part of a closure that a rank reads before the pickled values."""

    kind: str
    """``cell``, ``call``, ``script`` or ``module``."""
    modules: dict[str, ModuleSource] = field(default_factory=dict)
    imports: tuple[ImportLine, ...] = ()
    submodules: tuple[str, ...] = ()
    """Submodules that the kernel has imported and that are used as attributes of their package."""
    settings: tuple[Setting, ...] = ()
    """Those whose values any process can unpickle; the stream has the others, as :class:`Setting`."""
    seed: int | None = None
    """Rank r seeds its generators of random numbers with ``seed + r``."""
    names: tuple[str, ...] = ()
    """Names of the pickled values, in the order of the stream; empty name: the call itself."""
    has_module_objects: bool = False
    """The stream begins with a list of objects of local modules, to which the values refer."""
    unsent: dict[str, str] = field(default_factory=dict)
    """Names that the code may not need, and whose values were left out -> the types of the values."""
    sources: dict[str, str] = field(default_factory=dict)
    """Texts of notebook cells by the file name in their code objects."""
    labels: dict[str, str] = field(default_factory=dict)
    """What the user calls these cells: ``Cell In[3]``, by the same file names."""
    provided: tuple[str, ...] = ()
    """Names that the rank itself provides: ``get_ipython``, ``display``."""
    code: str = ""
    """The cell as Python source."""
    filename: str = ""
    """File name of the cell in tracebacks."""
    line_offset: int = 0
    """Offset from line numbers of ``code`` to those of the visible cell."""
    futures: tuple[str, ...] = ()
    """``from __future__`` features that are active in the notebook."""
    out: tuple[str, ...] = ()
    """Names to bring back."""
    session: SessionSends | None = None
    """Set for a cell of a session."""
    target: str = ""
    """Script path or module name."""
    args: tuple[str, ...] = ()
    """Arguments of the script or module."""


def bundle(manifest: ClosureManifest, values: Payload) -> Payload:
    """Return one payload with both parts."""
    return Payload(
        pickle.dumps(manifest, pickle.HIGHEST_PROTOCOL), (values.pickled, *values.buffers)
    )


def unbundle(closure: Payload) -> tuple[ClosureManifest, Payload]:
    """Return the two parts that :func:`bundle` combined."""
    manifest = pickle.loads(closure.pickled)
    if not isinstance(manifest, ClosureManifest):
        raise ValueError("this payload is not a closure")
    pickled, *buffers = closure.buffers
    return manifest, Payload(memoryview(pickled), tuple(buffers))
