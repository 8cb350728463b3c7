"""A library's own timeline on a rank's host, followed while it is written."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.timeline_files import LibraryTimeline


@dataclass
class ShippedFile:
    """A file that is to be shipped as it grows."""

    path: Path
    settled: int = 0
    """Bytes of it that will not change any more; the bracket that closes a JSON array is not one."""


class TimelineFollower:
    """What an agent calls about the timelines of one attempt, one file after the other.

    This one follows none. A library's is made with the gang's time 0 as ``time.monotonic()``, and with what
    takes events.
    """

    kept: Sequence[ShippedFile] = ()
    """Those that belong to the gang's record."""

    def turn_to(self, rank: int, timeline: msg.TimelineFile) -> None:
        """Follow the file that ``rank`` names from now on, and none where its path is empty."""

    def poll(self) -> None:
        """Send new data. Called twenty times a second, and must take only milliseconds."""

    def finish(self) -> None:
        """Read the rest of a file that is not written any more, and leave it as valid JSON."""


def follower_of(
    timeline: LibraryTimeline | None, zero_s: float, emit: Callable[[ev.Event], None]
) -> TimelineFollower:
    """Return the follower that a rendezvous names, or one that does nothing."""
    if timeline is None:
        return TimelineFollower()
    try:
        made: TimelineFollower = pkgutil.resolve_name(timeline.follower)(zero_s, emit)
    except Exception as error:  # an error of a plug-in: the gang continues without its timeline
        text = f"the timeline of {timeline.name} is not shown: {type(error).__name__}: {error}"
        emit(ev.Notice(0.0, "warning", text))
        return TimelineFollower()
    return made
