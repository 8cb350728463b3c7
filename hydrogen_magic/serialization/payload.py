"""A pickle with its large buffers beside it, and its transfer through a memory file.

Arrays and tensors are not copied into the pickle (protocol 5, out of band). All ranks of a machine
map the payload from one memory file: its pages exist only once.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_MAGIC = b"H2parcl1"
_ALIGNMENT = 64
"""Bytes; alignment that SIMD loads of any library require."""
_IN_BAND_BELOW = 4096
"""Bytes; smaller buffers are cheaper inside the pickle."""
_SMALL_BYTES = 1 << 16
"""A buffer below this size is copied in a few microseconds."""
_CHUNK = 4 << 20
"""Bytes per copy of one thread: small enough to divide the work, large enough to be efficient."""
_COPY_THREADS = 4
"""Page allocation in the kernel limits copying; more threads are not faster."""


@dataclass(frozen=True)
class Payload:
    """An object as bytes."""

    pickled: bytes | memoryview
    """The pickle, protocol 5."""
    buffers: tuple[Any, ...] = ()
    """Its out-of-band buffers: contiguous bytes-like objects."""

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return len(self.pickled) + sum(_flat(buffer).nbytes for buffer in self.buffers)


def digest(payload: Payload) -> str:
    """Return a digest of this payload: SHA-256 of all its bytes and of the sizes of its parts."""
    found = hashlib.sha256()
    for part in (payload.pickled, *payload.buffers):
        flat = _flat(part)
        found.update(flat.nbytes.to_bytes(8, "little"))
        found.update(flat)
    return found.hexdigest()


class Buffers:
    """Collects the out-of-band buffers."""

    def __init__(self) -> None:
        self.taken: list[memoryview] = []
        self.nbytes = 0
        """Bytes collected so far."""

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickle's ``buffer_callback``: True keeps a buffer in the pickle."""
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND_BELOW:
            return True
        self.taken.append(raw)
        self.nbytes += raw.nbytes
        return False


# ── memory files ─────────────────────────────────────────────────────────────────────────────────
# Layout: magic, number of parts, size of each part; then every part at the next aligned offset.
# The first part is the pickle.


def to_memfd(
    payload: Payload, name: str = "payload", on_write: Callable[[int], None] = lambda nbytes: None
) -> int:
    """Return a new descriptor (close-on-exec) of a memory file with ``payload``.

    ``on_write``: see :func:`write`. Raises OSError if there is not enough memory.
    """
    fd = memory_file(name)
    try:
        write(payload, fd, on_write)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write(payload: Payload, fd: int, on_write: Callable[[int], None] = lambda nbytes: None) -> None:
    """Write ``payload`` to the empty file ``fd``; :func:`from_memfd` reads it.

    ``on_write``: called with the number of bytes of each piece after it is written. Raises OSError.
    """
    parts = [_flat(part) for part in (payload.pickled, *payload.buffers)]
    sizes = [part.nbytes for part in parts]
    offsets, total = _layout(sizes)
    os.ftruncate(fd, total)
    write_at(fd, 0, memoryview(_header(sizes)))
    _write_all(fd, list(zip(offsets, parts, strict=True)), on_write)


def from_memfd(fd: int) -> Payload:
    """Map the payload in memory file ``fd`` without a copy; changes stay in this process.

    The descriptor may be closed afterwards. Raises ValueError if the file holds no payload.
    """
    memory = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    if bytes(memory[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("this file holds no payload")
    try:
        (count,) = struct.unpack_from("<Q", memory, len(_MAGIC))
        sizes = struct.unpack_from(f"<{count}Q", memory, len(_MAGIC) + 8)
    except struct.error:
        raise ValueError("this payload is cut off") from None
    offsets, total = _layout(sizes)
    if len(memory) < total:
        raise ValueError(f"this payload is cut off: it has {len(memory)} of {total} bytes")
    parts = [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    return Payload(parts[0], tuple(parts[1:]))


def _flat(buffer: Any) -> memoryview:
    return pickle.PickleBuffer(buffer).raw()


def _header(sizes: Sequence[int]) -> bytes:
    return _MAGIC + struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offset of every part and the size of the whole file."""
    position = len(_MAGIC) + 8 * (len(sizes) + 1)
    offsets = []
    for size in sizes:
        position = -(-position // _ALIGNMENT) * _ALIGNMENT
        offsets.append(position)
        position += size
    return offsets, position


def memory_file(name: str) -> int:
    """Return a new descriptor (close-on-exec) of an empty file in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"hydrogen_magic:{name}", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # unlinked: deleted with its last descriptor
        return os.dup(file.fileno())


def _write_all(
    fd: int, parts: Sequence[tuple[int, memoryview]], on_write: Callable[[int], None]
) -> None:
    chunks = list(_chunks(parts))
    if len(chunks) - len(parts) < 2:
        for offset, part in parts:
            write_at(fd, offset, part)
            on_write(part.nbytes)
        return

    def write(chunk: tuple[int, memoryview]) -> None:
        write_at(fd, *chunk)

    with ThreadPoolExecutor(_COPY_THREADS, "payload") as pool:
        try:
            done = pool.map(write, chunks)
        except RuntimeError:  # the limit of threads or processes is reached: on this thread
            done = map(write, chunks)
        for (_, part), _ in zip(chunks, done, strict=True):
            on_write(part.nbytes)


def _chunks(parts: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, memoryview]]:
    for offset, part in parts:
        for start in range(0, part.nbytes, _CHUNK):
            yield offset + start, part[start : start + _CHUNK]


def write_at(fd: int, offset: int, data: memoryview) -> None:
    """Write all of ``data``, of which one call of the system may write a part only."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def copied(payload: Payload) -> Payload:
    """Return a copy in private memory, so that the mapped file can be closed."""
    return Payload(bytes(payload.pickled), tuple(bytearray(buffer) for buffer in payload.buffers))


def with_small_copied(payload: Payload) -> Payload:
    """Return ``payload`` with small buffers in private memory.

    An array that is kept of a large result would otherwise keep the whole mapped file.
    """
    buffers = (bytearray(b) if _flat(b).nbytes < _SMALL_BYTES else b for b in payload.buffers)
    return Payload(payload.pickled, tuple(buffers))
