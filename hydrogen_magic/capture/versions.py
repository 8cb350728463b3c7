"""Versions of the notebook's values: whether the notebook has changed one since a session's ranks got it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hydrogen_magic.capture.fingerprint import FingerprintPickler
from hydrogen_magic.capture.imports import Imports
from hydrogen_magic.capture.lines import cell_labels
from hydrogen_magic.capture.ownership import SessionNames, Version
from hydrogen_magic.capture.redefined import name_of_earlier
from hydrogen_magic.capture.required_names import RequiredNames
from hydrogen_magic.serialization.bindings import take_writers
from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.content_digest import DigestFile
from hydrogen_magic.serialization.identity import ObjectIdentity, Originals, is_kind
from hydrogen_magic.serialization.importable import resolve
from hydrogen_magic.serialization.memory_layout import overlap, ranges_of
from hydrogen_magic.serialization.object_paths import Path, paths_to

_NOT_PICKLABLE = ""
"""Digest of a value that cannot be sent: its contents are unknown."""


class VersionReader:
    """Reads the versions of the names that a cell needs, and finds the functions and classes behind them."""

    def __init__(self, needs: RequiredNames, originals: Originals) -> None:
        self._needs = needs
        self._originals = originals

    def read_all(self) -> dict[str, Version]:
        """Return the versions of all needed values.

        The notebook's functions and classes that they consist of become needed, too: with instances, the
        ranks need the present class. So do the names that only pickling finds, before the others.
        """
        needs, found = self._needs, dict[str, Version]()
        first = list(needs.values)
        while missing := needs.values.keys() - found.keys():
            for name in missing:
                found[name], code = self._read(name)
                for used in code - {name}:
                    needs.add(used, f"`{name}` consists of it")
        late = [name for name in needs.values if name not in first]
        needs.values = {name: needs.values[name] for name in (*late, *first)}
        return found

    def read(self, name: str) -> Version:
        """Return the version of one name."""
        return self._read(name)[0]

    def _read(self, name: str) -> tuple[Version, set[str]]:
        """Return the version of one name, and the names of functions and classes that it consists of."""
        value = self._needs.namespace[name]
        file = DigestFile()
        pickler = _VersionPickler(file, self._needs, value, self._originals)
        digest = file.digest_of(pickler, value) or _NOT_PICKLABLE
        parts, is_code = frozenset(pickler.parts), isinstance(value, CODE)
        return Version(digest, ObjectIdentity(value), parts, file.nbytes, is_code), pickler.code


class _VersionPickler(FingerprintPickler):
    """Refers to the notebook's functions and classes by name: they have versions of their own."""

    def __init__(
        self, file: DigestFile, needs: RequiredNames, root: Any, originals: Originals
    ) -> None:
        super().__init__(file, needs)
        self.parts: set[int] = set()
        """Numbers of the models, tensors, optimizers and arrays in the value."""
        self.code: set[str] = set()
        """Names of the notebook's functions and classes in it."""
        self._root = root
        self._numbers = originals

    def release(self) -> None:
        super().release()
        self._root = None

    def reducer_override(self, obj: Any) -> Any:
        number = self._numbers.number(obj)
        if number is not None:
            self.parts.add(number)
        return super().reducer_override(obj)

    def _on_ranks(self, obj: Any) -> Any:
        originals, earlier = self._numbers, None
        if (name := self._notebook_name(obj)) is None:
            name = earlier = name_of_earlier(obj, self.needs.namespace, originals)
        else:
            originals.definitions.add(ObjectIdentity(obj))
        if name is None or self._is_root(name):
            originals.extended |= {ObjectIdentity(obj)} if earlier else set()
            return None
        self.code |= {name} & self.needs.namespace.keys()
        return resolve, ("__main__", obj.__qualname__)

    def _is_root(self, name: str) -> bool:
        """Whether the value is the definition of this name, or an earlier one that another name has."""
        root = self._root
        is_earlier = isinstance(root, CODE) and root.__qualname__ == name
        return is_earlier or self.needs.namespace.get(name) is root


def versions_of(
    names: Iterable[str], namespace: Mapping[str, Any], originals: Originals
) -> dict[str, Version]:
    """Return the versions of the notebook's ``names``."""
    reader = VersionReader(RequiredNames(namespace, Imports(()), cell_labels(namespace)), originals)
    return {name: reader.read(name) for name in names}


def sharing_with(names: SessionNames, out: Collection[str], originals: Originals) -> list[str]:
    """Return other names whose values in the notebook ``--out`` may change with those of ``out``.

    They share objects, or the ranks have changed them and they share memory: a tensor and its array.
    """
    written = ranges_of(map(originals.get, names.parts(out)))
    by_memory = (
        name
        for name in names.changed_others(out)
        if overlap(written, ranges_of(map(originals.get, names.parts([name]))))
    )
    return list(dict.fromkeys([*names.sharing(out), *by_memory]))


def note_brought_back(
    names: SessionNames,
    brought: Sequence[str],
    sharing: Mapping[str, Version],
    namespace: Mapping[str, Any],
    originals: Originals,
    ranks: frozenset[int],
) -> None:
    """Note that ``--out`` has made the values of ``ranks`` those of the notebook.

    ``sharing``: the versions, before that, of other names whose values share objects with them.
    """
    originals.of_ranks |= {ObjectIdentity(code) for code in take_writers().values()}
    n_earlier = len(originals)
    versions = versions_of((*brought, *sharing), namespace, originals)
    for name in brought:
        names.brought_back(name, versions[name], ranks)
        if len(originals) > n_earlier:
            names.match(name, _numbers_in(namespace[name], originals, n_earlier), ranks)
    sent = {part for name in brought for part in versions[name].parts}
    for name, before in sharing.items():
        now, is_whole = versions[name], originals.number(namespace[name]) in sent
        returned = now.parts & sent
        # Names that share memory alone need not share it on the ranks.
        owners = ranks if returned else frozenset[int]()
        names.follow(name, before, now, owners, returned=returned, is_whole=is_whole)


def _numbers_in(value: Any, originals: Originals, first: int) -> dict[Path, int]:
    """Return the numbers, from ``first`` on, of objects that are new in the notebook, by their paths."""
    found = ((path, originals.number(obj)) for path, obj in paths_to(value, is_kind))
    return {path: number for path, number in found if number is not None and number >= first}
