"""Which arrays and tensors share memory, and the buffers in which that memory is sent.

Each array, view and storage covers a range of addresses. Those whose ranges overlap share one buffer,
whichever library made them; the others are independent. The ranges are known only when everything has
been pickled: where a later object needs more of a buffer than an earlier one, the stream is written
again with the ranges of the first attempt.
"""

from __future__ import annotations

import ctypes
import pickle
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

_ALIGNMENT = 64
"""Bytes. A buffer begins at such an address, as its copy does, so that its parts stay aligned. The bytes
before its first element are of the same cache line, and so can be read."""


@dataclass(frozen=True)
class Memory:
    """A range of addresses as an object of the stream: its readers get a buffer."""

    start: int
    end: int
    owner: Any
    """Keeps the memory alive."""

    @property
    def origin(self) -> int:
        """Address of the first byte of the buffer."""
        return self.start - self.start % _ALIGNMENT

    def buffer(self) -> pickle.PickleBuffer:
        """Return the memory as a buffer, without a copy."""
        memory: Any = (ctypes.c_char * (self.end - self.origin)).from_address(self.origin)
        memory._keeps_alive = self.owner
        return pickle.PickleBuffer(memory)


@dataclass(frozen=True)
class Region:
    """A range of addresses that the stream contains."""

    start: int
    end: int
    source: Any
    """The object of the stream that has the memory; None for a copy that cannot be shared."""

    @property
    def origin(self) -> int:
        """Address of the first byte of the source."""
        return self.source.origin if type(self.source) is Memory else self.start


class MemoryLayout:
    """The regions of one stream. ``earlier``: the layout of the attempt before it, with conflicts."""

    def __init__(self, earlier: MemoryLayout | None = None) -> None:
        self.has_conflicts = False
        """Objects share memory that this first attempt does not share."""
        self._earlier = earlier
        self._planned = [] if earlier is None else earlier._merged()
        self._regions: list[Region] = []
        """Disjoint, by start."""
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int]] = []
        self._owners: list[Any] = []
        """Keep the memory of all ranges alive, so that no address is used again."""

    def find(self, start: int, end: int, owner: Any) -> Region | None:
        """Return the region that contains a range; note a conflict if one contains only a part."""
        self._ranges.append((start, end))
        self._owners.append(owner)
        place = bisect_right(self._starts, start)
        before = self._regions[place - 1] if place else None
        if before is not None and end <= before.end and before.source is not None:
            return before
        after = self._regions[place] if place < len(self._regions) else None
        is_cut = before is not None and start < before.end
        overlaps = is_cut or (after is not None and after.start < end)
        self.has_conflicts |= overlaps and self._earlier is None
        return None

    def planned(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the range that the objects in this one share with others, None if they share none."""
        place = bisect_right(self._planned, start, key=lambda found: found[0])
        found = self._planned[place - 1] if place else (0, 0)
        return found if end <= found[1] else None

    def add(self, start: int, end: int, source: Any) -> Region:
        """Add a region."""
        region = Region(start, end, source)
        place = bisect_right(self._starts, start)
        self._starts.insert(place, start)
        self._regions.insert(place, region)
        return region

    def add_memory(self, start: int, end: int, owner: Any) -> Region:
        """Add a region that consists of memory, as large as planned."""
        start, end = self.planned(start, end) or (start, end)
        return self.add(start, end, Memory(start, end, owner))

    def _merged(self) -> list[tuple[int, int]]:
        """Return the ranges that overlap, merged."""
        merged: list[tuple[int, int, bool]] = []
        for start, end in sorted(self._ranges):
            if merged and start < merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1]), True
            else:
                merged.append((start, end, False))
        return [(start, end) for start, end, is_shared in merged if is_shared]


def bytes_of(storage: Any) -> pickle.PickleBuffer:
    """Return the memory of a torch storage as a buffer, without a copy."""
    nbytes = storage.nbytes()
    if not nbytes:
        return pickle.PickleBuffer(bytearray())
    memory: Any = (ctypes.c_char * nbytes).from_address(storage.data_ptr())
    memory._keeps_alive = storage
    return pickle.PickleBuffer(memory)


def extent_of(array: Any) -> tuple[int, int]:
    """Return the addresses between the first and last element of a NumPy array."""
    address = array.__array_interface__["data"][0]
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    below = sum(step for step in steps if step < 0)
    above = sum(step for step in steps if step > 0)
    return address + below, address + above + array.itemsize
