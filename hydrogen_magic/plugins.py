"""Extension points: placements, rendezvous, observers, trackers and commands, found by entry points.

A distribution declares its own in its ``pyproject.toml``, as this one does::

    [project.entry-points."hydrogen_magic.placements"]
    slurm = "my_package.slurm:SlurmPlacement"

    [project.entry-points."hydrogen_magic.rendezvous"]
    mpi = "my_package.mpi:MpiRendezvous"

    [project.entry-points."hydrogen_magic.observers"]
    "my_library.trainer" = "my_package.observe:attach"

    [project.entry-points."hydrogen_magic.trackers"]
    comet = "my_package.comet:CometTracker"

    [project.entry-points."hydrogen_magic.commands"]
    mpi = "my_package.build:main"

The name of a placement, rendezvous or tracker is what ``--on``, ``--with`` or ``--track`` takes; the object
is a subclass of :class:`Placement`, :class:`Rendezvous` or :class:`Tracker`, or any other function without
arguments that returns one. The name of an observer is a module: ranks call its function with that module
right after its import. A command sets up a library: ``python -m hydrogen_magic NAME …`` calls the function
with the arguments after its name, and exits with the status that it returns.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, overload

from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.core.messages import ObserverSpec
from hydrogen_magic.driver.placements import (
    AgentGroup,
    Attempt,
    ClosureFile,
    EventSink,
    InKernelPlacement,
    Job,
    Placement,
    Planner,
)
from hydrogen_magic.driver.rendezvous import (
    Diagnosis,
    Rendezvous,
    RendezvousInfo,
    ServiceSpec,
    VictimErrors,
)
from hydrogen_magic.driver.rendezvous.torchrun import place
from hydrogen_magic.driver.trackers import MetricPoint, RunInfo, TrackedRun, Tracker
from hydrogen_magic.errors import OptionValueError, PlacementError

__all__ = [
    "AgentGroup",
    "Attempt",
    "ClosureFile",
    "Diagnosis",
    "EventSink",
    "InKernelPlacement",
    "Job",
    "JobSpec",
    "MetricPoint",
    "ObserverSpec",
    "PLACEMENTS",
    "Placement",
    "Plan",
    "Planner",
    "RENDEZVOUS",
    "Rendezvous",
    "RendezvousInfo",
    "RunInfo",
    "ServiceSpec",
    "Slot",
    "TRACKERS",
    "TrackedRun",
    "Tracker",
    "VictimErrors",
    "aborts",
    "check",
    "check_variables",
    "commands",
    "every_rendezvous",
    "forwarded",
    "joining",
    "observers",
    "owned_variables",
    "place",
    "placement",
    "rendezvous",
    "shipped",
    "tracker",
]

_OURS = "hydrogen-magic"


@dataclass(frozen=True)
class _Group(Sequence[str]):
    """The names of one group of entry points, looked up on first use: a kernel starts without that."""

    name: str
    noun: str
    option: str
    """Option of the magics that takes its names; empty for none."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(point.name for point in self.points()))

    def points(self) -> tuple[EntryPoint, ...]:
        """Return its entry points, our own first. Raises PlacementError if there are none of ours."""
        return _points(self, tuple(sys.path))

    def asked(self, name: str) -> str:
        return f"`{self.option} {name}`"


PLACEMENTS = _Group("hydrogen_magic.placements", "placement", "--on")
"""Where ranks may run: the names that ``--on`` takes."""
RENDEZVOUS = _Group("hydrogen_magic.rendezvous", "rendezvous", "--with")
"""How ranks may find each other: the names that ``--with`` takes."""
TRACKERS = _Group("hydrogen_magic.trackers", "tracker", "--track")
"""Where runs may be kept: the names that ``--track`` takes."""
_OBSERVERS = _Group("hydrogen_magic.observers", "observer", "")
_COMMANDS = _Group("hydrogen_magic.commands", "command", "")


def placement(name: str) -> Placement | InKernelPlacement:
    """Return the placement of this name; PlacementError if it is not installed or cannot be loaded."""
    found: Placement | InKernelPlacement = _made(PLACEMENTS, name, Planner, tuple(sys.path))
    return found


def rendezvous(name: str) -> Rendezvous:
    """Return the rendezvous of this name; PlacementError if it is not installed or cannot be loaded."""
    found: Rendezvous = _made(RENDEZVOUS, name, Rendezvous, tuple(sys.path))
    return found


def tracker(name: str) -> Tracker:
    """Return the tracker of this name; PlacementError if it is not installed or cannot be loaded."""
    found: Tracker = _made(TRACKERS, name, Tracker, tuple(sys.path))
    return found


def observers() -> tuple[ObserverSpec, ...]:
    """Return every observer; several may observe one module.

    Nothing is imported here. Ranks attach by this list, so machines with ranks need no metadata.
    """
    return tuple(ObserverSpec(point.name, point.value) for point in _OBSERVERS.points())


def every_rendezvous() -> tuple[Rendezvous, ...]:
    """Return each rendezvous that can be loaded: one that cannot is an error only where it is used."""
    return tuple(_loadable_rendezvous(tuple(sys.path)).values())


