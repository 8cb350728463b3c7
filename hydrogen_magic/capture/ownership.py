"""Which side owns a name in a session: whether a cell sends the notebook's value, or uses the ranks'.

Both sides change values between and in cells. A name that one side alone changed has that side's value;
a name that both changed is a conflict, which the user decides. Pure rules; :mod:`.versions` finds out
what the notebook changed, and the ranks report what they did.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hydrogen_magic.core.events import NamesChanged
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization.code_names import names_bound_by

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@dataclass(frozen=True)
class Version:
    """The value of a name in the notebook at one moment."""

    digest: str
    """Equal for equal contents."""
    identity: object = None
    """Equal for the same object."""
    parts: frozenset[int] = frozenset()
    """Numbers of the models, tensors, optimizers and arrays that it consists of."""
    is_code: bool = False
    """It is a function or class: its source is in the notebook, so that replacing it loses nothing."""


@dataclass(frozen=True)
class RanksChange:
    """What the ranks did to a name since both sides had the same value."""

    verb: str
    """``assigned``, ``changed``, or ``may have changed``."""
    where: str
    """Display name of the cell: ``Cell In[5]``."""
    is_import: bool = False
    """An import statement of the cell has assigned it."""

    def of(self, name: str) -> str:
        """Return the change as a clause: ``the ranks changed `model` in Cell In[5]``."""
        return f"the ranks {self.verb} {name} in {self.where}"


@dataclass(frozen=True)
class NameState:
    """A name that ranks have."""

    ranks: frozenset[int]
    """The ranks that have it."""
    version: Version | None
    """The notebook's version when both sides had the same value, or when the ranks assigned theirs.

    None: the notebook had none, or an unknown one.
    """
    change: RanksChange | None = None
    """What the ranks did since; None: nothing."""


@dataclass(frozen=True)
class CellNames:
    """What a cell uses of the notebook."""

    versions: Mapping[str, Version]
    """The names that it uses and the notebook has, as they are now."""
    ranks: frozenset[int]
    """The ranks that run it."""
    push: frozenset[str] = frozenset()
    """Names of ``--push``: the notebook's value wins."""
    out: frozenset[str] = frozenset()
    """Names of ``--out``: the ranks' value wins, and becomes the notebook's."""


class Action(Enum):
    """What happens to a name before a cell runs."""

    SEND = "sent"
    FILL = "sent to ranks that lack it"
    KEEP = "kept"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Decision:
    """What happens to a name, and why."""

    action: Action
    why: str

    def __str__(self) -> str:
        return f"{self.action.value}: {self.why}"


@dataclass(frozen=True)
class SessionUse:
    """What happens to the names that a cell of a session uses."""

    cell: CellNames
    decisions: Mapping[str, Decision]
    before: Mapping[str, Version]
    """The notebook's versions, when the cell begins, of the names that the cell may assign."""
    names: SessionNames
    """The names of the session."""
    where: str = ""
    """Display name of the cell."""
    imported: frozenset[str] = frozenset()
    """Names that the cell itself imports."""

    @property
    def held(self) -> list[str]:
        """The names that all ranks of the cell have."""
        return self.names.held_by(self.cell.ranks)

    def without(self, names: Collection[str]) -> SessionUse:
        """Return it without some names that the cell uses perhaps, and that are not sent."""
        versions = {n: v for n, v in self.cell.versions.items() if n not in names}
        decisions = {n: d for n, d in self.decisions.items() if n not in names}
        return replace(self, cell=replace(self.cell, versions=versions), decisions=decisions)

    def of(self, *actions: Action) -> tuple[str, ...]:
        """Return the names to which one of ``actions`` happens."""
        return tuple(name for name, each in self.decisions.items() if each.action in actions)

    @property
    def unchanged(self) -> list[str]:
        """Names that are not sent, since the ranks have the notebook's value."""
        return [name for name in self.of(Action.KEEP) if self.names.held[name].change is None]

    def check(self) -> None:
        """Raise CaptureError if both sides changed a name."""
        names = self.of(Action.CONFLICT)
        if names:
            lines = [f"`{name}`: {self.decisions[name].why}" for name in names]
            listed = ",".join(names)
            remedy = (
                f"--push {listed} sends the notebook's values; "
                f"--out {listed} keeps those of the ranks and brings them back"
            )
            raise CaptureError("\n".join([*lines, remedy]))


