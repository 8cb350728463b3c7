"""Parser of Horovod's timeline file, which splits it into events while it is written.

Horovod's writer (``timeline.cc`` of Horovod 0.28.1) ends the file with ``]`` after every event, ours after
all events of a hundredth of a second, and overwrites it with the comma before the next one. Each kind of
event has one format, not on a line of its own, and an incomplete event may end anywhere. Names of tensors
are written unescaped, including quotes, brackets and newlines: so a JSON parser cannot read the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

Event = tuple[bytes, bytes, bytes, int]
"""Phase (``B`` begin, ``E`` end, ``X`` a rank is ready, ``i`` a cycle begins), name (empty for ``E``), time
as written (microseconds since the timeline's origin; few are used), tensor (0: none)."""

_LONGEST = 1 << 16
"""Maximum bytes of an event: longer objects are damage, which is skipped."""

_EVENT = (
    rb"""\{"ph": "([BEXi])"(?:, "name": "([^"]*)")?, "ts": (\d{1,14})(?:, "pid": (\d{1,9}))?"""
    rb"""[^{}]*(?:\{[^{}]*\})?\}"""
)
_TENSOR = rb"""\{"name": "process_name", "ph": "M", "pid": (\d{1,9}), "args": \{"name": \""""
_BEHIND_NAME = b'"}},\n{"name": "process_sort_index", "ph": "M", "pid": '
_BEHIND_TENSOR = b'%b%b, "args": {"sort_index": %b}},\n'
_LONGEST_NAME = 1 << 14
"""Maximum bytes of a tensor's object. The name is unescaped, with quotes and any other characters."""
_ORIGIN = (
    rb"""\{"name": "process_name", "ph": "M", "pid": 0, "args": """
    rb"""\{"start_time_since_epoch_in_micros":(\d{1,18})\}\},\n"""
    rb"""\{"name": "process_sort_index", "ph": "M", "pid": 0, "args": \{"sort_index": 0\}\},\n"""
)
_OBJECT = re.compile(rb"(?:" + _EVENT + rb"|" + _TENSOR + rb"|" + _ORIGIN + rb")")
_NEXT_EVENT = re.compile(rb"""[\[\],\n ]*""" + _EVENT)
_ONLY_TENSOR = re.compile(_TENSOR)
_BETWEEN = b"[],\n "
_BORDER = b'},{"ph": "'


@dataclass
class ParsedEvents:
    """The result of :func:`cut`."""

    events: list[Event] = field(default_factory=list)
    n_bytes: int = 0
    """Offset after the last complete object."""
    origin_us: int | None = None
    """Wall-clock time of ``ts`` 0, in microseconds since 1970, if the file's beginning is included."""
    tensors: list[tuple[int, bytes]] = field(default_factory=list)
    """Offsets of names of tensors, and the names."""
    n_lost: int = 0
    """Number of skipped bytes, which Horovod did not write in this form."""


def cut(data: bytes, *, is_end: bool = False) -> ParsedEvents:
    """Return the events in ``data``, which starts at an object boundary, up to the last complete one.

    ``is_end``: no more data will follow, so incomplete objects before other data are damage.
    """
    found = ParsedEvents()
    _cut_events(data, found)
    _cut_objects(data, found, _LONGEST if not is_end else 0)
    return found


def _cut_events(data: bytes, found: ParsedEvents) -> None:
    """Find a run of events without gaps: that is most of a file."""
    following = _NEXT_EVENT.match
    match = following(data)
    while match is not None:
        phase, name, ts, pid = match.groups(b"")
        found.events.append((phase, name, ts, int(pid or 0)))
        found.n_bytes = match.end()
        match = following(data, found.n_bytes)


def _cut_objects(data: bytes, found: ParsedEvents, patience: int) -> None:
    """Find any objects after those already found.

    ``patience``: bytes that may follow an incomplete object; with more, it is damage.
    """
    names = _NameFinder(data)
    at = found.n_bytes
    while (match := _OBJECT.search(data, at)) is not None:
        start, end = match.span()
        phase, name, ts, pid, tensor, origin = match.groups()
        if tensor is not None:
            named = names.behind(end, tensor)
            if named is None:  # if it is incomplete, other data before the next object shows that
                at = end
                continue
            tensor, end = named
        if start - found.n_bytes > 1 and data[found.n_bytes : start].strip(_BETWEEN):
            # Other data precedes it: an incomplete object, or damage.
            if len(data) - found.n_bytes < patience:
                break
            found.n_lost += start - found.n_bytes
        if phase is not None:
            found.events.append((phase, name or b"", ts, int(pid or 0)))
        elif tensor is not None:
            found.tensors.append((match.end(), tensor))
        else:
            found.origin_us = int(origin)
        found.n_bytes = at = end
    if found.n_bytes == 0 and len(data) > _LONGEST:
        found.n_bytes = found.n_lost = len(data) - _LONGEST


def last_border(data: bytes) -> int:
    """Return where the last event in ``data`` begins, 0 if there is none."""
    return max(0, data.rfind(_BORDER) + 1)


def count_spans(data: bytes) -> int:
    """Return how many events begin in ``data``."""
    return data.count(b'{"ph": "B"')


def named_tensors(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield offsets and names of tensors in ``data``."""
    names = _NameFinder(data)
    for match in _ONLY_TENSOR.finditer(data):
        named = names.behind(match.end(), match[1])
        if named is not None:
            yield match.end(), named[0]


class _NameFinder:
    """Finds the ends of names in ``data`` in one pass, for increasing offsets."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0
        """The next possible end of a name, searched from the last offset on."""

    def behind(self, start: int, tensor: bytes) -> tuple[bytes, int] | None:
        """Return the name of ``tensor``, which begins at ``start``, and the end of its object."""
        if 0 <= self._next < start:
            self._next = self._data.find(_BEHIND_NAME, start)
        if not start <= self._next <= start + _LONGEST_NAME:
            return None
        rest = _BEHIND_TENSOR % (_BEHIND_NAME, tensor, tensor)
        end = self._next + len(rest)
        return (
            (self._data[start : self._next], end) if self._data[self._next : end] == rest else None
        )
