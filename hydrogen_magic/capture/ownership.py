"""Which side owns a name in a session: whether a cell sends the notebook's value, or uses the ranks'.

Both sides change values between and in cells. A name that one side alone changed has that side's value;
a name that both changed is a conflict, which the user decides. Pure rules; :mod:`.versions` finds out
what the notebook changed, and the ranks report what they did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

from hydrogen_magic.capture.modules import ModuleFile
from hydrogen_magic.capture.scopes import assigned_in
from hydrogen_magic.capture.sent_modules import SentModules
from hydrogen_magic.core.events import NamesChanged
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization.object_paths import Path

if TYPE_CHECKING:
    from hydrogen_magic.capture.reachable import FunctionRead


@dataclass(frozen=True)
class Version:
    """The value of a name in the notebook at one moment."""

    digest: str
    """Equal for equal contents."""
    identity: object = None
    """Equal for the same object."""
    parts: frozenset[int] = frozenset()
    """Numbers of the models, tensors, optimizers and arrays that it consists of."""
    nbytes: int = 0
    """Size of its contents."""
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
    """A name that a rank has."""

    version: Version | None
    """The notebook's version when both sides had the same value, or when the rank assigned its own.

    None: the notebook had none, or an unknown one.
    """
    change: RanksChange | None = None
    """What the rank did since; None: nothing."""
    is_assigned: bool = False
    """The notebook's cells assigned it since, possibly the same value again."""
    returned: frozenset[int] = frozenset()
    """Parts of it that ``--out`` has brought back since the change, within other names."""

    def is_outdated(self, now: Version) -> bool:
        """Whether the rank has an earlier value of the notebook, which it has not changed."""
        return self.change is None and (self.version is None or self.version.digest != now.digest)

    def is_touched(self, now: Version) -> bool:
        """Whether the notebook has changed or assigned it."""
        return self.is_assigned or self.version is None or not _is_same(self.version, now)

    def notebooks_verb(self, now: Version) -> str:
        """Return what the notebook did to it."""
        is_same = self.version is not None and self.version.identity == now.identity
        return "changed" if is_same and not self.is_assigned else "assigned"


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
    FILL = "sent to some ranks"
    KEEP = "kept"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Decision:
    """What happens to a name, and why."""

    action: Action
    why: str
    ranks: frozenset[int] = frozenset()
    """The ranks that take the notebook's value; the others of the cell keep their own."""
    shared_with: tuple[str, ...] = ()
    """Conflict: the names whose objects, which the ranks changed, it would overwrite."""

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
    files: Mapping[str, ModuleFile] = field(default_factory=dict)
    """Those of the local modules that it sends."""
    within: Mapping[str, Version] = field(default_factory=dict)
    """The notebook's versions of other names, whose values are parts of what it sends."""
    left: Collection[str] = ()
    """Other names that have got another value in the notebook, and whose earlier one it sends."""

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
        kept, ranks = self.of(Action.KEEP), self.cell.ranks
        return [name for name in kept if not self.names.changes(name, ranks)]

    def check(self) -> None:
        """Raise CaptureError if both sides changed a name."""
        names = self.of(Action.CONFLICT)
        if names:
            lines = [f"`{name}`: {self.decisions[name].why}" for name in names]
            raise CaptureError("\n".join([*lines, self._ways_out(names)]))

    def _ways_out(self, names: Sequence[str]) -> str:
        shared = {name: self.decisions[name].shared_with for name in names}
        others = dict.fromkeys(chain.from_iterable(shared.values()))
        own = [name for name in names if not shared[name]]
        ways = [f"--push {','.join({**shared, **others})} sends the notebook's values"]
        if own:
            ways.append(f"--out {','.join(own)} keeps those of the ranks and brings them back")
        if others:
            users = ", ".join(f"`{name}`" for name in names if shared[name])
            ways.append(
                f"to keep those of the ranks, bring them back first, by a cell with --out {','.join(others)} "
                f"that does not use {users}; what they share in the notebook is overwritten"
            )
        return "; ".join(ways)


