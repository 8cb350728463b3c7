"""One stream of pickles, one per name, which preserves objects shared between values."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hydrogen_magic.capture.module_objects import ModuleObject
from hydrogen_magic.capture.pickler import CapturePickler
from hydrogen_magic.capture.required_names import RequiredNames
from hydrogen_magic.core.units import size_text
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.identity import Originals, is_kind
from hydrogen_magic.serialization.memory_layout import MemoryLayout
from hydrogen_magic.serialization.object_paths import paths_to
from hydrogen_magic.serialization.payload import Buffers, Payload
from hydrogen_magic.serialization.pickling_errors import explain

_WARN_BYTES = 256 << 20
"""Sending this takes a noticeable time, and every rank keeps it in memory."""


class _StreamTooLargeError(Exception):
    """The stream is larger than allowed."""


class _Limited:
    """A file in memory with a maximum size."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.data = bytearray()

    def write(self, data: Any) -> None:
        if len(self.data) + len(data) > self.limit:
            raise _StreamTooLargeError
        self.data += data


class NamedPickles:
    """Pickles named values one by one, so that errors and sizes refer to names.

    The reader must load them one by one from a single unpickler.
    """

    def __init__(
        self,
        needs: RequiredNames,
        *,
        max_bytes: int,
        ranks_have_gpu: bool,
        out: Sequence[str] = (),
        layout: MemoryLayout | None = None,
        originals: Originals | None = None,
        code_on_ranks: frozenset[str] = frozenset(),
        value_on_ranks: Callable[[Any], str | None] | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.originals = Originals() if originals is None else originals
        """Objects that the variables in ``out`` refer to; in a session, all that have been sent."""
        self._out = frozenset(out)
        self._numbers_all = originals is not None
        self.needs = needs
        self.sizes: dict[str, int] = {}
        """Bytes that each name added."""
        self.with_process_state: list[str] = []
        """Names whose objects Accelerate has made for the notebook's process."""
        self._file = _Limited(max_bytes)
        self._buffers = Buffers()
        self.pickler = CapturePickler(
            self._file,
            pickle.HIGHEST_PROTOCOL,
            self._add_buffer,
            needs=needs,
            ranks_have_gpu=ranks_have_gpu,
            layout=layout,
            originals=self.originals,
        )
        self.pickler.code_on_ranks = code_on_ranks
        self.pickler.value_on_ranks = value_on_ranks

    def refer_to(self, objects: Sequence[ModuleObject]) -> None:
        """Let the values refer to objects of local modules; call it before they are added."""
        if objects:
            self.pickler.dump_objects(objects)

    def add(self, items: Iterable[tuple[str, Any]]) -> None:
        """Pickle values. Raises CaptureError with the name of an unpicklable one, and a remedy."""
        for name, value in items:
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        before, n_states = self.nbytes, self.pickler.n_process_states
        self.pickler.number_of = self._numbering(name, value)
        try:
            self.pickler.dump(value)
        except _StreamTooLargeError:
            self.sizes[name] = self.max_bytes
            self.check_size()
            raise
        except Exception as error:  # pickling runs the classes' own code: it may raise anything
            raise self._error_for(name, value, error) from error
        self.sizes[name] = self.nbytes - before
        if self.pickler.n_process_states > n_states:
            self.with_process_state.append(name)

    def _numbering(self, name: str, value: Any) -> Callable[[Any], int | None] | None:
        """Return what numbers the objects of a value; None: they are copies, as the arguments of a call."""
        if name in self._out or (self._numbers_all and name != ""):
            return self.originals.number
        # These are pickled before the values of ``out``, and may share objects with them.
        is_code = name != "" and issubclass(type(value), CODE)
        return self._number_of_out if self._out and is_code else None

    def _number_of_out(self, obj: Any) -> int | None:
        is_of_out = is_kind(obj) and id(obj) in self._objects_of_out
        return self.originals.number(obj) if is_of_out else None

    @functools.cached_property
    def _objects_of_out(self) -> frozenset[int]:
        """Identities of the objects in the values of ``out`` that results may update."""
        names = self._out & self.needs.values.keys()
        values = [self.needs.namespace[name] for name in names]
        return frozenset(id(obj) for _, obj in paths_to(values, is_kind))

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Collect a buffer, unless the stream has to be written again."""
        return not self.pickler.layout.has_conflicts and self._buffers.add(buffer)

    def _error_for(self, name: str, value: Any, error: Exception) -> CaptureError:
        shown = name or "the call"
        message = explain(shown, value, error, self.pickler.last)
        why = self.needs.values.get(name)
        return CaptureError(f"{message} ({why})" if why else message)

    @property
    def nbytes(self) -> int:
        """Bytes so far, including buffers."""
        return len(self._file.data) + self._buffers.nbytes

    def check_size(self) -> str | None:
        """Raise CaptureError if the size is over the limit; return a warning if it is large."""
        total = max(self.nbytes, sum(self.sizes.values()))
        if total < min(_WARN_BYTES, self.max_bytes):
            return None
        largest = sorted(self.sizes, key=lambda name: -self.sizes[name])[:3]
        names = ", ".join(f"`{n}` {size_text(self.sizes[n])}" for n in largest if self.sizes[n])
        if total >= self.max_bytes:
            raise CaptureError(
                f"the cell captures {size_text(total)} or more, over the limit of"
                f" {size_text(self.max_bytes)}: {names}; load the data inside the cell, or"
                " raise the limit with --max-closure"
            )
        return (
            f"the cell captures {size_text(total)}: {names}; arrays take this memory once on every host, "
            "other objects once on every rank"
        )

    def finish(self) -> Payload:
        """Return everything as one payload. Nothing can be added afterwards."""
        payload = Payload(memoryview(self._file.data), tuple(self._buffers.taken))
        self.release()
        return payload

    def release(self) -> None:
        """Drop the references to the values, at once: the pickler is part of a reference cycle."""
        self.pickler.release()
        self._buffers.taken.clear()
