"""Leaves out of a cell's closure what the ranks of its session have already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydrogen_magic.capture.ownership import Action, CellNames, SessionNames, SessionUse
from hydrogen_magic.capture.reachable import reads_of
from hydrogen_magic.capture.required_names import RequiredNames
from hydrogen_magic.capture.versions import VersionReader
from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.identity import ObjectIdentity, Originals
from hydrogen_magic.serialization.pickler import is_main


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
    def held(self) -> list[str]:
        """The names that all of the ranks have."""
        return self.names.held_by(self.ranks)

    def choose(
        self, needs: RequiredNames, is_local: Callable[[str], bool], out: Sequence[str]
    ) -> SessionUse:
        """Decide about the names in ``needs``, and remove those that are not sent."""
        self.names.note_cells(needs.namespace.get("In") or ())
        self._add_definitions(needs)
        reader = VersionReader(needs, is_local, self.originals)
        versions = reader.read_all()
        cell = CellNames(versions, self.ranks, frozenset(self.push), frozenset(out))
        decisions = self.names.decide(cell)
        assigned = [name for name in needs.assigned - versions.keys() if name in needs.namespace]
        before = versions | {name: reader.read(name) for name in assigned}
        use = SessionUse(cell, decisions, before, self.names, self.where)
        for name in use.of(Action.KEEP, Action.CONFLICT):
            del needs.values[name]
        for name in needs.possible.keys() & self.names.held.keys():
            del needs.possible[name]
        return use

    def _add_definitions(self, needs: RequiredNames) -> None:
        """Add functions and classes of the ranks that the notebook has defined again.

        The cell may use them through objects of the ranks. What they read comes with them, unless the ranks
        have it: it is not used by name.
        """
        for name in self.names.held:
            value = needs.namespace.get(name)
            if name in needs.values or not isinstance(value, CODE) or not is_main(value):
                continue
            if not self.names.is_same_object(name, ObjectIdentity(value)):
                needs.values[name] = "defined again"
                for use in reads_of(value, needs.namespace):
                    read = use.read.name
                    if read in self.names.held or read not in needs.namespace:
                        needs.ignore(read)
                    elif not use.read.is_text:
                        needs.add(read, f"used by {use.function}")

    def code_on_ranks(self, use: SessionUse) -> frozenset[str]:
        """Return the functions and classes that the ranks have."""
        versions = use.cell.versions
        return frozenset(name for name in use.of(Action.KEEP) if versions[name].is_code)
