"""The results of a rank as a stream of named parts.

The value of the cell and every ``--out`` variable are pickled one after the other by a single
pickler, so that a model and its optimizer still share their parameters. Each part is sent
separately. A part that cannot be pickled, or that cannot be unpickled in the notebook, does not
affect the others::

    stream = pack({"model": model, "opt": opt}, pickler)     on the rank
    opened = unpack([section, ...])                          in the kernel
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydrogen_magic.core.validation import checked
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.identity import Originals, updating
from hydrogen_magic.serialization.payload import Buffers, Payload
from hydrogen_magic.serialization.tolerant_unpickling import MissingObject, TolerantUnpickler

__all__ = [
    "CELL_VALUE",
    "MissingObject",
    "Packed",
    "ResultPart",
    "UnopenedPart",
    "label",
    "load",
    "pack",
    "save",
    "unpack",
]

CELL_VALUE = ""
"""Name of the part with the value of the cell or call. No variable has this name."""


def label(name: str) -> str:
    """Return the name of a result in messages."""
    return f"`{name}`" if name else "the value"


@dataclass(frozen=True)
class ResultPart:
    """One named result of one rank: the label that is sent with its bytes."""

    name: str
    """A variable of ``--out``, or :data:`CELL_VALUE`."""
    stream: int = 0
    """Parts of one stream share objects and are unpickled in the order of their arrival."""
    error: str = ""
    """Why the object could not be sent; the part then has no bytes."""
    is_partial: bool = False
    """Unpicklable objects were replaced by :class:`MissingObject`: for the run log only."""


@dataclass(frozen=True)
class UnopenedPart:
    """Stands for a part that arrived but cannot be unpickled completely in this process."""

    reason: str
    rest: Any
    """The object with a :class:`MissingObject` in place of every object that could not be restored."""


@dataclass(frozen=True)
class Packed:
    """A stream on its rank."""

    sections: Mapping[str, Payload]
    """Every part that was pickled, in order."""
    failures: Mapping[str, tuple[BaseException, Any]] = field(default_factory=dict)
    """Every other part, with the error and the object that pickle had reached."""


# ── packing ──────────────────────────────────────────────────────────────────────────────────────


class _PackError(Exception):
    """Pickling one of several objects failed."""

    def __init__(self, name: str, error: BaseException, last: Any) -> None:
        super().__init__(name)
        self.name, self.error, self.last = name, error, last


class _CountingFile(io.BytesIO):
    """A file in memory that reports its size; pickle writes to it every 64 KiB.

    Pickling a large list is a single call into C. Calling Python from there lets other threads of
    the rank run, among them the one that reports progress.
    """

    def __init__(self, on_write: Callable[[int], None]) -> None:
        super().__init__()
        self._on_write = on_write

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._on_write(self.tell())
        return written


def pack(
    objects: Mapping[str, Any],
    pickler: Callable[..., Any],
    on_write: Callable[[str, int], None] = lambda name, nbytes: None,
) -> Packed:
    """Pickle ``objects`` into one stream, without those that cannot be pickled.

    ``pickler``: called as ``pickler(file, protocol, buffer_callback)``; its ``last`` is the object
    that it has reached. ``on_write``: called with the name of the object and the number of bytes in
    the stream so far.
    """
    failures: dict[str, tuple[BaseException, Any]] = {}
    while True:
        todo = {name: obj for name, obj in objects.items() if name not in failures}
        try:
            return Packed(_pack_all(todo, pickler, on_write), failures)
        except (
            _PackError
        ) as failure:  # its pickler's memo is unusable now: start again without the object
            failures[failure.name] = failure.error, failure.last


def _pack_all(
    objects: Mapping[str, Any], pickler: Callable[..., Any], on_write: Callable[[str, int], None]
) -> dict[str, Payload]:
    current = ""
    file, buffers = _CountingFile(lambda nbytes: on_write(current, nbytes)), Buffers()
    made = pickler(file, pickle.HIGHEST_PROTOCOL, buffers.add)
    ends: dict[str, tuple[int, int]] = {}
    for current, obj in objects.items():
        made.current = current
        try:
            made.dump(obj)
        except BaseException as error:  # pickling runs methods of the user's classes
            raise _PackError(current, error, made.last) from error
        ends[current] = file.tell(), len(buffers.taken)
    return dict(
        zip(objects, _sections(file.getbuffer(), buffers.taken, ends.values()), strict=True)
    )


def _sections(
    pickled: memoryview, buffers: Sequence[Any], ends: Iterable[tuple[int, int]]
) -> Iterator[Payload]:
    start = first = 0
    for end, last in ends:
        yield Payload(pickled[start:end], tuple(buffers[first:last]))
        start, first = end, last


# ── unpickling ───────────────────────────────────────────────────────────────────────────────────


def unpack(sections: Sequence[Payload], originals: Originals | None = None) -> list[Any]:
    """Return the objects of a stream, and an :class:`UnopenedPart` for each that cannot be
    unpickled.

    ``originals``: objects of the notebook to update in place, if all objects can be unpickled.
    """
    source = _SectionReader()
    unpickler = pickle.Unpickler(source, buffers=source)
    try:
        with updating(originals) if originals is not None else nullcontext():
            return [unpickler.load() for section in sections if source.open(section)]
    except (Exception, SystemExit):  # constructors of the user's classes run
        return _unpack_what_opens(sections)


def _unpack_what_opens(sections: Sequence[Payload]) -> list[Any]:
    source = _SectionReader()
    unpickler = TolerantUnpickler(source, buffers=source)
    found: list[Any] = []
    for section in sections:
        source.open(section)
        unpickler.reasons.clear()
        first = len(unpickler.memo)
        obj = unpickler.load()
        if unpickler.reasons:
            obj = UnopenedPart(unpickler.reasons[0], obj)
            unpickler.distrust(range(first, len(unpickler.memo)))
        found.append(obj)
    return found


class _SectionReader:
    """The file and the buffers of an unpickler, for one section at a time."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._buffers: Iterator[Any] = iter(())

    def open(self, section: Payload) -> bool:
        """Continue with ``section``."""
        self._file = io.BytesIO(section.pickled)
        self._buffers = iter(section.buffers)
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def readinto(self, target: Any) -> int:
        return self._file.readinto(target)

    def readline(self) -> bytes:
        return self._file.readline()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._buffers)


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def save(parts: Sequence[tuple[ResultPart, Payload]], path: Path) -> None:
    """Write the results of a rank to ``path``, completely or not at all; :func:`load` reads them.

    Raises OSError.
    """
    counts = [len(section.buffers) for _, section in parts]
    labels = [asdict(part) for part, _ in parts]
    blocks = [block for _, section in parts for block in (section.pickled, *section.buffers)]
    content = Payload(json.dumps([labels, counts]).encode(), tuple(blocks))
    arriving = path.with_name(f".{path.name}.arriving")
    try:
        fd = os.open(arriving, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            payload.write(content, fd)
        finally:
            os.close(fd)
        arriving.rename(path)
    finally:
        arriving.unlink(missing_ok=True)


def load(path: Path) -> list[tuple[ResultPart, Payload]]:
    """Return the objects that :func:`save` wrote. Raises OSError, and ValueError for other files."""
    with path.open("rb") as file:
        content = payload.from_memfd(file.fileno())
    labels, counts = json.loads(bytes(content.pickled))
    blocks = iter(content.buffers)
    found: list[tuple[ResultPart, Payload]] = []
    for fields, count in zip(labels, counts, strict=True):
        section = Payload(memoryview(next(blocks)), tuple(next(blocks) for _ in range(count)))
        found.append((checked(ResultPart, fields, "a result's label"), section))
    return found
