"""How ranks find each other: a rendezvous turns a plan into every rank's environment.

It may also name a *service*: a function that the agent of one host runs beside the ranks, on a socket that
the agent has already bound, so that no port is chosen twice. A rendezvous does not know where ranks run
(that is the placement's part), and a placement does not know the service.
"""

from __future__ import annotations

import importlib
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hydrogen_magic.core.job import RENDEZVOUS, JobSpec, Plan
from hydrogen_magic.errors import PlacementError

_CLASSES = {
    "torch": "hydrogen_magic.driver.rendezvous.torch:TorchRendezvous",
    "horovod": "hydrogen_magic.horovod.rendezvous:HorovodRendezvous",
}

__all__ = ["RendezvousInfo", "Rendezvous", "ServiceSpec", "check", "get"]


@dataclass(frozen=True)
class ServiceSpec:
    """The service that the first host's agent runs for the rendezvous."""

    function: str
    """``module:function``, called with the listening socket's descriptor and the options."""
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class RendezvousInfo:
    """How one attempt's ranks find each other."""

    environments: tuple[Mapping[str, str], ...]
    """Per slot, in rank order."""
    service: ServiceSpec | None = None


class Rendezvous(Protocol):
    """The interface of a rendezvous."""

    library: str
    """Module whose ``fault()`` returns the problem of the library on a machine and a remedy, or None; empty
    if there can be none. The module imports only the standard library: its source is run anywhere."""
    init_collective: str
    """The collective in which ranks wait for all others at the start; empty if the library has its own time
    limit and reports missing ranks."""

    def join_timeout_s(self, spec: JobSpec) -> float:
        """Return how long ranks wait in :attr:`init_collective` until the missing ones count as failed.

        Raises PlacementError if the user's setting is not a valid time.
        """
        ...

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        """Return how the plan's ranks find each other at ``address:port`` on rank 0's host. No side
        effects.
        """
        ...

    def serve_here(self, held: socket.socket, over: threading.Event) -> None:
        """Serve a single rank in this process, from a thread, until ``over`` is set."""
        ...

    def undo_here(self) -> Callable[[], None]:
        """Return a function that undoes a single rank's rendezvous in this process; called before it runs.

        It must not affect process groups that the process had already joined.
        """
        ...


def get(name: str) -> Rendezvous:
    """Return the rendezvous of this name, or raise PlacementError with the available ones."""
    if name in _CLASSES:
        module, _, cls = _CLASSES[name].partition(":")
        found: Rendezvous = getattr(importlib.import_module(module), cls)()
        return found
    raise PlacementError(f"`--with {name}` is not supported; choose {', '.join(RENDEZVOUS)}")


def check(spec: JobSpec) -> None:
    """Raise PlacementError for an unknown rendezvous, an unusable library or invalid settings.

    On Spark, the executors need the library: they are checked before their ranks start.
    """
    rendezvous = get(spec.rendezvous)
    rendezvous.join_timeout_s(spec)  # which validates the user's setting
    library = rendezvous.library if spec.placement != "spark" else ""
    fault = importlib.import_module(library).fault() if library else None
    if fault is not None:
        raise PlacementError(f"`--with {spec.rendezvous}`: {fault}")
