"""Which arrays and tensors share memory, and the buffers in which that memory is sent.

Each array, view and storage covers a range of addresses. Those whose ranges overlap share one buffer,
whichever library made them; the others are independent. The ranges are known only when everything has
been pickled: where a later object overlaps an earlier one that has no such buffer, or a smaller one, the
stream is written again with the ranges of the first attempt.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
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
    is_alone: bool = False
    """It has one object, which is pickled without it."""

    @property
    def origin(self) -> int:
        """Address of the first byte of the buffer."""
        return self.start - self.start % _ALIGNMENT

    def buffer(self) -> pickle.PickleBuffer:
        """Return the memory as a buffer, without a copy."""
        memory: Any = (ctypes.c_char * (self.end - self.origin)).from_address(self.origin)
        memory._keeps_alive = self.owner
        return pickle.PickleBuffer(memory)


class MemoryLayout:
    """The memory of one stream. ``earlier``: the layout of the attempt before it, with conflicts."""

    def __init__(self, earlier: MemoryLayout | None = None) -> None:
        self.has_conflicts = False
        """Objects share memory that this first attempt does not share."""
        self._earlier = earlier
        """Keeps the memory of that attempt alive, so that no address is used again."""
        known = earlier._parts if earlier else []
        self._parts: list[Memory] = [part for part in known if not part.is_alone]
        """Disjoint, by start."""
        self._starts = [part.start for part in self._parts]
        self._owners: list[Any] = []
        """Keep the memory of this attempt alive, for the same reason."""

    def add(self, start: int, end: int, owner: Any, can_be_alone: bool = False) -> Memory:
        """Return the memory that an object shares with all that overlap it.

        Notes a conflict if the others have been written with less. ``can_be_alone``: the object is pickled
        without it if there are no others.
        """
        self._owners.append(owner)
        first, last = bisect_right(self._starts, start), bisect_left(self._starts, end)
        if first and start < self._parts[first - 1].end:
            first -= 1
        known = self._parts[first:last]
        if known and end <= known[0].end and known[0].start <= start and not known[0].is_alone:
            return known[0]
        self.has_conflicts |= bool(known) and self._earlier is None
        if known:
            start, end = min(start, known[0].start), max(end, known[-1].end)
        memory = Memory(start, end, owner, can_be_alone and not known)
        self._parts[first:last], self._starts[first:last] = [memory], [start]
        return memory


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


def ranges_of(objects: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the addresses that arrays and tensors use, as ``(start, end)``; other objects have none."""
    return [(start, end) for start, end in map(_range_of, objects) if 0 < start < end]


def _range_of(obj: Any) -> tuple[int, int]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        has_own_operations = type(obj).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if obj.layout is not torch.strided or has_own_operations:  # it consists of other tensors
            return 0, 0
        storage = obj.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return extent_of(obj) if hasattr(obj, "__array_interface__") and obj.size else (0, 0)


def overlap(some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> bool:
    """Whether a range of ``some`` and one of ``others`` overlap."""
    ends = [0, 0]
    for start, end, side in sorted([*((*one, 0) for one in some), *((*one, 1) for one in others)]):
        if start < ends[1 - side]:
            return True
        ends[side] = max(ends[side], end)
    return False
