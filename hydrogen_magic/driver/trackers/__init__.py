"""Trackers: libraries that keep runs, such as MLflow. A tracker gets what the kernel knows of a gang.

All methods but :meth:`Tracker.fault` are called by threads of the kernel, one for each gang, and may take
their time: gangs do not wait for them. What they raise ends the tracking of that gang with a notice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunInfo:
    """A gang at its launch."""

    gang: str
    """Its id."""
    name: str
    params: Mapping[str, bool | int | float | str]
    """Plain values that the cell captured, without secrets."""
    about: Mapping[str, str]
    """The line of the magic, and the options ``np``, ``on`` and ``with``."""
    group: str = ""
    """What :meth:`Tracker.open_group` returned for its sweep; empty outside of one."""


@dataclass(frozen=True)
class MetricPoint:
    """Values that a rank logged for one step."""

    step: int
    unix_s: float
    """When they were logged."""
    values: Mapping[str, float]


class TrackedRun(ABC):
    """One gang in a tracker."""

    where: str = ""
    """Where a person finds it: an address or a directory."""

    @abstractmethod
    def log(self, points: Sequence[MetricPoint]) -> None:
        """Add points, at most 1000, in the order in which they arrived."""

    @abstractmethod
    def add_file(self, path: Path) -> None:
        """Add a copy of a file."""

    @abstractmethod
    def end(self, state: str) -> None:
        """The gang has ended: ``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""


class Tracker(ABC):
    """Keeps runs, by the user's own configuration. A plug-in's derives from this class."""

    def fault(self) -> str | None:
        """Return why it cannot be used here, with the remedy; None if it can. Called before each launch."""
        return None

    @abstractmethod
    def start(self, info: RunInfo) -> TrackedRun:
        """Begin a run."""

    def open_group(self, name: str) -> str:
        """Begin a sweep; return what identifies it to :meth:`start`."""
        return name

    def close_group(self, group: str, state: str) -> None:
        """All runs of a sweep have ended."""
        return
