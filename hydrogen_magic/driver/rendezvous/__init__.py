"""How ranks find each other: a rendezvous turns a plan into every rank's environment.

It may also name a *service*: a function that one host's agent runs beside the ranks, on a socket
that the agent has bound already, so that no port is chosen twice. It never learns where ranks run
(that is a placement's to know), and no placement learns what runs on it.
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
    """What the first host's agent runs for the ranks to meet at."""

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
    """What a module of this package offers."""

    library: str
    """Module whose ``fault()`` says what is wrong with the library on a machine and what to do, or
    None; empty where nothing can be. It imports the standard library only: its text is run anywhere."""
    init_collective: str
    """The collective in which ranks wait for all others to come; empty where its library has a bound
    of its own for that, and says who is missing."""

    def join_timeout_s(self, spec: JobSpec) -> float:
        """Return how long ranks wait in :attr:`init_collective` before those that are missing have failed.

        Raises PlacementError when the user has set something else than a time.
        """
        ...

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        """Return how the plan's ranks meet at ``address:port``, held by rank 0's host. No effect."""
        ...

    def serve_here(self, held: socket.socket, over: threading.Event) -> None:
        """Serve a lone rank of this very process, from a thread, until ``over`` is set."""
        ...

    def undo_here(self) -> Callable[[], None]:
        """Return what undoes a lone rank's meeting in this process; asked before the rank runs.

        It must leave alone what the process had joined already.
        """
        ...


def get(name: str) -> Rendezvous:
    """Return the rendezvous of this name, or raise PlacementError with what there is."""
    if name in _CLASSES:
        module, _, cls = _CLASSES[name].partition(":")
        found: Rendezvous = getattr(importlib.import_module(module), cls)()
        return found
    raise PlacementError(f"`--with {name}` is not supported; choose {', '.join(RENDEZVOUS)}")


def check(spec: JobSpec) -> None:
    """Raise PlacementError when there is no such rendezvous, or its library or settings are not in order.

    On Spark it is the executors that must have the library: they are asked before their ranks start.
    """
    rendezvous = get(spec.rendezvous)
    rendezvous.join_timeout_s(spec)  # which looks at what the user has set
    library = rendezvous.library if spec.placement != "spark" else ""
    fault = importlib.import_module(library).fault() if library else None
    if fault is not None:
        raise PlacementError(f"`--with {spec.rendezvous}`: {fault}")
