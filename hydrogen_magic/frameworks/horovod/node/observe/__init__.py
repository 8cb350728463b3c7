"""Observers of Horovod: waiting ranks, elastic training, its timeline, Adasum without MPI.

Many modules import from ``horovod.torch``, and its own modules have each other's functions under their own
names, so a wrapped function is installed wherever the original was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.frameworks.horovod.node.observe import (
    adasum,
    collectives,
    elastic,
    lone_ranks,
    timeline,
)


def attach(module: ModuleType) -> None:
    """Wrap functions of ``horovod.torch`` and the modules below it, just after its import."""
    if not hasattr(module, "mpi_ops"):
        return  # its library could not be loaded: Horovod has reported it
    places = _Places()
    adasum.attach(module.mpi_ops, places.replace)
    collectives.attach(module, places.replace)
    lone_ranks.attach(module, places.replace)
    elastic.attach()
    timeline.attach(module, places.replace)


class _Places:
    """Horovod's torch modules, where functions are replaced."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[ModuleType, str]]] = {}
        for name, module in list(sys.modules.items()):
            if name == "horovod.torch" or name.startswith("horovod.torch."):
                for attribute, value in vars(module).items():
                    self._of.setdefault(id(value), []).append((module, attribute))

    def replace(self, original: Any, wrapped: Callable[..., Any]) -> None:
        """Install ``wrapped`` wherever they have ``original``."""
        places = self._of.pop(id(original), [])
        for module, attribute in places:
            setattr(module, attribute, wrapped)
        self._of[id(wrapped)] = places