@functools.cache
def _loadable_rendezvous(path: tuple[str, ...]) -> dict[str, Rendezvous]:
    def loadable() -> Iterator[tuple[str, Rendezvous]]:
        for name in RENDEZVOUS:
            try:
                yield name, rendezvous(name)
            except PlacementError:
                continue

    return dict(loadable())


# ── combined properties ──────────────────────────────────────────────────────────────────────────


def check(spec: JobSpec) -> None:
    """Raise PlacementError when the rendezvous of ``spec``, its library or settings cannot be used.

    Raises OptionValueError when its tracker cannot be used. Elsewhere it is the machines of the ranks that
    must have the library: the placement asks them.
    """
    check_variables(spec)
    chosen = rendezvous(spec.rendezvous)
    chosen.join_timeout_s(spec)  # which looks at what the user has set
    fault = chosen.fault() if placement(spec.placement).on_this_machine else None
    if fault is not None:
        raise PlacementError(f"`--with {spec.rendezvous}`: {fault}")
    fault = tracker(spec.track).fault() if spec.track else None
    if fault is not None:
        raise OptionValueError(f"--track {spec.track}: {fault}")


def check_variables(spec: JobSpec) -> None:
    """Raise ValueError when the user sets a variable by which a rendezvous tells ranks who they are."""
    for name, _ in spec.env:
        if name in owned_variables():
            text = "tells a rank its place in the gang or where its peers are"
            raise OptionValueError(f"env sets {name}, which {text}: remove it")


def commands() -> dict[str, str]:
    """Return the commands that set up libraries, by name: ``module:function`` of each."""
    return {point.name: point.value for point in _COMMANDS.points()}


def forwarded() -> tuple[str, ...]:
    """Return the prefixes of the libraries' settings: see :attr:`Rendezvous.forwarded`."""
    return tuple(sorted({prefix for one in every_rendezvous() for prefix in one.forwarded}))


def joining() -> frozenset[str]:
    """Return the collectives by which ranks join and leave: see :attr:`Rendezvous.joining`."""
    return frozenset(name for one in every_rendezvous() for name in one.joining)


def shipped() -> tuple[str, ...]:
    """Return the packages that machines with ranks are sent: see :attr:`Rendezvous.shipped`."""
    return tuple(sorted({package for one in every_rendezvous() for package in one.shipped}))


def aborts(name: str) -> bool:
    """Return whether the library ends waiting ranks by SIGABRT.

    A run log may name a rendezvous that is not installed.
    """
    try:
        return rendezvous(name).victims.aborts
    except PlacementError:
        return False


def owned_variables() -> frozenset[str]:
    """Return the variables by which ranks find each other, which users may not set."""
    return frozenset(name for one in every_rendezvous() for name in one.variables)


# ── entry points ─────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _scanned(path: tuple[str, ...]) -> Any:
    """Return the entry points of everything installed, which takes tens of milliseconds to read."""
    return entry_points()


@functools.cache
def _points(group: _Group, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """``path``: the module path, on which distributions are looked for."""
    found = sorted(
        _scanned(path).select(group=group.name), key=lambda one: (not _is_ours(one), one.name)
    )
    if not any(map(_is_ours, found)):
        raise PlacementError(
            f"the installed metadata of hydrogen_magic has no entry points {group.name!r}: it is from"
            " an older version, or the package is not installed; install it again (`pip install"
            " hydrogen_magic`, in a checkout `pip install -e .`) and restart the kernel"
        )
    return tuple(found)


@functools.cache
def _made(group: _Group, name: str, kind: type[object], path: tuple[str, ...]) -> Any:
    point = _point(group, name)
    what = f"{point.value} of {_distribution(point)}"
    remedy = f"update or uninstall {_distribution(point)}"
    try:
        make = point.load()
        missing = sorted(getattr(make, "__abstractmethods__", ()))
        made = None if missing else make()
    except Exception as error:  # importing a module runs any code
        raise PlacementError(
            f"{group.asked(name)}: {what} cannot be loaded ({type(error).__name__}: {error});"
            f" {remedy}"
        ) from error
    if missing:
        raise PlacementError(
            f"{group.asked(name)}: {what} does not define {' and '.join(missing)}, which every"
            f" {group.noun} needs; {remedy}"
        )
    if not isinstance(made, kind):
        raise PlacementError(
            f"{group.asked(name)}: {what} is a {type(made).__name__}, not a {group.noun}; its class"
            f" should derive from hydrogen_magic.plugins.{group.noun.capitalize()}"
        )
    return made


def _point(group: _Group, name: str) -> EntryPoint:
    points = group.points()
    found = [point for point in points if point.name == name]
    if not found:
        names = ", ".join(dict.fromkeys(point.name for point in points))
        raise PlacementError(
            f"{group.asked(name)}: no {group.noun} of this name is installed; choose one of {names}, or"
            f" install the package that provides {name!r} and restart the kernel"
        )
    if len(found) > 1:
        owners = " and ".join(map(_distribution, found))
        raise PlacementError(
            f"{group.asked(name)}: {owners} both provide a {group.noun} of this name; uninstall one of"
            " them and restart the kernel"
        )
    return found[0]


def _is_ours(point: EntryPoint) -> bool:
    return point.dist is not None and re.sub("[-_.]+", "-", point.dist.name).lower() == _OURS


def _distribution(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
