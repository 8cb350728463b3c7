"""Leaves out of a cell's closure what the ranks of its session have already."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydrogen_magic.capture.imports import input_cells
from hydrogen_magic.capture.ownership import (
    Action,
    CellNames,
    SessionNames,
    SessionUse,
    Version,
)
from hydrogen_magic.capture.reachable import FunctionRead, reads_of
from hydrogen_magic.capture.required_names import RequiredNames
from hydrogen_magic.capture.versions import VersionReader
from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.identity import ObjectIdentity, Originals
from hydrogen_magic.serialization.importable import is_main
from hydrogen_magic.serialization.instances import ATOMS

_MAX_BYTES = 4 << 20
"""A larger value that a cell perhaps uses is read only if it may be another object: a list of this size takes
20 ms."""


@dataclass(frozen=True)
class SessionCapture:
    """The session for whose ranks a cell is captured."""

    names: SessionNames
    originals: Originals
    """Numbers of the notebook's objects for all cells of the session."""
    ranks: frozenset[int]
    """The ranks that run the cell."""
    push: tuple[str, ...] = ()
    """Names whose value in the notebook replaces that of the ranks."""
    where: str = ""
    """Display name of the cell."""

    @property
    def on_ranks(self) -> list[str]:
        """The names that all of the ranks have."""
        return self.names.held_by(self.ranks)

    def choose(self, needs: RequiredNames, out: Sequence[str]) -> SessionUse:
        """Decide about the names in ``needs``, and remove those that are not sent."""
        self.names.note_cells(input_cells(needs.namespace))
        self._add_definitions(needs)
        reader = VersionReader(needs, self.originals)
        for name in {statement.name for statement, _ in needs.statements.values()}:
            if self._may_be_own(name) and self.names.is_own(name, reader.read(name), self.ranks):
                needs.send_imported(name)
        versions = reader.read_all()
        self._add_read_by_definitions(needs)
        assigned = [name for name in needs.assigned if name in needs.namespace]
        before = versions | {
            name: reader.read(name) for name in {*assigned, *needs.possible} - versions.keys()
        }
        self._add_outdated(needs, {name: before[name] for name in assigned})
        versions |= {name: before[name] for name in needs.possible}
        cell = CellNames(versions, self.ranks, frozenset(self.push), frozenset(out))
        decisions = self.names.decide(cell)
        use = SessionUse(cell, decisions, before, self.names, self.where, needs.imported)
        within, left = self._within(use, needs)
        use = replace(use, within=within, left=left)
        perhaps = needs.possible.keys() - needs.values.keys()
        for name in use.of(Action.KEEP, Action.CONFLICT):
            needs.values.pop(name, None)
            needs.possible.pop(name, None)
        return use.without([name for name in perhaps if _is_kept(name, use, needs)])

    def _may_be_own(self, name: str) -> bool:
        """Whether a rank has given a name that the notebook imports another value."""
        changes = self.names.changes(name, self.ranks) if name in self.names.held else []
        return not all(change.is_import for change in changes)

    def _add_outdated(self, needs: RequiredNames, assigned: Mapping[str, Version]) -> None:
        """Add the names that the cell may assign and of which the notebook has a newer value than the ranks.

        A cell that does not reach the assignment leaves the value that it found, which is the ranks' then.
        """
        for name, version in assigned.items():
            if name not in needs.values and self.names.is_outdated(name, version, self.ranks):
                needs.possible.setdefault(name, "the cell may not reach its assignment")

    def _add_definitions(self, needs: RequiredNames) -> None:
        """Add functions and classes of the ranks that the notebook has defined again.

        The cell may use them through objects of the ranks.
        """
        for name in self.names.held:
            value = needs.namespace.get(name)
            if name in needs.values or not isinstance(value, CODE) or not is_main(value):
                continue
            if not self.names.is_same_object(name, ObjectIdentity(value), self.ranks):
                needs.replace_on_ranks(name, self.names.held)

    def _add_read_by_definitions(self, needs: RequiredNames) -> None:
        """Add values that functions and classes of the ranks read, and that the notebook alone has changed.

        The cell may call them through objects of the ranks, which only the ranks know: a conflict about such
        a name is no reason to refuse it.
        """
        if not needs.only_on_ranks and not any(
            self.names.changes(n, self.ranks) for n in needs.values
        ):
            return
        reader = VersionReader(needs.copy(), self.originals)
        uses = {use.read.name: use for name in self.names.held for use in self._reads(name, needs)}
        for name in uses.keys() - needs.values.keys() - needs.possible.keys():
            if name in needs.namespace and self._is_newer(name, needs.namespace[name], reader):
                needs.possible[name] = f"used by {uses[name].function}"

    def _within(
        self, use: SessionUse, needs: RequiredNames
    ) -> tuple[dict[str, Version], list[str]]:
        """Return what :attr:`SessionUse.within` and :attr:`SessionUse.left` are."""
        versions, reader = use.cell.versions, VersionReader(needs.copy(), self.originals)
        sent = {part for name in use.of(Action.SEND, Action.FILL) for part in versions[name].parts}
        others = self.names.held.keys() & needs.namespace.keys() - versions.keys() if sent else ()
        within, left = dict[str, Version](), list[str]()
        for name in others:
            value = needs.namespace[name]
            if not self.names.is_same_object(name, ObjectIdentity(value), self.ranks):
                left += [] if sent.isdisjoint(self.names.parts([name])) else [name]
            elif self.originals.number(value) in sent:
                within[name] = reader.read(name)
        return within, left

    def _reads(self, name: str, needs: RequiredNames) -> Sequence[FunctionRead]:
        """Return what a function or class of the notebook reads."""
        value = needs.namespace.get(name)
        if not isinstance(value, CODE) or not is_main(value):
            return ()
        identity = ObjectIdentity(value)
        known = self.names.reads.get(name)
        if known is None or known[0] != identity:  # it takes a tenth of a millisecond
            known = self.names.reads[name] = identity, tuple(reads_of(value, needs.namespace))
        return known[1]

    def _is_newer(self, name: str, value: Any, reader: VersionReader) -> bool:
        """Whether the notebook alone has changed a value since the ranks got it."""
        if _is_definition(value):
            return False
        # An immutable object that is the same one has not changed, and is not read.
        max_bytes = 0 if type(value) in ATOMS else _MAX_BYTES
        if not self.names.may_differ(name, ObjectIdentity(value), self.ranks, max_bytes):
            return False
        version = reader.read(name)
        decision = self.names.decide(CellNames({name: version}, self.ranks))[name]
        is_outdated = self.names.is_outdated(name, version, self.ranks)
        return is_outdated and decision.action is not Action.CONFLICT

    def code_on_ranks(self, use: SessionUse, namespace: Collection[str]) -> frozenset[str]:
        """Return the functions and classes that the ranks have, and names that only they have."""
        versions = use.cell.versions
        kept = (name for name in use.of(Action.KEEP) if versions[name].is_code)
        return frozenset((*kept, *(name for name in self.on_ranks if name not in namespace)))

    def values_on_ranks(self, use: SessionUse, needs: RequiredNames) -> Callable[[Any], str | None]:
        """Return what finds the name of an object that the ranks have under it, with the same contents."""
        names = {}
        for name in self.on_ranks:
            value = needs.namespace.get(name)
            if issubclass(type(value), _OTHERS) or not name.isidentifier():
                continue
            if self.originals.number(value) is None:  # the ranks know numbered ones anyway
                names[id(value)] = name
        reader = VersionReader(needs.copy(), self.originals)

        @functools.cache
        def is_equal(name: str) -> bool:
            if name in use.decisions:
                return name in use.unchanged
            cell = CellNames({name: reader.read(name)}, self.ranks)
            return name in replace(use, cell=cell, decisions=self.names.decide(cell)).unchanged

        def find(obj: Any) -> str | None:
            name = names.get(id(obj))
            return name if name is not None and is_equal(name) else None

        return find


_OTHERS = (*CODE, types.ModuleType, *ATOMS)
"""Types whose objects are referred to otherwise, or have no identity that counts."""


def _is_definition(value: Any) -> bool:
    """Whether it is code, which is defined again to change it: no class of values alone (``CFG.lr``)."""
    if not isinstance(value, type):
        return isinstance(value, CODE)
    return any(isinstance(each, CODE) for each in vars(value).values())


def _is_kept(name: str, use: SessionUse, needs: RequiredNames) -> bool:
    """Whether the ranks keep their value of a name that is perhaps read.

    If the cell may assign it as well, a conflict is no reason to refuse the cell.
    """
    action = use.decisions[name].action
    return action is Action.KEEP or (action is Action.CONFLICT and name in needs.assigned)
