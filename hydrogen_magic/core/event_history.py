"""The events of a gang in memory: old ones are packed, since days of training have millions of them."""

from __future__ import annotations

import pickle
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

from hydrogen_magic.core.events import Display, Event, Output

_BLOCK = 1024
"""Events that are packed together: a few milliseconds of work, and less than a tenth of their memory."""
_LEVEL = 1
"""Of zlib: higher ones take much longer for a little less memory."""
_OF_EVENT = 300
"""Size of an event without its content."""
_SHOWN_CHARS = 8 << 20
"""Live output and displays kept in memory; the ranks' log files and the notebook have all of it."""


class EventHistory(Sequence[Event]):
    """All events so far, oldest first; the oldest output is missing if there is much. Thread-safe.

    A slice of the newest events is a list. One that begins earlier unpacks its events whenever it is
    iterated over, one block at a time. Slices have the step 1.
    """

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._recent: list[Event] = []
        """Those after the packed ones."""
        self._output: OrderedDict[int, Display | Output] = OrderedDict()
        """Output events with their contents, by index; packed blocks have them without."""
        self._output_size = 0
        self._lock = threading.RLock()

    def append(self, event: Event) -> None:
        """Add ``event``."""
        with self._lock:
            if isinstance(event, (Display, Output)):
                self._output[len(self)] = event
                self._output_size += _size(event)
            self._recent.append(event)
            self._thin_output()
            if len(self._recent) >= 2 * _BLOCK:
                self._packed.append(_pack(self._recent[:_BLOCK]))
                del self._recent[:_BLOCK]

    def _thin_output(self) -> None:
        """Drop the content of the oldest output if there is too much: a rank may print for days."""
        while self._output_size > _SHOWN_CHARS:
            index, event = self._output.popitem(last=False)
            self._output_size -= _size(event)
            if index >= self._n_packed:
                self._recent[index - self._n_packed] = _without_content(event)

    @property
    def _n_packed(self) -> int:
        return len(self._packed) * _BLOCK

    def __len__(self) -> int:
        with self._lock:
            return self._n_packed + len(self._recent)

    def __iter__(self) -> Iterator[Event]:
        return iter(self[:])

    def __reversed__(self) -> Iterator[Event]:
        return reversed(self[:])

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        with self._lock:
            if not isinstance(index, slice):
                return self.block_from(range(len(self))[index])[0]
            places = _places(range(len(self)), index)
            first = places.start - self._n_packed
            if first >= 0:
                return self._recent[first : first + len(places)]
        return _Slice(self, places)

    def block_from(self, place: int) -> Sequence[Event]:
        """Return the event at ``place`` and those after it that are in memory together with it."""
        with self._lock:
            if place >= self._n_packed:
                return self._recent[place - self._n_packed :]
            packed = self._packed[place // _BLOCK]
        before = place % _BLOCK
        events = _unpack(packed)[before:]
        return [self._output.get(place + n, event) for n, event in enumerate(events)]


class _Slice(Sequence[Event]):
    """Events of a history, some of them packed."""

    def __init__(self, history: EventHistory, places: range) -> None:
        self._history = history
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        if not isinstance(index, slice):
            return self._history.block_from(self._places[index])[0]
        return _Slice(self._history, _places(self._places, index))

    def __iter__(self) -> Iterator[Event]:
        place, stop = self._places.start, self._places.stop
        while place < stop:
            events = self._history.block_from(place)[: stop - place]
            yield from events
            place += len(events)

    def __reversed__(self) -> Iterator[Event]:
        start, stop = self._places.start, self._places.stop
        while stop > start:
            first = max(start, (stop - 1) // _BLOCK * _BLOCK)
            yield from reversed(self._history.block_from(first)[: stop - first])
            stop = first


def _places(known: range, index: slice) -> range:
    if index.step not in (None, 1):
        raise ValueError("a slice of events has the step 1: list(events) has any")
    return known[index]


def _pack(events: Sequence[Event]) -> bytes:
    plain = [_without_content(e) if isinstance(e, (Display, Output)) else e for e in events]
    return zlib.compress(pickle.dumps(plain, pickle.HIGHEST_PROTOCOL), _LEVEL)


def _unpack(packed: bytes) -> list[Event]:
    events: list[Event] = pickle.loads(zlib.decompress(packed))
    return events


def _size(event: Display | Output) -> int:
    return _OF_EVENT + (len(event.text) if isinstance(event, Output) else event.size_bytes)


def _without_content(event: Display | Output) -> Event:
    if isinstance(event, Display):
        return replace(event, data={}, metadata="")
    skipped = event.skipped_bytes + len(event.text.encode("utf-8", "replace"))
    lines = event.skipped_lines + event.text.count("\n")
    return replace(event, text="", skipped_bytes=skipped, skipped_lines=lines)
