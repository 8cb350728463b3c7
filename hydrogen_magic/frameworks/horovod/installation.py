"""Checks which Horovod is installed, and whether it matches the installed torch. Imports neither.

Horovod's library is linked against one version of torch: with another it does not load, and reports missing
C++ symbols. Its build writes the version of torch into ``horovod/metadata.json``, in the form of
``torch.__version__``; torch stores that in ``torch/version.py``. Versions of distributions are not
sufficient: torch's own wheel for CUDA 12.8 is ``2.9.1`` to pip, ``2.9.1+cu128`` to itself.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

BUILD = "python -m hydrogen_magic horovod build"
"""The remedy for every fault."""
_CONSTANT = re.compile(r"""^(\w+)(?:: [^=]+)? = ["'](.*)["']$""", re.MULTILINE)


@dataclass(frozen=True)
class Torch:
    """The installed torch."""

    version: str
    """``torch.__version__``, including its local part: ``2.13.0+cpu``."""
    cuda: str | None
    """The CUDA version that it is built for: ``12.8``; None for a build without CUDA."""
    directory: Path


@dataclass(frozen=True)
class Horovod:
    """The installed Horovod."""

    version: str
    torch: str | None
    """``torch.__version__`` at its compilation; None: without PyTorch, or unknown."""
    has_library: bool
    """Whether this Python can load its library for PyTorch."""
    operations: tuple[str, ...] | None
    """Of ``gloo``, ``mpi`` and ``nccl`` those that it has; None if its build did not record them."""
    build: str | None
    """The key of our build; None for other builds."""


def fault() -> str | None:
    """Return the problem of Horovod here and a remedy, or None if it matches this torch."""
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
    """Return the directory of an installed package; a folder without a module does not count."""
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
    """Return the string constants at the top level of a Python file, without running it."""
    try:
        return dict(_CONSTANT.findall(file.read_text()))
    except OSError:
        return {}


def _metadata(file: Path) -> dict[str, str]:
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in facts.items() if isinstance(value, str)}
