"""Reading records: the events of a run, and summaries of all runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.event_history import EventHistory
from hydrogen_magic.core.run_log.folders import (
    EVENTS,
    GANG_ID,
    kept_dir,
    recent_ids,
    run_dir,
    runs_dir,
)
from hydrogen_magic.core.run_log.lines import decoded
from hydrogen_magic.errors import HydrogenError

_BEGINS_S = 10.0
"""How long a record may be empty while its run begins."""
_TAIL_BYTES = 1 << 16
"""Number of bytes read first to find the last line; stacks of many threads can make a longer one."""


@dataclass(frozen=True)
class Summary:
    """The first and the last event of a run, for lists of runs."""

    gang: str
    launched: ev.GangLaunched
    last: ev.Event

    @property
    def ended(self) -> ev.GangEnded | None:
        """Its last event; None while it runs, or if no process was left to record it."""
        return self.last if isinstance(self.last, ev.GangEnded) else None

    @property
    def last_wall_time(self) -> float:
        """Unix time of the last event."""
        return self.launched.wall_time + self.last.at_s


def read(gang_id: str) -> Sequence[ev.Event]:
    """Return the events of a run, which may still be running.

    An incomplete last line (its kernel was killed) is left out. Raises HydrogenError if there is no
    such run, or its record is damaged.
    """
    events = EventHistory()
    for event, _ in read_on(gang_id, 0):
        events.append(event)
    return events[:]


def read_on(gang_id: str, start: int) -> Iterator[tuple[ev.Event, int]]:
    """Yield each event from the byte ``start`` of the record on, and the byte where to read on.

    See :func:`read`.
    """
    with _open(gang_id) as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return  # its writer may add the rest at any moment
            start += len(line)
            yield decoded(line, gang_id), start


@contextmanager
def _open(gang_id: str) -> Iterator[BinaryIO]:
    """Open a record for reading; errors that this meets are HydrogenErrors."""
    try:
        with open(run_dir(gang_id) / EVENTS, "rb") as file:
            yield file
    except FileNotFoundError:
        raise HydrogenError(f"there is no record of a run {gang_id!r}{_where()}") from None
    except OSError as error:
        raise HydrogenError(f"the record of run {gang_id!r} cannot be read: {error}") from error
    except ev.MessageError as error:
        raise HydrogenError(str(error)) from error


def _where() -> str:
    try:
        return f" in {runs_dir()}"
    except OSError:
        return ""


def recent(*, with_kept: bool = False) -> list[Summary]:
    """Return the recorded runs, newest first, without those whose record cannot be read.

    ``with_kept``: only those that keep finished rows.
    """
    names = [name for name in recent_ids() if GANG_ID.fullmatch(name)]
    found = [summary(name) for name in names if not with_kept or kept_dir(name).is_dir()]
    readable = [each for each in found if each is not None]
    return sorted(readable, key=lambda each: each.launched.wall_time, reverse=True)


def summary(gang_id: str) -> Summary | None:
    """Return the first and the last event of a run; None without a record that can be read."""
    try:
        return _summary(gang_id)
    except HydrogenError:
        return None


def why_unreadable(gang_id: str) -> str:
    """Return why the record of a run cannot be read; empty if it can be, or there is none yet."""
    try:
        file = (run_dir(gang_id) / EVENTS).stat()
    except (OSError, HydrogenError):
        return ""
    try:
        _summary(gang_id)
    except HydrogenError as error:
        begins = not file.st_size and time.time() - file.st_mtime < _BEGINS_S
        return "" if begins else str(error)
    return ""


def unreadable() -> list[str]:
    """Return the ids of runs whose record cannot be read, which :func:`recent` leaves out."""
    return sorted(name for name in recent_ids() if why_unreadable(name))


def _summary(gang_id: str) -> Summary:
    """Return the first and the last event of a run without reading the others. Raises HydrogenError."""
    with _open(gang_id) as file:
        first, last = file.readline(), _last_line(file.fileno())
        if not first:
            raise HydrogenError(
                f"the record of run {gang_id!r} is empty: its disk was full, or the run has only just begun"
            )
        launched, newest = decoded(first, gang_id), decoded(last or first, gang_id)
    if not isinstance(launched, ev.GangLaunched):
        raise HydrogenError(f"the record of run {gang_id!r} is damaged: its beginning is missing")
    return Summary(gang_id, launched, newest)


def _last_line(fd: int) -> bytes:
    """Return the last complete line, empty if there is none."""
    size = os.fstat(fd).st_size
    length = _TAIL_BYTES
    while True:
        start = max(0, size - length)
        tail = os.pread(fd, size - start, start)
        lines = tail[: tail.rfind(b"\n") + 1].split(b"\n")[:-1]
        # The first line may be cut off at its beginning, unless it is the first one of the file.
        if len(lines) > 1 or start == 0:
            return lines[-1] if lines else b""
        length *= 4
