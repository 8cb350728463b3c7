"""What ranks and the forkserver of their agent have from the notebook: variables, module path, directory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydrogen_magic.errors import PlacementError

_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Surroundings:
    """What ranks have from the notebook, as it was when their gang was launched."""

    env: Mapping[str, str]
    sys_path: tuple[str, ...]
    known_directory: str | None
    """None if the working directory no longer exists."""

    @classmethod
    def now(cls) -> Surroundings:
        """Return those of this moment; called by the thread that launches, not on the hub's loop."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            directory = None
        return cls(dict(os.environ), tuple(import_path()), directory)

    @property
    def directory(self) -> str:
        """The working directory of the notebook or script. Raises PlacementError if it no longer exists."""
        if self.known_directory is None:
            raise PlacementError(
                "the working directory no longer exists: change to another one with os.chdir()"
            )
        return self.known_directory


def import_path() -> list[str]:
    """Return the module path for processes with another working directory: relative entries made
    absolute.
    """
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        return [os.path.abspath(entry) for entry in entries]
    except FileNotFoundError:  # the working directory no longer exists
        return [entry for entry in entries if os.path.isabs(entry)]


def shadowed_modules(sys_path: Sequence[str]) -> list[str]:
    """Return loaded modules of the standard library that a new process would not find.

    Files of the same names, such as ``queue.py`` beside the notebook, precede them in the path.
    """
    before = itertools.takewhile(lambda entry: entry != _LIBRARY, sys_path)
    names = {name.partition(".")[0] for entry in before for name in _names_in(entry)}
    loaded = names & sys.stdlib_module_names & sys.modules.keys()
    return sorted(name for name in loaded if _origin(name).startswith(_LIBRARY))


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # it does not exist, or is a zip file
        return []


def _origin(name: str) -> str:
    return str(getattr(sys.modules[name], "__file__", None))


# ── what a forkserver depends on ───────────────────────────────────────────────────────────────────

_MATTERS = (
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "LD_",
    "DYLD_",
    "PYTHON",
    "CUDA",
    "NVIDIA_",
    "TORCH",
    "PYTORCH",
    "XLA_",
    "TF_",
    "JAX_",
    "KERAS_",
    "DS_",
    "HF_",
    "TRANSFORMERS_",
    "MALLOC_",
    "TQDM_",
    "NUMBA_",
    "NUMEXPR_",
)
"""Prefixes of variables that libraries read only on import."""


def forkserver_fingerprint(env: Mapping[str, str], sys_path: Sequence[str]) -> str:
    """Return a digest of everything that a forkserver cannot change after importing modules.

    Installing a package changes its directory's time; the agent itself watches files of imported modules.
    """
    relevant = sorted(
        item
        for item in env.items()
        if item[0].startswith(_MATTERS) and item[0] != "CUDA_VISIBLE_DEVICES"
    )
    roots = [(root, os.stat(root).st_mtime_ns) for root in _package_roots(sys_path)]
    return hashlib.sha256(json.dumps([sys.executable, relevant, roots]).encode()).hexdigest()


def _package_roots(sys_path: Sequence[str]) -> list[str]:
    return [root for root in sys_path if "-packages" in root and os.path.isdir(root)]
