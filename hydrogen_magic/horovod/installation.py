"""Which Horovod is installed, and whether it fits the torch that is installed. Imports neither.

Horovod's library is linked against one torch: with another it does not load, and says so in names
of C++ symbols. Its build writes the torch it saw into ``horovod/metadata.json``, as
``torch.__version__`` has it; torch keeps that in ``torch/version.py``. Versions of distributions
would not do: torch's own wheel for CUDA 12.8 is ``2.9.1`` to pip, ``2.9.1+cu128`` to itself.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["BUILD", "Horovod", "Torch", "fault", "horovod", "torch"]

BUILD = "python -m hydrogen_magic.horovod build"
"""What to do about every fault here."""
OPERATIONS = ("gloo", "mpi", "nccl")
"""What Horovod can reduce with."""


@dataclass(frozen=True)
class Torch:
    """The torch that is installed."""

    version: str
    """``torch.__version__``, with its local part: ``2.13.0+cpu``."""
    cuda: str | None
    """The CUDA it is built for, as ``12.8``; None for a build without."""
    directory: Path


@dataclass(frozen=True)
class Horovod:
    """The Horovod that is installed."""

    version: str
    torch: str | None
    """``torch.__version__`` of what it was compiled against; None: without PyTorch, or unknown."""
    has_library: bool
    """Whether its library for PyTorch is one that this Python can load."""
    operations: tuple[str, ...] | None
    """Those of :data:`OPERATIONS` it has; None where its builder did not write them down."""
    build: str | None
    """The key of our build that this is; None when somebody else built it."""


def fault() -> str | None:
    """Return what is wrong with Horovod here and what to do, or None when it fits this torch."""
    here = torch()
    if here is None:
        return (
            "Horovod needs torch, which is not installed here: run `pip install torch`, then "
            f"`{BUILD}`."
        )
    found = horovod()
    if found is None:
        return f"Horovod is not installed here: `{BUILD}` builds it for torch {here.version}."
    reason = _misfit(found, here.version)
    return (
        None if reason is None else f"Horovod {found.version} {reason}: rebuild it with `{BUILD}`."
    )


def _misfit(found: Horovod, version: str) -> str | None:
    if found.torch is None:
        return f"was built without PyTorch, and torch {version} is installed"
    if found.torch != version:
        return f"was built for torch {found.torch}, and torch {version} is installed"
    if not found.has_library:
        return f"has no library for PyTorch that this Python can load (*{EXTENSION_SUFFIXES[0]})"
    return None


def torch() -> Torch | None:
    """Return the installed torch, or None."""
    directory = _package("torch")
    if directory is None:
        return None
    facts = _literals(directory / "version.py")
    version = facts.get("__version__") or _distribution("torch")
    return Torch(version, facts.get("cuda"), directory) if version else None


def horovod() -> Horovod | None:
    """Return the installed Horovod, or None."""
    directory = _package("horovod")
    if directory is None:
        return None
    facts = _metadata(directory / "metadata.json")
    written = facts.get("operations")
    return Horovod(
        version=_distribution("horovod") or "of an unknown version",
        torch=facts.get("pytorch"),
        has_library=any(
            (directory / "torch" / f"mpi_lib_v2{suffix}").exists() for suffix in EXTENSION_SUFFIXES
        ),
        operations=None if written is None else tuple(written.split()),
        build=facts.get("hydrogen_magic"),
    )


def _package(name: str) -> Path | None:
    """Return the directory of an installed package; a bare folder of that name is none."""
    importlib.invalidate_caches()  # it may have been installed while this kernel runs
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # a stand-in among the loaded modules
        return None
    return Path(found.origin).parent if found is not None and found.origin else None


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _literals(file: Path) -> dict[str, str]:
    """Return the strings that a Python file gives to names at its top, without running it."""
    try:
        body = ast.parse(file.read_text()).body
    except (OSError, SyntaxError):
        return {}
    found = {}
    for line in body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update({name.id: value.value for name in targets if isinstance(name, ast.Name)})
    return found


def _metadata(file: Path) -> dict[str, str]:
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in facts.items() if isinstance(value, str)}
