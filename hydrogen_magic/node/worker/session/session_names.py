"""What a rank of a session keeps of the notebook from cell to cell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from hydrogen_magic.core import processes
from hydrogen_magic.core.events import NamesChanged
from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.node.worker.module_importer import SessionFinder
from hydrogen_magic.node.worker.results.result_pickler import DATA_PARALLEL, ResultPickler
from hydrogen_magic.node.worker.session import redefinition
from hydrogen_magic.node.worker.session.group_recovery import ProcessGroups
from hydrogen_magic.node.worker.session.held_names import describe, gpu_memory_bytes, is_code
from hydrogen_magic.node.worker.session.name_watch import NameChanges, NameWatch
from hydrogen_magic.node.worker.session.session_loop import SessionLoop
from hydrogen_magic.node.worker.settings import NotebookSettings
from hydrogen_magic.serialization.bindings import take_writers
from hydrogen_magic.serialization.closure import ClosureManifest, SessionSends
from hydrogen_magic.serialization.identity import RankObjects, updating
from hydrogen_magic.serialization.library_objects.weak_references import take_referents
from hydrogen_magic.serialization.object_paths import objects_at
from hydrogen_magic.serialization.stale_references import near, parts_of, stale_references


class RankNames:
    """The names of a rank, and which of its objects are the notebook's."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.objects = RankObjects(weakref.WeakValueDictionary())
        self.settings = NotebookSettings()
        self.loop = SessionLoop()
        self._shared_code: dict[str, Any] = {}
        """Functions and classes that the notebook also has, by name."""
        self._namespace = namespace
        self._watch = NameWatch(namespace)
        self.finder = SessionFinder(self._watch.following)
        self._code: dict[str, Any] = {}
        """Functions and classes when the cell began."""
        self._cell: ClosureManifest | None = None
        """The cell that runs."""
        self._rank = 0
        self._stored: frozenset[str] = frozenset()
        self._common: set[str] = set()
        """Names that came from the notebook, or went to it."""
        self._received: list[str] = []
        """Names that the closure has bound."""
        self._updated: list[str] = []
        """Names whose own object the closure has updated, as a part of another value or by itself."""
        self._referents: dict[str, list[Any]] = {}
        """By name: objects to which it refers weakly, or another name that came with it."""
        self.are_results_sent = False
        """The notebook gets the values of ``--out``."""

    def start(self, rank: int) -> None:
        """A new cell has come, which runs as ``rank``."""
        self._rank = rank
        self._cell, self.are_results_sent = None, False
        self._received, self._updated = [], []
        self._watch.start()

    def match(self, sends: SessionSends) -> None:
        """Note which objects of the rank the notebook has got copies of."""
        for name, numbers in sends.matched.items():
            found = objects_at(_unwrapped(self._namespace.get(name)), numbers)
            self.objects.match({numbers[path]: obj for path, obj in found})

    def receive(
        self,
        read: Callable[[Callable[[str], None]], Iterator[tuple[str, Any]]],
        sends: SessionSends,
    ) -> list[str]:
        """Bind the names that a cell has brought; return warnings.

        ``read``: unpickles them, and calls its argument with each name before its value. The rank's copies
        of the notebook's objects are updated in place, after their classes. Those in a name that is sent to
        other ranks alone keep their contents, and so do those in a setting that is not applied again.
        """
        before = dict(self._namespace)
        self._received = []
        try:
            return self._bind(read, sends)
        except BaseException:  # unpickling runs the classes' own code
            self._take_back(before)
            raise
        finally:
            self._shared_code |= take_writers()

    def _bind(
        self,
        read: Callable[[Callable[[str], None]], Iterator[tuple[str, Any]]],
        sends: SessionSends,
    ) -> list[str]:
        warnings, received = list[str](), self._received
        kept = sends.kept_by(self._rank)

        def is_applied(label: str) -> bool:
            return self.settings.is_applied(label, sends.settings.get(label))

        earlier, replaced = dict[str, Any](), dict[str, dict[int, Any]]()
        all_referents, referents = list[Any](), dict[str, list[Any]]()

        def follow() -> None:
            warnings.extend(self._replace(earlier))
            earlier.clear()

        def prepare(name: str) -> None:
            if not is_code(self._namespace.get(name)):
                follow()  # objects are updated only by those of the same class
            updates.keep(name in kept or is_applied(name))

        following = ExitStack()
        watch = partial(following.enter_context, self._watch.following())
        with following, updating(self.objects, watch) as updates:
            for name, value in read(prepare):
                taken = take_referents()
                all_referents += taken  # the values of later names may share them
                if name in kept:
                    continue
                referents[name] = taken if is_code(value) else all_referents
                received.append(name)
                if name in self._namespace:
                    old = self._namespace[name]
                    if _unwrapped(old) is value:  # the notebook has it without the wrapper
                        value = old
                    earlier.update({name: old} if is_code(value) else {})
                    replaced |= {name: parts_of(old)} if old is not value else {}
                self._namespace[name] = value
        follow()
        known = self._watch.shared()
        self._updated = [n for n in known if updates.is_updated(self._namespace.get(n))]
        stale = stale_references(replaced, received, self._namespace)
        self._referents |= referents
        return warnings + [_stale_text(name, users) for name, users in stale.items()]

    def _take_back(self, before: Mapping[str, Any]) -> None:
        """Give names their values ``before`` a cell that could not be loaded: objects were not updated.

        Functions and classes stay, since instances may have followed them.
        """
        bound = [name for name in self._received if name in self._namespace]
        self._received = [name for name in bound if is_code(self._namespace[name])]
        for name in {*bound} - {*self._received}:
            if name in before:
                self._namespace[name] = before[name]
            else:
                del self._namespace[name]
        code = {name: before[name] for name in self._received if name in before}
        self._replace(code)

    def _replace(self, earlier: Mapping[str, Any]) -> list[str]:
        """Let objects follow the definitions that replace ``earlier`` ones, which is no change of a value."""
        if all(self._namespace.get(name) is value for name, value in earlier.items()):
            return []
        with self._watch.following():
            return redefinition.replace(earlier, self._namespace)

    def begin(self, cell: ClosureManifest) -> None:
        """Look at the names before the cell runs."""
        self._cell, self._stored = cell, frozenset()
        sent = cell.session.taken_by(self._rank) if cell.session else ()
        self._watch.begin({*sent, *self._updated})
        self._code = {n: v for n, v in list(self._namespace.items()) if is_code(v)}

    def complete(self, stored: Iterable[str]) -> None:
        """The cell has run to its end; ``stored``: the names that its code assigns.

        One that fails may not have reached an assignment. Then a name is assigned if it refers to another
        object, and an object that stays is compared.
        """
        self._stored = frozenset(stored)

    def end(self) -> tuple[NameChanges, list[str]]:
        """Return what the cell has done, and warnings. Its definitions replace earlier ones."""
        if self._cell is None:  # it could not be loaded
            self._watch.skip()
            self._watch.share(self._received)
            return NameChanges(received=tuple(self._received)), []
        warnings = self._replace(self._code)
        found = self._watch.end(self._stored)
        if self.are_results_sent:  # otherwise reading them would delay a stop
            self._watch.share(self._cell.out)
            self._common |= {*self._cell.out}
        self._common |= {*found.received}
        if not self._common.isdisjoint(found.deleted):
            self._common -= {*found.deleted}
            self._forget_deleted()
        return found, warnings

    def _forget_deleted(self) -> None:
        """Forget which objects of the rank's own names are the notebook's, unless common names have them.

        After ``net = model; del model`` the notebook's ``model`` is a new one, which must not overwrite
        ``net``.
        """
        numbered = self.objects.numbered()
        own, common = list[Any](), list[Any]()
        for name, value in list(self._namespace.items()):
            (common if name in self._common else own).append(value)
        for found in near(own, numbered) - near(common, numbered):
            number, _ = numbered[found]
            self.objects.forget(number)

    def report(
        self,
        at_s: float,
        rank: int,
        groups: ProcessGroups,
        n_collectives: int,
        warn: Callable[[str], None],
    ) -> NamesChanged:
        """Return the rank's report at the end of the cell; ``n_collectives``: those of the cell."""
        namespace = self._namespace
        did, warnings = self.end()
        for text in warnings:
            warn(text)
        return NamesChanged(
            at_s,
            rank,
            received=_described(namespace, did.received),
            assigned=_described(namespace, did.assigned),
            deleted=did.deleted,
            changed=did.changed,
            uncertain=did.uncertain,
            rss_bytes=processes.own_rss_bytes(),
            gpu_memory_bytes=gpu_memory_bytes(),
            n_collectives=n_collectives,
            has_left_groups=groups.are_released,
            is_joined=groups.is_joined(),
        )

    def result_pickler(self, *args: Any) -> ResultPickler:
        """Return a pickler for results, which update the notebook's objects."""
        return ResultPickler(*args, shared=self._shared_code, originals=self.objects.numbered())


def _described(namespace: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the descriptions of the names that are there: threads of the user may delete some meanwhile."""
    gone = object()
    found = {name: namespace.get(name, gone) for name in names}
    return {name: describe(value) for name, value in found.items() if value is not gone}


def _unwrapped(obj: Any) -> Any:
    """Return the module of a model that the rank has wrapped: the notebook has that alone."""
    return obj.module if is_a(obj, *DATA_PARALLEL) else obj


def _stale_text(name: str, users: Sequence[str]) -> str:
    listed = ", ".join(f"`{user}`" for user in users)
    verb, again = ("refers", "it") if len(users) == 1 else ("refer", "them")
    return f"the ranks got a new `{name}`, and {listed} still {verb} to the one before: create {again} again"