class SessionNames:
    """The names that the ranks of a session have."""

    def __init__(self) -> None:
        self.held: dict[str, NameState] = {}
        self._assigned: set[str] = set()
        """Names that the notebook's cells assigned since both sides had the same value."""
        self._n_cells = 0

    def held_by(self, ranks: frozenset[int]) -> list[str]:
        """Return the names that all of ``ranks`` have."""
        return [name for name, held in self.held.items() if ranks <= held.ranks]

    def is_same_object(self, name: str, identity: object) -> bool:
        """Whether the notebook's object is the one when both sides had the same value."""
        version = self.held[name].version
        return version is not None and version.identity == identity

    def is_outdated(self, name: str, now: Version) -> bool:
        """Whether the ranks have an earlier value of the notebook, which they have not changed."""
        held = self.held.get(name)
        if held is None or held.change is not None:
            return False
        return held.version is None or held.version.digest != now.digest

    def is_own(self, name: str, now: Version) -> bool:
        """Whether the ranks have changed what the notebook imports, other than by an import of their own.

        Not if the notebook has imported or assigned it again.
        """
        held = self.held.get(name)
        if held is None or held.change is None or held.change.is_import:
            return False
        return not self._is_touched(name, held, now)

    # ── what the notebook does ───────────────────────────────────────────────────────────────────

    def note_cells(self, sources: Sequence[str]) -> None:
        """Note what cells assign, possibly the same values again. ``sources``: all cells, in Python."""
        self._assigned.update(_assigned_in(sources[self._n_cells :]))
        self._n_cells = len(sources)

    # ── before a cell ────────────────────────────────────────────────────────────────────────────

    def decide(self, cell: CellNames) -> dict[str, Decision]:
        """Return what happens to each name that the cell uses."""
        found = {name: self._decide(name, cell) for name in cell.versions}
        return {name: self._with_parts(name, found, cell) for name in found}

    def _decide(self, name: str, cell: CellNames) -> Decision:
        now, held = cell.versions[name], self.held.get(name)
        if name in cell.push:
            return Decision(Action.SEND, "--push")
        if held is None:
            return Decision(Action.SEND, "new")
        if held.change is not None:
            return self._decide_changed(name, held, held.change, cell)
        if held.version is None or held.version.digest != now.digest:
            return Decision(Action.SEND, f"{self._notebooks_verb(name, held, now)} in the notebook")
        lacking = _lacking(held, cell)
        return Decision(Action.SEND, lacking) if lacking else Decision(Action.KEEP, "unchanged")

    def _decide_changed(
        self, name: str, held: NameState, change: RanksChange, cell: CellNames
    ) -> Decision:
        """Decide about a name that the ranks changed."""
        now = cell.versions[name]
        if name in cell.out or not self._is_touched(name, held, now):
            lacking = _lacking(held, cell)
            return (
                Decision(Action.FILL, lacking)
                if lacking
                else Decision(Action.KEEP, change.of("it"))
            )
        verb = self._notebooks_verb(name, held, now)
        if now.is_code:
            return Decision(Action.SEND, f"{verb} in the notebook")
        return Decision(Action.CONFLICT, f"{change.of('it')}, and the notebook {verb} it")

    def _with_parts(self, name: str, found: Mapping[str, Decision], cell: CellNames) -> Decision:
        """Return the decision about a name; a conflict if sending it would overwrite another one."""
        mine = cell.versions[name].parts
        if found[name].action is not Action.SEND or not mine:
            return found[name]
        for other, held in self.held.items():
            replaced = other in found and found[other].action is Action.SEND
            parts = held.version.parts if held.version else frozenset()
            if other != name and held.change and not replaced and mine & parts:
                why = f"it shares objects with `{other}`, and {held.change.of(f'`{other}`')}"
                return Decision(Action.CONFLICT, why)
        return found[name]

    def _is_touched(self, name: str, held: NameState, now: Version) -> bool:
        return name in self._assigned or held.version is None or not _is_same(held.version, now)

    def _notebooks_verb(self, name: str, held: NameState, now: Version) -> str:
        is_same = held.version is not None and held.version.identity == now.identity
        return "changed" if is_same and name not in self._assigned else "assigned"

    # ── after the decision, and after the cell ───────────────────────────────────────────────────

    def after_cell(self, use: SessionUse, reports: Mapping[int, NamesChanged]) -> None:
        """Take the ranks' reports at the end of a cell."""
        for rank, report in reports.items():
            self._sent(use, rank, report.received.keys() | report.assigned.keys())
        for rank, report in reports.items():
            self._changed(use, rank, report)

    def _sent(self, use: SessionUse, rank: int, received: Collection[str]) -> None:
        """Note what a rank has received of what was sent."""
        for name, decision in use.decisions.items():
            held = self.held.get(name)
            is_received = name in received
            is_equal = held is not None and held.change is None and rank in held.ranks
            if decision.action is Action.SEND and not is_received:
                continue
            if decision.action is Action.SEND or is_equal:
                self._agree(name, use.cell.versions[name], rank)
            elif held is not None and is_received:
                self.held[name] = replace(held, ranks=held.ranks | {rank})

    def _agree(self, name: str, version: Version, rank: int) -> None:
        """Note that a rank has the notebook's value."""
        held = self.held.get(name)
        is_same = (
            held and held.version and not held.change and held.version.digest == version.digest
        )
        ranks = held.ranks if held and is_same else frozenset[int]()
        self.held[name] = NameState(ranks | {rank}, version)
        self._assigned.discard(name)

    def _changed(self, use: SessionUse, rank: int, report: NamesChanged) -> None:
        where = use.where
        for name in report.assigned:
            known = self.held.get(name)
            ranks = known.ranks if known else frozenset[int]()
            change = RanksChange("assigned", where, name in use.imported)
            version = use.before.get(name, known.version if known else None)
            self.held[name] = NameState(ranks | {rank}, version, change)
            self._assigned.discard(name)
        for name in report.changed:
            self._change(name, RanksChange("changed", where))
        for name in use.cell.versions.keys() & {*report.uncertain}:
            self._change(name, RanksChange("may have changed", where))
        for name in report.deleted:
            if (held := self.held.pop(name, None)) and held.ranks - {rank}:
                self.held[name] = replace(held, ranks=held.ranks - {rank})

    def _change(self, name: str, change: RanksChange) -> None:
        held = self.held.get(name)
        if held is not None and held.change is None:
            self.held[name] = replace(held, change=change)

    def brought_back(self, name: str, version: Version, ranks: frozenset[int]) -> None:
        """Note that ``--out`` has made the value of those ``ranks`` that have one the notebook's."""
        if name in self.held:
            self.held[name] = NameState(ranks & self.held[name].ranks, version)
            self._assigned.discard(name)


def _is_same(one: Version, other: Version) -> bool:
    return one.digest == other.digest and one.identity == other.identity


def _lacking(held: NameState, cell: CellNames) -> str:
    """Return which ranks of the cell lack the name, empty if none does."""
    ranks = ", ".join(map(str, sorted(cell.ranks - held.ranks)))
    return f"ranks without it: {ranks}" if ranks else ""


def _assigned_in(sources: Iterable[str]) -> Iterator[str]:
    """Yield the global names that cells assign."""
    for source in sources:
        try:
            code = compile(source, "<cell>", "exec", _FLAGS, dont_inherit=True)
        except (SyntaxError, ValueError):  # such a cell has not run
            continue
        yield from names_bound_by(code)
