"""The file of Horovod's timeline, cut into events while it is written.

Its writer (``timeline.cc`` of Horovod 0.28.1) ends the file with ``]`` after every event, ours after all
that came in a hundredth of a second, and writes the comma of the next one over that. Events have one form
each, without a line of their own, and are cut anywhere as long as they are under way. Names of tensors are
written as they are, quotes, brackets and newlines included: so JSON is what the file should be, and not
what it can be read by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Cut", "Event", "count_spans", "cut", "last_border", "named_tensors"]

Event = tuple[bytes, bytes | None, int, int]
"""Phase (``B`` begin, ``E`` end, ``X`` a rank is ready, ``i`` a cycle begins), name (none for ``E``), time in
microseconds since the timeline's origin, tensor (0: none)."""

_LONGEST = 1 << 16
"""Bytes of an event: what is longer is none, and damage is passed over."""

_EVENT = (
    rb"""\{"ph": "([BEXi])"(?:, "name": "([^"]*)")?, "ts": (\d+)(?:, "pid": (\d+))?"""
    rb"""[^{}]*(?:\{[^{}]*\})?\}"""
)
_TENSOR = (
    rb"""\{"name": "process_name", "ph": "M", "pid": (\d+), "args": \{"name": "(.*?)"\}\},\n"""
    rb"""\{"name": "process_sort_index", "ph": "M", "pid": \g, "args": \{"sort_index": \g\}\},\n"""
)
_ORIGIN = (
    rb"""\{"name": "process_name", "ph": "M", "pid": 0, "args": """
    rb"""\{"start_time_since_epoch_in_micros":(\d+)\}\},\n"""
    rb"""\{"name": "process_sort_index", "ph": "M", "pid": 0, "args": \{"sort_index": 0\}\},\n"""
)
_OBJECT = re.compile(
    rb"(?:" + _EVENT + rb"|" + _TENSOR.replace(rb"\g", rb"\5") + rb"|" + _ORIGIN + rb")", re.DOTALL
)
_ONLY_TENSOR = re.compile(_TENSOR.replace(rb"\g", rb"\1"), re.DOTALL)
_BETWEEN = b"[],\n "
_BORDER = b'},{"ph": "'


@dataclass
class Cut:
    """What :func:`cut` found."""

    events: list[Event] = field(default_factory=list)
    n_bytes: int = 0
    """How far the objects reach that are complete."""
    origin_us: int | None = None
    """Wall-clock time of ``ts`` 0, in microseconds since 1970, where the file's beginning is in it."""
    tensors: list[tuple[int, bytes]] = field(default_factory=list)
    """Where names of tensors stand, and what they are."""
    n_lost: int = 0
    """Bytes that were passed over because they are nothing that Horovod writes."""


def cut(data: bytes) -> Cut:
    """Return the events in ``data``, which begins at a border of two objects, up to the last whole one."""
    found = Cut()
    for match in _OBJECT.finditer(data):
        start = match.start()
        if start - found.n_bytes > 1 and not _is_between(data, found.n_bytes, start):
            # Something else lies before it: an object that is not whole yet, or damage.
            if len(data) - found.n_bytes < _LONGEST:
                break
            found.n_lost += start - found.n_bytes
        phase, name, ts, pid, _, tensor, origin = match.groups()
        if phase is not None:
            found.events.append((phase, name, int(ts), int(pid or 0)))
        elif tensor is not None:
            found.tensors.append((match.start(6), tensor))
        else:
            found.origin_us = int(origin)
        found.n_bytes = match.end()
    if found.n_bytes == 0 and len(data) > _LONGEST:
        found.n_bytes = found.n_lost = len(data) - _LONGEST
    return found


def _is_between(data: bytes, start: int, until: int) -> bool:
    return not data[start:until].strip(_BETWEEN)


def last_border(data: bytes) -> int:
    """Return where the last event in ``data`` begins, 0 if there is none to be seen."""
    return max(0, data.rfind(_BORDER) + 1)


def count_spans(data: bytes) -> int:
    """Return how many begin in ``data``."""
    return data.count(b'{"ph": "B"')


def named_tensors(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield where names of tensors stand in ``data``, and what they are."""
    return ((match.start(2), match[2]) for match in _ONLY_TENSOR.finditer(data))
