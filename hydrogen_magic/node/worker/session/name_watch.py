"""What a cell of a session did to the names of its rank: assigned, changed in place, deleted.

A name that the cell's code assigns, or that refers to another object afterwards, is assigned. Changes in
place are looked for in values that both sides had, by their contents: torch's version counters miss
fused optimizers and writes through ``.data``.
"""

from __future__ import annotations

import pickle
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.core.library_types import loaded
from hydrogen_magic.node.worker.interactive.ipython_shell import bound_by_ipython
from hydrogen_magic.serialization.content_digest import DigestFile
from hydrogen_magic.serialization.identity import ObjectIdentity
from hydrogen_magic.serialization.instances import restore_same
from hydrogen_magic.serialization.library_objects.tensor_hooks import with_hooks
from hydrogen_magic.serialization.memory_layout import bytes_of
from hydrogen_magic.serialization.pickler import Pickler

_MAX_BYTES = 64 << 20
"""A larger value is not read after each cell: this much takes 30 ms."""
_NOT_THE_USERS = frozenset({"get_ipython", "display", "_exit_code"})
"""Names that a rank provides itself."""
_GONE: Any = object()
"""In place of a value: a thread of the user has deleted the name."""
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


@dataclass(frozen=True)
class NameChanges:
    """What a cell did to the names of a rank."""

    received: tuple[str, ...] = ()
    """Names that the closure has bound, or whose objects it has updated."""
    assigned: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Values that both sides had, and that have other contents now."""
    uncertain: tuple[str, ...] = ()
    """Values that both sides had, and whose contents cannot be compared."""
    deleted: tuple[str, ...] = ()


class NameWatch:
    """Follows the names of one rank from cell to cell."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._end: dict[str, ObjectIdentity] | None = None
        """At the end of the last cell, whose threads may go on; None before the first one."""
        self._start: dict[str, ObjectIdentity] = {}
        self._before: dict[str, ObjectIdentity] = {}
        self._sent: frozenset[str] = frozenset()
        self._shared: dict[str, str | None] = {}
        """Digests of values that both sides have; None: not comparable."""

    def start(self) -> None:
        """Look at the names before the closure binds some of them."""
        self._start = dict(self._identities())

    def begin(self, sent: Collection[str]) -> None:
        """Look at the names before the cell; ``sent``: both sides have the same values of these."""
        self.share(sent)
        self._before = dict(self._identities())
        self._sent = frozenset(sent)

    def share(self, names: Iterable[str]) -> None:
        """Look for changes in ``names`` from now on: both sides have the same values."""
        for name in names:
            value = self._namespace.get(name, _GONE)
            if value is not _GONE:
                self._shared[name] = _digest(value)

    def shared(self) -> list[str]:
        """Return the names of which both sides have the same values."""
        return list(self._shared)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Ignore what objects become meanwhile: the notebook has changed them, or a class of theirs."""
        known = {name: digest for name, digest in self._shared.items() if digest is not None}
        same = [name for name in known if _digest(self._namespace.get(name)) == known[name]]
        yield
        self.share(same)

    def end(self, stored: Iterable[str]) -> NameChanges:
        """Return what changed since :meth:`begin`; ``stored``: the names that the cell's code assigns."""
        now, before, start = dict(self._identities()), self._before, self._start
        last = start if self._end is None else self._end
        received = [n for n in before if n in self._sent or start.get(n) != before[n]]
        by_threads = {n for n in start if last.get(n) != start[n]} - {*received}
        stored = {*stored} | by_threads
        assigned = [name for name in now if name in stored or before.get(name) != now[name]]
        deleted = [name for name in last | before if name not in now]
        self._end = now
        for name in (*assigned, *deleted):
            self._shared.pop(name, None)
        return NameChanges(tuple(received), tuple(assigned), *self._changes(), tuple(deleted))

    def skip(self) -> None:
        """Leave out what has changed until now: a cell that could not be loaded has bound some names."""
        self._end = dict(self._identities())

    def _changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names that were changed in place, and those that cannot be compared."""
        # A thread may have deleted one, and so may the cell, of a name that is not a variable.
        values = {name: self._namespace.get(name, _GONE) for name in self._shared}
        self._shared = {n: k for n, k in self._shared.items() if values[n] is not _GONE}
        uncertain = [name for name, known in self._shared.items() if known is None]
        compared = self._shared.keys() - uncertain
        changed = [name for name in compared if _digest(values[name]) != self._shared[name]]
        for name in changed:
            del self._shared[name]
        return tuple(sorted(changed)), tuple(uncertain)

    def _identities(self) -> Iterator[tuple[str, ObjectIdentity]]:
        bound = bound_by_ipython(self._namespace)
        for name, value in list(self._namespace.items()):  # a thread of the user may add some
            if name in bound and bound[name] is value:
                continue
            # A key that is no text is no variable: ``globals()[1] = 2``.
            if type(name) is str and not _is_special(name) and name not in _NOT_THE_USERS:
                yield name, ObjectIdentity(value)


def _is_special(name: str) -> bool:
    """Whether it is a name of Python's own, such as ``__name__``, or one of IPython's, such as ``__``."""
    return name[:2] == name[-2:] == "__"


# ── contents ─────────────────────────────────────────────────────────────────────────────────────


def _digest(value: Any) -> str | None:
    """Return a digest of the contents of a value; None if it is too large, or cannot be pickled."""
    file = DigestFile(_MAX_BYTES)
    return file.digest_of(_ContentPickler(file), value)


class _ContentPickler(Pickler):
    """Reads a value: the memory of arrays and tensors in place; code and modules by identity."""

    cuda_travels_as = "cuda"
    tracks_sharing = False

    def __init__(self, file: DigestFile) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, file.add_buffer)
        self._file = file
        for place in (("torch", "Tensor"), ("torch.nn", "Parameter")):
            if (kind := loaded(*place)) is not None:
                self.handlers[kind] = _reduce_tensor

    def reducer_override(self, obj: Any) -> Any:
        if obj is restore_same:
            return NotImplemented
        if isinstance(obj, _BY_IDENTITY):
            return restore_same, (id(obj),)
        return super().reducer_override(obj)

    def _reduce_storage(self, storage: Any) -> Any:
        if storage.device.type != "cpu":
            self._file.reserve(storage.nbytes())  # before it is copied from the GPU
        return super()._reduce_storage(storage)

    def _memory_of(self, storage: Any) -> tuple[Any, int, int]:
        return bytes_of(storage), 0, storage.nbytes()


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor with its hooks: torch leaves them out, with a warning that a filter may raise."""
    return with_hooks(tensor, NotImplemented)
