"""How ranks find each other: a rendezvous turns a plan into every rank's environment.

It may also name a *service*: a function that one host's agent runs beside the ranks, on a socket
that the agent has bound already, so that no port is chosen twice. It never learns where ranks run
(that is a placement's to know), and no placement learns what runs on it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hydrogen_magic.errors import PlacementError
from hydrogen_magic.spec import Plan

__all__ = ["Meeting", "NAMES", "Rendezvous", "Service", "get"]

NAMES = ("torch",)
"""What :func:`get` knows."""


@dataclass(frozen=True)
class Service:
    """What the first host's agent runs for the ranks to meet at."""

    function: str
    """``module:function``, called with the listening socket's descriptor and the options."""
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Meeting:
    """How one attempt's ranks find each other."""

    environments: tuple[Mapping[str, str], ...]
    """Per slot, in rank order."""
    service: Service | None = None


class Rendezvous(Protocol):
    """What a module of this package offers."""

    def prepare(
        self, plan: Plan, address: str, port: int, *, gang: str, attempt: int, retries: int
    ) -> Meeting:
        """Return how the plan's ranks meet at ``address:port``, held by rank 0's host. Pure."""
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
    if name == "torch":
        from hydrogen_magic.rendezvous.torch import TorchRendezvous

        return TorchRendezvous()
    raise PlacementError(
        f"`--with {name}` was asked for, but this version has only: {', '.join(NAMES)}"
    )
