"""Digests of captured values, which tell whether another kernel captures the same ones.

Equal values have equal digests: unlike a pickle, a digest does not depend on file names and line numbers of
code, nor on the order of sets.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
import types
from typing import Any

from hydrogen_magic.capture.class_statements import ClassStatement
from hydrogen_magic.capture.pickler import CapturePickler
from hydrogen_magic.capture.required_names import RequiredNames
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.content_digest import DigestFile
from hydrogen_magic.serialization.instances import ATOMS
from hydrogen_magic.serialization.memory_layout import bytes_of

_OF_POSITION = ("__firstlineno__", "__static_attributes__")
"""Attributes of a class that depend on its place in the cell, or on the hash seed."""
_OF_USE = ("__slotnames__", "__annotations_cache__", "__signature__")
"""Attributes that appear or change when an instance is copied, or annotations or the signature are read."""


def digest_of(value: Any, needs: RequiredNames) -> str:
    """Return the digest of a value that ``needs`` can pickle."""
    if is_plain(value):  # most are; any pickler writes the same
        return hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).hexdigest()
    file = DigestFile()
    found = file.digest_of(FingerprintPickler(file, needs), value)
    return secrets.token_hex() if found is None else found  # one that equals no other


class FingerprintPickler(CapturePickler):
    """Writes a stream in which equal values have equal bytes."""

    tracks_sharing = False

    def __init__(self, file: DigestFile, needs: RequiredNames) -> None:
        super().__init__(
            file, pickle.HIGHEST_PROTOCOL, file.add_buffer, needs=needs, ranks_have_gpu=True
        )

    # Arrays, frames and storages count by their contents: which of them share memory, and at which offset
    # of a cache line they begin, differs from kernel to kernel.

    def _reduce_array(self, array: Any) -> Any:
        return NotImplemented

    def _memory_of(self, storage: Any) -> tuple[Any, int, int]:
        return bytes_of(storage), 0, storage.nbytes()

    def persistent_id(self, obj: Any) -> Any:
        """Pickle's hook: return what is pickled in place of ``obj``, None for itself."""
        kind = type(obj)
        if (kind is set or kind is frozenset) and all(type(each) in ATOMS for each in obj):
            # Different values of these types have different texts; other sets are pickled in their own order.
            return kind.__name__, sorted(map(repr, obj))
        return _code_text(obj) if kind is types.CodeType else None

    def _reduce_class(self, cls: type, reduced: Any) -> Any:
        attributes = reduced[2][0]
        for name in (*_OF_POSITION, *_OF_USE):
            attributes.pop(name, None)
        if not attributes.get("__annotations__", True):  # there are none, and they have been read
            del attributes["__annotations__"]
        return super()._reduce_class(cls, reduced)

    def _names_of(self, statement: ClassStatement) -> dict[str, Any]:
        super()._names_of(statement)  # it requests them: they have digests of their own
        return {}


def _code_text(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a code object does, without its place."""
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags
    handlers = getattr(code, "co_exceptiontable", b"")
    return "code", code.co_code, code.co_consts, names, counts, handlers
