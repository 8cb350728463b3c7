"""Parser of Horovod's timeline file, which splits it into events while it is written.

Horovod's writer (``timeline.cc`` of Horovod 0.28.1) ends the file with ``]`` after every event, ours after
all events of a hundredth of a second, and overwrites it with the comma before the next one. Each kind of
event has one format, not on a line of its own, and an incomplete event may end anywhere. Names of tensors
are not read: events refer to tensors by number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Event = tuple[bytes, ...]
"""Phase (``B`` begin, ``E`` end, ``X`` a rank is ready, ``i`` a cycle begins), name (empty for ``E``), time
in microseconds since the timeline's origin, tensor's number (empty: none); as written, since few are used."""

_EVENT = re.compile(
    rb"""\{"ph": "([BEXi])"(?:, "name": "([^"]*)")?, "ts": (\d+)(?:, "pid": (\d+))?"""
    rb"""[^{}]*(?:\{[^{}]*\})?\}"""
)
_ORIGIN = re.compile(rb"""\{"start_time_since_epoch_in_micros":(\d+)\}""")


@dataclass
class ParsedEvents:
    """The result of :func:`cut`."""

    events: list[Event]
    n_bytes: int
    """Offset after the last complete event."""
    origin_us: int | None
    """Wall-clock time of ``ts`` 0, in microseconds since 1970, if the file's beginning is included."""


def cut(data: bytes) -> ParsedEvents:
    """Return the complete events in ``data``."""
    origin = _ORIGIN.search(data)
    found = list(_EVENT.finditer(data))
    return ParsedEvents(
        [event.groups(b"") for event in found],
        found[-1].end() if found else 0,
        int(origin[1]) if origin else None,
    )
