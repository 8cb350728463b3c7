"""How ranks find each other: a rendezvous turns a plan into every rank's environment.

It may also name a *service*: a function that the agent of one host runs beside the ranks, on a socket that
the agent has already bound, so that no port is chosen twice. A rendezvous does not know where ranks run
(that is the placement's part), and a placement does not know the service.
"""

from __future__ import annotations

import importlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.core.messages import ServiceSpec as ServiceSpec
from hydrogen_magic.core.timeline_files import LibraryTimeline
from hydrogen_magic.driver.rendezvous.torchrun import RANK_VARIABLES


@dataclass(frozen=True)
class RendezvousInfo:
    """How one attempt's ranks find each other."""

    environments: tuple[Mapping[str, str], ...]
    """Per slot, in rank order."""
    service: ServiceSpec | None = None


@dataclass(frozen=True)
class VictimErrors:
    """The errors by which a rank reports that another rank has ended or does not take part."""

    types: tuple[str, ...] = ()
    """Names of exception classes, without their modules."""
    messages: tuple[str, ...] = ()
    """Regular expressions, searched in the message of an error of :attr:`message_types`."""
    message_types: tuple[str, ...] = ("RuntimeError",)
    """Names of exception classes, without their modules, that also have other causes."""
    files: tuple[str, ...] = ()
    """Parts of the file names of the library's own code: a connection error raised there counts too."""
    aborts: bool = False
    """The library ends processes by SIGABRT when another rank no longer responds."""


@dataclass(frozen=True)
class Diagnosis:
    """What ``%gang doctor`` reports about a library, or about this machine."""

    name: str
    is_well: bool
    found: str
    remedy: str = ""
    """The remedy if the check fails."""

    def lines(self) -> list[str]:
        """Return it as text."""
        first = f"{'ok  ' if self.is_well else 'BAD '} {self.name}: {self.found}"
        return [first] if self.is_well or not self.remedy else [first, f"     -> {self.remedy}"]


class Rendezvous(ABC):
    """How ranks find each other. A plug-in's derives from this class; entry points name it.

    ``prepare`` is enough. Everything else has a default that suits a library which needs nothing special.
    """

    library = ""
    """Module whose ``fault()`` returns the problem of the library on a machine and a remedy, or None; empty
    if there can be none. The module imports only the standard library: its source is run anywhere."""
    variables = RANK_VARIABLES
    """The environment variables that :meth:`prepare` sets and users must not: ``--env`` refuses them."""
    forwarded: tuple[str, ...] = ()
    """Prefixes of the library's settings: ranks on other machines get the notebook's variables of these
    names, and their values are not masked in output."""
    not_preloaded: tuple[str, ...] = ()
    """Modules that must not be imported before ranks are forked, such as those that start threads."""
    preloaded: tuple[str, ...] = ()
    """Modules that are imported before ranks are forked, in addition to those that the cell imports."""
    launcher = ""
    """Command that starts a script on ``{np}`` ranks, for the first line of what ``--save`` writes."""
    init_collective = ""
    """The collective in which ranks wait for all others at the start; empty if the library has its own time
    limit and reports missing ranks."""
    joining: tuple[str, ...] = ()
    """The collectives by which ranks join and leave, as observers report them: no step of training."""
    collectives: tuple[str, ...] = ()
    """Parts of the names of the library's functions that wait for all ranks."""
    needs_rank_ports = False
    """Every rank listens on a port of its own: :attr:`Slot.port`, which its agent holds until the attempt is
    over. The library's socket needs ``SO_REUSEPORT``, as that of the agent has."""
    victims = VictimErrors()
    shipped: tuple[str, ...] = ()
    """Packages of the plug-in that agents and ranks import: they are sent to machines that lack them."""
    join_advice = ""
    """What code does to join the other ranks, for a message to a user whose ranks do not; ends a sentence."""
    group_recovery = ""
    """Module by which a session's ranks leave a broken process group and join a new one; see
    :mod:`hydrogen_magic.node.worker.session.group_recovery`. Empty: a session ends when ranks wait for one
    that has failed."""
    timeline: LibraryTimeline | None = None
    """The library's own timeline, where it writes one."""

    def join_timeout_s(self, spec: JobSpec) -> float:
        """Return how long ranks wait in :attr:`init_collective` until the missing ones count as failed.

        Raises PlacementError if the user's setting is not a valid time.
        """
        return spec.start_timeout_s

    @abstractmethod
    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        """Return how the plan's ranks find each other at ``address:port`` on rank 0's host. No side
        effects.
        """

    def serve_here(self, held: socket.socket, over: threading.Event) -> None:
        """Serve a lone rank of this very process, from a thread, until ``over`` is set."""
        over.wait()

    def undo_here(self) -> Callable[[], None]:
        """Return a function that undoes a single rank's rendezvous in this process; called before it runs.

        It must not affect process groups that the process had already joined.
        """
        return lambda: None

    def fault(self) -> str | None:
        """Return the problem of :attr:`library` on this machine, None without one."""
        if not self.library:
            return None
        found: str | None = importlib.import_module(self.library).fault()
        return found

    def diagnose(self) -> Diagnosis | None:
        """Return what ``%gang doctor`` reports about the library; None to leave it out."""
        if not self.library:
            return None
        fault = self.fault()
        return Diagnosis(self.library, fault is None, fault or "usable")