class SessionNames:
    """The names that the ranks of a session have."""

    def __init__(self) -> None:
        self.held: dict[str, dict[int, NameState]] = {}
        """By name and rank."""
        self.reads: dict[str, tuple[object, Sequence[FunctionRead]]] = {}
        """What the notebook's functions and classes read, and which object that holds for, by name."""
        self.modules = SentModules()
        """The local modules that the ranks have."""
        self._matched: dict[int, dict[str, dict[Path, int]]] = {}
        """See :attr:`SessionSends.matched`, by rank: what the rank has not been sent yet."""
        self._n_cells = 0

    def held_by(self, ranks: frozenset[int]) -> list[str]:
        """Return the names that all of ``ranks`` have."""
        return [name for name, held in self.held.items() if ranks <= held.keys()]

    def states(self, name: str, ranks: Collection[int]) -> dict[int, NameState]:
        """Return the states of a name on those of ``ranks`` that have it, by rank."""
        held = self.held.get(name, {})
        return {rank: held[rank] for rank in sorted(held.keys() & ranks)}

    def changes(self, name: str, ranks: Collection[int]) -> list[RanksChange]:
        """Return what ``ranks`` did to a name."""
        return [one.change for one in self.states(name, ranks).values() if one.change]

    def is_same_object(self, name: str, identity: object, ranks: Collection[int]) -> bool:
        """Whether the notebook's object is the one when it and ``ranks`` had the same value."""
        states = self.states(name, ranks).values()
        return all(one.version and one.version.identity == identity for one in states)

    def may_differ(
        self, name: str, identity: object, ranks: Collection[int], max_bytes: int
    ) -> bool:
        """Whether the notebook's value may differ from one that ``ranks`` have got and not changed.

        ``max_bytes``: an object that is larger counts as unchanged as long as it is the same one.
        """
        return any(
            one.version is None
            or one.is_assigned
            or one.version.nbytes <= max_bytes
            or one.version.identity != identity
            for one in self.states(name, ranks).values()
            if one.change is None
        )

    def is_outdated(self, name: str, now: Version, ranks: Collection[int]) -> bool:
        """Whether one of ``ranks`` has an earlier value of the notebook, which it has not changed."""
        return any(one.is_outdated(now) for one in self.states(name, ranks).values())

    def is_own(self, name: str, now: Version, ranks: Collection[int]) -> bool:
        """Whether one of ``ranks`` has changed what the notebook imports, other than by its own import.

        Not if the notebook has imported or assigned it again.
        """
        return any(
            one.change and not one.change.is_import and not one.is_touched(now)
            for one in self.states(name, ranks).values()
        )

    # ── what the notebook does ───────────────────────────────────────────────────────────────────

    def note_cells(self, sources: Sequence[str]) -> None:
        """Note what cells assign, possibly the same values again. ``sources``: all cells, in Python."""
        for name in {*assigned_in(sources[self._n_cells :])} & self.held.keys():
            for rank, state in self.held[name].items():
                self.held[name][rank] = replace(state, is_assigned=True)
        self._n_cells = len(sources)

    # ── before a cell ────────────────────────────────────────────────────────────────────────────

    def decide(self, cell: CellNames) -> dict[str, Decision]:
        """Return what happens to each name that the cell uses."""
        found = {name: self._decide(name, cell) for name in cell.versions}
        sent = {n for n, each in found.items() if each.action in (Action.SEND, Action.FILL)}
        parts = {part for name in sent for part in cell.versions[name].parts}
        for name in found.keys() - sent:
            earlier = self.parts([name]) - cell.versions[name].parts
            if not earlier.isdisjoint(parts) and not self.changes(name, cell.ranks):
                found[name] = Decision(Action.SEND, "assigned in the notebook", cell.ranks)
        return {name: self._with_parts(name, found, cell) for name in found}

    def _decide(self, name: str, cell: CellNames) -> Decision:
        now, states = cell.versions[name], self.states(name, cell.ranks)
        if name in cell.push:
            return Decision(Action.SEND, "--push", cell.ranks)
        if name not in self.held:
            return Decision(Action.SEND, "new", cell.ranks)
        changed = {rank: one.change for rank, one in states.items() if one.change}
        both = {rank for rank in changed if name not in cell.out and states[rank].is_touched(now)}
        if both and not now.is_code:
            rank = min(both)
            verb = states[rank].notebooks_verb(now)
            why = f"{changed[rank].of('it')}, and the notebook {verb} it"
            return Decision(Action.CONFLICT, why)
        keeping = changed.keys() - both
        lacking = cell.ranks - states.keys()
        outdated = {rank for rank, one in states.items() if rank in both or one.is_outdated(now)}
        if not lacking and not outdated:
            why = next((change.of("it") for change in changed.values()), "unchanged")
            return Decision(Action.KEEP, why)
        if keeping:
            why = _listed({"without it": lacking, "with an earlier value": outdated})
            return Decision(Action.FILL, why, lacking | outdated)
        if outdated:
            verb = states[min(outdated)].notebooks_verb(now)
            return Decision(Action.SEND, f"{verb} in the notebook", cell.ranks)
        return Decision(Action.SEND, _listed({"without it": lacking}), cell.ranks)

    def _with_parts(self, name: str, found: Mapping[str, Decision], cell: CellNames) -> Decision:
        """Return the decision about a name; a conflict if sending it would overwrite another one."""
        mine, nothing = cell.versions[name].parts, Decision(Action.KEEP, "")
        if not mine:
            return found[name]
        overwritten = dict[str, RanksChange]()
        for other in filter(name.__ne__, self.held):
            ranks = found[name].ranks - found.get(other, nothing).ranks
            for state in self.states(other, ranks).values():
                theirs = state.version.parts - state.returned if state.version else set[int]()
                if state.change and mine & theirs:
                    overwritten[other] = state.change
        if not overwritten:
            return found[name]
        others = tuple(sorted(overwritten))
        what = overwritten[others[0]].of(f"`{others[0]}`")
        why = f"it shares objects with `{others[0]}`, and {what}"
        return Decision(Action.CONFLICT, why, shared_with=others)

    # ── after the decision, and after the cell ───────────────────────────────────────────────────

    def after_cell(self, use: SessionUse, reports: Mapping[int, NamesChanged]) -> None:
        """Take the ranks' reports at the end of a cell."""
        for rank, report in reports.items():
            self._matched.pop(rank, None)
            self._sent(use, rank, report.received.keys() | report.assigned.keys())
        for rank, report in reports.items():
            self._changed(use, rank, report)

    def _sent(self, use: SessionUse, rank: int, received: Collection[str]) -> None:
        """Note what a rank has received of what was sent, and what it had already."""
        for name, version in use.cell.versions.items():
            decision = use.decisions[name]
            state = self.states(name, {rank}).get(rank)
            is_taken = rank in decision.ranks and name in received
            is_kept = rank not in decision.ranks and state is not None and state.change is None
            if is_taken or is_kept:
                self._set(name, rank, NameState(version))
        for name in use.within.keys() & received:
            if not self.changes(name, {rank}):
                self._set(name, rank, NameState(use.within[name]))
        for name in use.left:
            if name in self.held and not self.changes(name, {rank}):
                self._set(name, rank, NameState(None))

    def _set(self, name: str, rank: int, state: NameState) -> None:
        self.held.setdefault(name, {})[rank] = state

    def _changed(self, use: SessionUse, rank: int, report: NamesChanged) -> None:
        where = use.where
        for name in report.assigned:
            known = self.states(name, {rank}).get(rank)
            change = RanksChange("assigned", where, name in use.imported)
            version = use.before.get(name, known.version if known else None)
            self._set(name, rank, NameState(version, change))
        for name in report.changed:
            self._change(name, rank, RanksChange("changed", where))
        for name in report.uncertain:  # the cell may have changed it by another name, such as DDP's
            self._change(name, rank, RanksChange("may have changed", where))
        for name in report.deleted:
            self.held.get(name, {}).pop(rank, None)
            if not self.held.get(name):
                self.held.pop(name, None)

    def _change(self, name: str, rank: int, change: RanksChange) -> None:
        state = self.states(name, {rank}).get(rank)
        if state is not None:
            changed = replace(state, change=state.change or change, returned=frozenset())
            self._set(name, rank, changed)

    def brought_back(self, name: str, version: Version, ranks: frozenset[int]) -> None:
        """Note that ``--out`` has made the value of those ``ranks`` that have one the notebook's.

        Other ranks that changed theirs keep it: the user has not changed the notebook's value since.
        """
        for rank, state in self.held.get(name, {}).items():
            if rank in ranks:
                self._set(name, rank, NameState(version))
            elif state.change is not None:
                self._set(name, rank, NameState(version, state.change))

    def match(self, name: str, numbers: Mapping[Path, int], ranks: frozenset[int]) -> None:
        """Note which objects of ``ranks`` have new copies in the notebook, for the next cell."""
        for rank in ranks:
            self._matched.setdefault(rank, {}).setdefault(name, {}).update(numbers)

    def matched(self, ranks: frozenset[int]) -> dict[str, dict[Path, int]]:
        """Return what :meth:`match` has noted and some of ``ranks`` have not been sent."""
        found: dict[str, dict[Path, int]] = {}
        for rank in ranks:
            for name, numbers in self._matched.get(rank, {}).items():
                found.setdefault(name, {}).update(numbers)
        return found

    def sharing(self, names: Collection[str]) -> list[str]:
        """Return other names whose values in the notebook share objects with those of ``names``."""
        parts = self.parts(names)
        others = (name for name in self.held if name not in names)
        return [name for name in others if not parts.isdisjoint(self.parts([name]))]

    def parts(self, names: Iterable[str]) -> set[int]:
        """Return the numbers of the models, tensors, optimizers and arrays in values of the notebook."""
        states = chain.from_iterable(self.held.get(name, {}).values() for name in names)
        return {part for state in states if state.version for part in state.version.parts}

    def changed_others(self, names: Collection[str]) -> list[str]:
        """Return the names that some rank has changed, without ``names``."""
        others = (name for name in self.held if name not in names)
        return [name for name in others if self.changes(name, self.held[name])]

    def follow(
        self,
        name: str,
        before: Version,
        now: Version,
        ranks: frozenset[int],
        *,
        returned: frozenset[int],
        is_whole: bool,
    ) -> None:
        """Note that ``--out`` has changed the notebook's value of ``name`` from ``before`` to ``now``.

        It shares objects with the values that ``ranks`` have sent: the user has not changed it.
        ``returned``: the parts of it that came back. ``is_whole``: it is one of them itself.
        """
        for rank, state in self.held.get(name, {}).items():
            if state.is_touched(before) or not (state.change or rank in ranks):
                continue
            if rank not in ranks or (state.change and state.change.verb == "assigned"):
                self._set(name, rank, replace(state, version=now))
            elif is_whole:
                self._set(name, rank, NameState(now))
            else:
                known = replace(state, version=now, returned=state.returned | returned)
                self._set(name, rank, known)


def _is_same(one: Version, other: Version) -> bool:
    return one.digest == other.digest and one.identity == other.identity


def _listed(found: Mapping[str, Collection[int]]) -> str:
    """Return groups of ranks as text, those that are not empty."""
    groups = [
        f"ranks {which}: {', '.join(map(str, sorted(ranks)))}"
        for which, ranks in found.items()
        if ranks
    ]
    return "; ".join(groups)
