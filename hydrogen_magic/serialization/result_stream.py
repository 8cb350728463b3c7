"""The results of a rank as a stream of named parts.

The value of the cell and every ``--out`` variable are pickled one after the other by a single
pickler, so that a model and its optimizer still share their parameters. Each part travels on its own,
as soon as it is pickled. A part that cannot be pickled, sent, or opened in the notebook, does not affect
the others::

    packer = Packer(pickler); section = packer.pack("model", model)     on the rank
    opened = unpack([section, ...])                                     in the kernel
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.core.validation import checked
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.identity import Originals, updating
from hydrogen_magic.serialization.payload import Buffers, Payload
from hydrogen_magic.serialization.tolerant_unpickling import TolerantUnpickler

CELL_VALUE = ""
"""Name of the part with the value of the cell or call. No variable has this name."""
_MARK = pickle.dumps([], pickle.HIGHEST_PROTOCOL)
NONE = Payload(_MARK + pickle.dumps(None, pickle.HIGHEST_PROTOCOL), ())
"""The section of None alone: a mark, then the object, as :class:`Packer` writes them."""


def label(name: str) -> str:
    """Return the name of a result in messages."""
    return f"`{name}`" if name else "the value"


@dataclass(frozen=True)
class UnopenedPart:
    """Stands for a part that arrived but cannot be unpickled completely in this process."""

    reason: str
    rest: Any
    """The object with a :class:`MissingObject` in place of every object that could not be restored."""


# ── packing ──────────────────────────────────────────────────────────────────────────────────────


class _CountingFile:
    """A file in memory for one section at a time; it reports its size, and pickle writes every 64 KiB.

    Pickling a large list is a single call into C. Calling Python from there lets other threads of
    the rank run, among them the one that reports progress.
    """

    def __init__(self, on_write: Callable[[int], None]) -> None:
        self._memory = io.BytesIO()
        self._on_write = on_write

    def write(self, data: Any) -> int:
        written = self._memory.write(data)
        self._on_write(self._memory.tell())
        return written

    def take(self) -> memoryview:
        """Return the bytes written so far, and start again with none."""
        written, self._memory = self._memory, io.BytesIO()
        # Not its getbuffer(): Python 3.14 reports a file that is collected together with its exported buffer.
        return memoryview(written.getvalue())


class Packer:
    """Pickles results into one stream, a section each.

    An object that several results share is in the section of the first.
    """

    def __init__(
        self, pickler: Callable[..., Any], on_write: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """``pickler``: called as ``pickler(file, protocol, buffer_callback)``, makes a
        :class:`~hydrogen_magic.serialization.pickler.Pickler`. ``on_write``: called with the size of
        the section so far.
        """
        self._file = _CountingFile(on_write)
        self._buffers = Buffers()
        self._pickler = pickler(
            self._file, pickle.HIGHEST_PROTOCOL, lambda buffer: self._buffers.add(buffer)
        )

    @property
    def last(self) -> Any:
        """The object that pickle has reached."""
        return self._pickler.last

    def pack(self, name: str, obj: Any) -> Payload:
        """Return the section of ``obj``. Raises what pickling raises; the section is taken back then."""
        self._pickler.current = name
        self._pickler.begin_section()
        try:
            self._pickler.dump(obj)
        except BaseException:  # pickling runs methods of the user's classes
            self._take()
            self.take_back()
            raise
        return self._take()

    def take_back(self) -> None:
        """Forget the last section: later ones will not refer to its objects."""
        self._pickler.take_back_section()

    def release(self) -> None:
        """Drop the references to the objects at once: the pickler is part of a reference cycle."""
        self._pickler.release()

    def _take(self) -> Payload:
        buffers, self._buffers = self._buffers, Buffers()
        return Payload(self._file.take(), tuple(buffers.taken))


# ── unpickling ───────────────────────────────────────────────────────────────────────────────────


def unpack(
    sections: Sequence[Payload],
    originals: Originals | None = None,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Any]:
    """Return the objects of a stream, and an :class:`UnopenedPart` for each that cannot be
    unpickled.

    ``originals``: objects of the notebook to update in place; if a part cannot be opened, the others become
    new objects. ``loading``: the context of what may be interrupted.
    """
    source = _SectionReader()
    unpickler = pickle.Unpickler(source, buffers=source)
    try:
        with updating(originals) if originals is not None else nullcontext(), loading():
            return [source.load(section, unpickler) for section in sections]
    except (Exception, SystemExit):  # constructors of the user's classes run
        with loading():
            return list(_what_opens(sections))


def _what_opens(sections: Sequence[Payload]) -> Iterator[Any]:
    source = _SectionReader()
    unpickler = TolerantUnpickler(source, buffers=source)
    damage: Exception | None = None
    for section in sections:
        unpickler.begin_section()
        if damage is None:
            try:
                obj = source.load(section, unpickler)
            except Exception as error:  # not of the user's classes: the unpickler would go on
                damage = pickle.UnpicklingError(f"its pickle is damaged: {error!r}")
        if damage is not None:  # later ones would count its objects, and get wrong ones
            obj = unpickler.lose("damaged pickle", damage)
        yield UnopenedPart(unpickler.reasons[0], obj) if unpickler.reasons else obj


class _SectionReader:
    """The file and the buffers of an unpickler, for one section at a time."""

    def __init__(self) -> None:
        self._payload = memoryview(b"")
        self._position = 0
        self._buffers: Iterator[Any] = iter(())

    def load(self, section: Payload, unpickler: Any) -> Any:
        """Return the object of ``section``, the next one of the stream."""
        self._payload = memoryview(section.pickled)  # io.BytesIO would copy it
        self._position = 0
        self._buffers = iter(section.buffers)
        unpickler.load()  # the mark of the section
        return unpickler.load()

    def read(self, size: int = -1) -> bytes:
        return bytes(self._next(size if size >= 0 else len(self._payload)))

    def readinto(self, target: Any) -> int:
        data = self._next(len(target))
        target[: len(data)] = data
        return len(data)

    def readline(self) -> bytes:
        """Return the rest: pickles of this protocol have no lines."""
        return self.read()

    def _next(self, size: int) -> memoryview:
        data = self._payload[self._position : self._position + size]
        self._position += len(data)
        return data

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._buffers)


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def save(parts: Sequence[tuple[msg.ResultPart, Payload]], path: Path) -> None:
    """Write the results of a rank to ``path``, completely or not at all; :func:`load` reads them.

    Raises OSError.
    """
    counts = [len(section.buffers) for _, section in parts]
    labels = [asdict(part) for part, _ in parts]
    blocks = [block for _, section in parts for block in (section.pickled, *section.buffers)]
    content = Payload(json.dumps([labels, counts]).encode(), tuple(blocks))
    arriving = path.with_name(f".{path.name}{run_log.ARRIVING}")
    try:
        fd = os.open(arriving, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            payload.write(content, fd)
        finally:
            os.close(fd)
        arriving.rename(path)
    finally:
        arriving.unlink(missing_ok=True)


def load(path: Path) -> list[tuple[msg.ResultPart, Payload]]:
    """Return the objects that :func:`save` wrote. Raises OSError, and ValueError for other files."""
    with path.open("rb") as file:
        content = payload.from_memfd(file.fileno())
    labels, counts = json.loads(bytes(content.pickled))
    blocks = iter(content.buffers)
    found: list[tuple[msg.ResultPart, Payload]] = []
    for fields, count in zip(labels, counts, strict=True):
        section = Payload(memoryview(next(blocks)), tuple(next(blocks) for _ in range(count)))
        found.append((checked(msg.ResultPart, fields, "a result's label"), section))
    return found
