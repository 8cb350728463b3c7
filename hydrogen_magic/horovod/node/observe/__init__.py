"""Horovod: where ranks wait for each other, its elastic training, its timeline, Adasum without MPI.

Imported from ``horovod.torch`` by many: its own modules have each other's functions under their own
names, so what is wrapped is put wherever it was before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.horovod.node.observe import adasum, collectives, elastic, lone_ranks, timeline

__all__ = ["attach"]


def attach(module: ModuleType) -> None:
    """Wrap what ``horovod.torch`` and the modules below it have. It has just been imported."""
    if not hasattr(module, "mpi_ops"):
        return  # its library could not be loaded: Horovod has said so
    places = _Places()
    adasum.attach(module.mpi_ops, places.replace)
    collectives.attach(module, places.replace)
    lone_ranks.attach(module, places.replace)
    elastic.attach()
    timeline.attach(module, places.replace)


class _Places:
    """Where Horovod's torch modules have what."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[ModuleType, str]]] = {}
        for name, module in list(sys.modules.items()):
            if name == "horovod.torch" or name.startswith("horovod.torch."):
                for attribute, value in vars(module).items():
                    self._of.setdefault(id(value), []).append((module, attribute))

    def replace(self, original: Any, wrapped: Callable[..., Any]) -> None:
        """Put ``wrapped`` wherever they have ``original``."""
        places = self._of.pop(id(original), [])
        for module, attribute in places:
            setattr(module, attribute, wrapped)
        self._of[id(wrapped)] = places
