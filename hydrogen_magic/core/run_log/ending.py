"""Writing the end of a record that its writer could not complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from itertools import islice
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.run_log.folders import (
    CHECKPOINTS,
    EVENTS,
    OWNER_SOCKET,
    drop_incomplete,
    run_dir,
)
from hydrogen_magic.core.run_log.lines import decoded, encoded, is_recorded
from hydrogen_magic.core.units import clipped

_METRICS = b'["Metrics",'
"""Beginning of the line of a ``Metrics`` event."""
_MOST_METRICS = 1024
"""How many of the last ``Metrics`` events are searched for the last values of a gang without an end."""
_SHORT_REASON = 200
"""Characters of the reason of an end that replaces other events; most reasons are shorter."""


def complete(gang_id: str, events: Sequence[ev.Event], *, only_now: bool = False) -> None:
    """Append what the record lacks of ``events``, all those of a run: its disk was full for a while.

    Raises OSError if it still is. With ``only_now``, the end replaces recorded events then: without an end,
    the run seems to have lost its kernel.
    """
    with open(run_dir(gang_id) / EVENTS, "r+b", buffering=0) as file:
        data = file.readall()
        end = data.rfind(b"\n") + 1
        file.truncate(end)
        file.seek(end)
        n_recorded = data.count(b"\n", 0, end)
        missing = b"".join(map(encoded, islice(filter(is_recorded, events), n_recorded, None)))
        try:
            while missing:  # a disk that gets full takes a part, and refuses the rest
                missing = missing[file.write(missing) :]
        except OSError:
            if only_now and isinstance(events[-1], ev.GangEnded):
                _write_over(file, events[-1])
            raise


def _write_over(file: FileIO, end: ev.GangEnded) -> None:
    """Replace the last lines of a record by ``end``, which needs no space; the first line stays.

    An end that is longer than the other lines is shortened. Nothing is written if that is not enough.
    """
    file.seek(0)
    data = file.readall()
    short = replace(end, reason=clipped(end.reason, _SHORT_REASON), metrics={})
    for line in map(encoded, (end, short)):
        start = data.rfind(b"\n", 0, max(0, len(data) - len(line))) + 1
        if start:
            file.truncate(start + len(line))  # first: a part of a line is ignored
            file.seek(start)
            file.write(line)
            return


def write_end(run_dir: Path, reason: str) -> None:
    """Finish the record of a gang whose owner has exited: ``STOPPED``, for ``reason``.

    Does nothing if the record is damaged or cannot be written: the record is optional, and the
    agent that writes it has processes to end.
    """
    with suppress(OSError):
        (run_dir / OWNER_SOCKET).unlink(missing_ok=True)
    drop_incomplete(run_dir / CHECKPOINTS)
    try:
        fd = os.open(run_dir / EVENTS, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        # Unbuffered: a full disk must raise here, not when the file is closed.
        with os.fdopen(fd, "r+b", buffering=0) as file:
            data = file.readall()
            complete = data.rfind(b"\n") + 1
            lines = data[:complete].splitlines()
            last = complete and decoded(lines[-1], run_dir.name)
            if reason == ev.KERNEL_ENDED and complete and _outlives(lines[0], run_dir.name):
                reason = ev.OWNER_ENDED
            metrics = getattr(last, "metrics", None) or _last_metrics(lines, run_dir.name)
            end = ev.GangEnded(getattr(last, "at_s", 0.0), "STOPPED", reason, metrics=metrics)
            file.truncate(complete)  # removes a line that a killed kernel did not complete
            file.write(encoded(end))
    except (OSError, ev.MessageError):
        return


def _last_metrics(lines: Sequence[bytes], gang_id: str) -> dict[str, float]:
    """Return the last values that ranks have logged in the last ``_MOST_METRICS`` events."""
    found: dict[int, dict[str, float]] = {}
    logged = (line for line in reversed(lines) if line.startswith(_METRICS))
    for line in islice(logged, _MOST_METRICS):
        with suppress(ev.MessageError):
            event = decoded(line, gang_id)
            assert isinstance(event, ev.Metrics)
            values = found.setdefault(event.rank, {})
            for name, column in event.values.items():
                given = [value for value in column if value is not None]
                if given:
                    values.setdefault(name, given[-1])
    return ev.of_first_ranks(found[rank] for rank in sorted(found))


def _outlives(first: bytes, gang_id: str) -> bool:
    launched = decoded(first, gang_id)
    return isinstance(launched, ev.GangLaunched) and launched.outlives
