"""Timelines that the library of a rendezvous writes on a rank: what describes them, and where they go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LibraryTimeline:
    """A library that writes a timeline of its own, as Chrome trace JSON, while spans are recorded."""

    name: str
    """What its files in a run's record begin with."""
    recorder: str
    """``module:function`` that every rank calls with what the paths of timelines begin with, and with what
    takes a ``TimelineFile`` for each that begins or ends. It returns a function that the rank calls over
    and over with whether spans are recorded; that one must not wait."""
    follower: str
    """``module:class`` of the :class:`~hydrogen_magic.node.agent.timeline_following.TimelineFollower`."""
    variable: str = ""
    """Variable by which a user names the path of a timeline; empty for none."""
    not_paths: tuple[str, ...] = ()
    """Values of it that are no path."""


def path_prefix(timeline: LibraryTimeline, record_dir: str, attempt: int) -> str:
    """Return what the paths of an attempt's timelines begin with; a number and ``.json`` follow."""
    again = f"retry{attempt}-" if attempt else ""
    return str(Path(record_dir) / f"{timeline.name}-timeline-{again}")


def given_path(timeline: LibraryTimeline, env: Mapping[str, str]) -> str:
    """Return the path at which the user wants a timeline, empty if there is none."""
    path = env.get(timeline.variable, "") if timeline.variable else ""
    return "" if path in timeline.not_paths else path


def path_of_given(timeline: LibraryTimeline, record_dir: str, attempt: int) -> str:
    """Return where the timeline that the user asks for is written on another machine."""
    return f"{path_prefix(timeline, record_dir, attempt)}given.json"
