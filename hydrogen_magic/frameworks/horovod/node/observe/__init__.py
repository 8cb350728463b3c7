"""Observers of Horovod: waiting ranks, elastic training, its timeline.

Many modules import from ``horovod.torch``, and its own modules have each other's functions under their own
names, so a wrapped function is installed wherever the original was.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.frameworks.horovod.node.observe import (
    collectives,
    elastic,
    lone_ranks,
    timeline,
)


def attach(module: ModuleType) -> None:
    """Wrap functions of ``horovod.torch`` and the modules below it, just after its import."""
    if not hasattr(module, "mpi_ops"):
        return  # its library could not be loaded: Horovod has reported it
    places = _Places(module)
    collectives.attach(module, places.replace)
    lone_ranks.attach(module, places.replace)
    elastic.attach()
    timeline.attach(module, places.replace)


class _Places:
    """Horovod's torch modules, where functions are replaced."""

    def __init__(self, package: ModuleType) -> None:
        self._of: dict[int, list[tuple[ModuleType, str]]] = {}
        self._add(package)

    def _add(self, module: ModuleType) -> None:
        """Add a module and those below it, which are its attributes.

        To look for them in ``sys.modules`` would count references to everything there, and so copy
        thousands of pages that the rank shares with the process that forked it.
        """
        for attribute, value in vars(module).items():
            self._of.setdefault(id(value), []).append((module, attribute))
            if type(value) is ModuleType and value.__name__ == f"{module.__name__}.{attribute}":
                self._add(value)

    def replace(self, original: Any, wrapped: Callable[..., Any]) -> None:
        """Install ``wrapped`` wherever they have ``original``."""
        places = self._of.pop(id(original), [])
        for module, attribute in places:
            setattr(module, attribute, wrapped)
        self._of[id(wrapped)] = places
