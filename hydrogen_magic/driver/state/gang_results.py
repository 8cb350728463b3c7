"""The results of a gang's ranks, stored until they are needed."""

from __future__ import annotations

import functools
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hydrogen_magic.core import dropped_objects, file_limit, run_log
from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.state.formatting import ranks_text
from hydrogen_magic.errors import ResultError
from hydrogen_magic.serialization import payload, result_stream
from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.library_objects.weak_references import take_referents
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.serialization.result_stream import CELL_VALUE, UnopenedPart, label

_SMALL_BYTES = 1 << 20
"""Smaller results are copied: arrays of others occupy a file descriptor as long as the notebook has them."""
_SAVED = "saved in the record of the gang"
_SAVED_HERE = "kept in a temporary folder as long as hm.gangs() lists the gang"
_REMEDIES = {
    "module '__main__' has no attribute '(.+)'": "run the cell that defines `{}`",
    "No module named '(tensorflow)'": (
        'if Keras imports {}, set os.environ["KERAS_BACKEND"] in the notebook as on the ranks'
    ),
}
"""Regular expression for why a result cannot be loaded -> the remedy."""
LOST = "lost"


class RankResults:
    """The results of one rank: its value and the ``--out`` variables. Unpickled on first use."""

    def __init__(
        self,
        rank: int,
        parts: Sequence[tuple[msg.ResultPart, Payload]],
        damage: str = "",
        until_opened: list[Path] | None = None,
    ) -> None:
        self.rank = rank
        self.damage = damage
        """Why the file with these results could not be read."""
        self.parts = list(parts)
        self.nbytes = sum(section.nbytes for _, section in parts)
        """Size of all that arrived."""
        self.is_taken = False
        """The notebook has all of it: see :meth:`release`."""
        self._until_opened = until_opened if until_opened is not None else []
        """What replaces the results if the kernel ends before it has unpickled them; deleted then."""
        self._owner = os.getpid()
        self._opened: dict[str, Any] | None = None
        self._referents: list[Any] = []
        """Objects that the opened results refer to weakly."""
        self._opening = threading.Lock()

    def add(self, part: msg.ResultPart, section: Payload) -> None:
        """Store a part that has arrived."""
        is_copied = section.nbytes <= _SMALL_BYTES or file_limit.are_scarce()
        copied = payload.copied if is_copied else payload.with_small_copied
        self.parts.append((part, copied(section)))
        self.nbytes += section.nbytes
        self._opened = None

    @property
    def errors(self) -> dict[str, str]:
        """Return why results are missing, by name; unpickles the results."""
        errors = {part.name: part.error for part, _ in self.parts if part.error}
        for name, obj in self.objects().items():
            if isinstance(obj, UnopenedPart):
                reason = f"{obj.reason}{_remedy(obj.reason)}"
                errors[name] = (
                    f"{label(name)} arrived but cannot be loaded in the notebook: {reason}"
                )
        return errors

    @property
    def names(self) -> list[str]:
        """Names of the results that arrived, completely or partly."""
        return list(dict.fromkeys(part.name for part, _ in self.parts if not part.error))

    @property
    def key_of_value(self) -> str:
        """The name of the value among all results that are loaded from the run log."""
        return CELL_VALUE if "_" in self.names else "_"

    @property
    def has_ended(self) -> bool:
        """Whether all parts are here: the value comes last."""
        return any(part.name == CELL_VALUE for part, _ in self.parts)

    @property
    def are_partial(self) -> bool:
        """Whether some of them arrived without some of their objects."""
        return any(part.is_partial for part, _ in self.parts)

    @property
    def _have_unopened(self) -> bool:
        return any(isinstance(obj, UnopenedPart) for obj in (self._opened or {}).values())

    def is_worth_saving(self, has_succeeded: bool) -> bool:
        """Whether the notebook may need these results from the run log."""
        if has_succeeded:
            return self._have_unopened or self.are_partial
        return any(
            part.name or section.pickled != result_stream.NONE.pickled
            for part, section in self.parts
        )

    def value(self) -> Any:
        """Return the value of the cell. Raises ResultError if it did not arrive."""
        return self.result(CELL_VALUE)

    def variables(self) -> Mapping[str, Any]:
        """Return the ``--out`` variables that arrived; looking up another one raises ResultError."""
        return _Variables(self)

    def everything(self) -> dict[str, Any]:
        """Return all results; ``MissingObject`` replaces the missing objects of incomplete ones."""
        found = {
            part.name: result_stream.unpack([section])[0]
            for part, section in self.parts
            if part.is_partial
        }
        found.update(self.objects())
        return {
            name: obj.rest if isinstance(obj, UnopenedPart) else obj for name, obj in found.items()
        }

    def result(self, name: str) -> Any:
        """Return one result. Raises ResultError if it did not arrive."""
        obj = self.objects().get(name, self)
        if isinstance(obj, UnopenedPart):
            obj = self._opened_again(name)
        if obj is self or isinstance(obj, UnopenedPart):
            why = self.errors.get(name) or self.damage or f"{label(name)} did not arrive"
            raise ResultError(f"rank {self.rank}: {why}")
        return obj

    def arrived(self) -> list[str]:
        """Return the names of the variables that arrived completely."""
        opened = self.objects().items()
        return [name for name, obj in opened if name and not isinstance(obj, UnopenedPart)]

    def objects(
        self,
        originals: Originals | None = None,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[str, Any]:
        """Return the results that arrived completely, by name; unpickles them on first use.

        ``originals``: objects of the notebook, which get the contents they had on the rank. ``loading``: the
        context of what may be interrupted, which changes nothing then.
        """
        with self._opening:
            if self._opened is None:
                self._opened = self._unpacked(originals, loading)
            self._drop_replacements()
            return self._opened

    def _drop_replacements(self) -> None:
        """Delete what replaces the results, if all could be unpickled, and not in a fork of the kernel."""
        if not self._have_unopened and os.getpid() == self._owner:
            _delete(self._until_opened)

    def _unpacked(
        self,
        originals: Originals | None = None,
        loading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[str, Any]:
        whole = [
            (part.name, section)
            for part, section in self.parts
            if not part.error and not part.is_partial
        ]
        sections = [section for _, section in whole]
        objects = result_stream.unpack(sections, originals, loading)
        self._referents = take_referents()
        return dict(zip([name for name, _ in whole], objects, strict=True))

    def _opened_again(self, name: str) -> Any:
        """Return a result that could not be opened before: the notebook may define its classes by now."""
        with self._opening:
            assert self._opened is not None
            if not self.is_taken:
                fresh = self._unpacked()
                failed = [n for n, obj in self._opened.items() if isinstance(obj, UnopenedPart)]
                self._opened.update({each: fresh[each] for each in failed})
                self._drop_replacements()
            return self._opened[name]

    def release(self) -> None:
        """Free the bytes that arrived, of which the notebook has got the objects.

        Only after the end of the gang, and when the results have been opened.
        """
        with self._opening:
            if self._opened is not None:
                self.is_taken = True
                self.parts = [(part, Payload(b"")) for part, _ in self.parts]


class _Variables(Mapping[str, Any]):
    """The variables of a rank by name."""

    def __init__(self, results: RankResults) -> None:
        self._results = results

    def __getitem__(self, name: str) -> Any:
        if not name or all(part.name != name for part, _ in self._results.parts):
            raise KeyError(name)
        return self._results.result(name)

    def __contains__(self, name: object) -> bool:
        return name in self._results.arrived()

    def __iter__(self) -> Iterator[str]:
        return iter(self._results.arrived())

    def __len__(self) -> int:
        return len(self._results.arrived())

    def __repr__(self) -> str:
        names = ", ".join(part.name for part, _ in self._results.parts if part.name)
        return f"<variables of rank {self._results.rank}: {names or 'none'}>"


class _Sent(NamedTuple):
    """What :meth:`GangResults.save` says about the results of a rank."""

    rank: int
    names: str
    is_complete: bool


def _text_of(sent: Sequence[_Sent]) -> str:
    """Return ``partial results of rank 0 (`model`) and the results of rank 1 (the value)``."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank, names, is_complete in sent:
        groups.setdefault((is_complete, names), []).append(rank)
    return " and ".join(
        f"{'the' if is_complete else 'partial'} results of {ranks_text(ranks)} ({names})"
        for (is_complete, names), ranks in groups.items()
    )


class GangResults:
    """The results of all ranks, all from one attempt.

    It is the newest in which the first rank sent some, or, if it never did, the newest in which any rank did.
    """

    _not_saved = "kept in this kernel's memory only"
    """What becomes of results that cannot be saved."""

    def __init__(self, gang_id: str, folder: Path, first_rank: int = 0) -> None:
        """``first_rank``: the rank whose results the notebook gets."""
        self.saved_note = ""
        """A sentence about results that the notebook did not get; empty without any."""
        self.are_temporary = False
        """The gang is not recorded: what is saved is lost with the handle of the gang."""
        self.are_awaited = False
        """A cell or a call unpickles them as soon as the gang has ended."""
        self._until_opened: list[Path] = []
        """Of the first rank's results, see :class:`RankResults`."""
        self._gang_id = gang_id
        self._folder = folder
        self._first_rank = first_rank
        self._attempt = 0
        self._ranks: dict[int, RankResults] = {}
        self._newer: tuple[int, dict[int, RankResults]] = 0, self._ranks
        """The newest attempt, and its results, which may become those of the gang."""

    def add(self, rank: int, attempt: int, part: msg.ResultPart, section: Payload) -> None:
        """Store a part that has arrived; the results of an earlier attempt may be dropped."""
        if attempt != self._newer[0]:
            self._newer = attempt, {}
        ranks = self._newer[1]
        if rank not in ranks:
            until_opened = self._until_opened if rank == self._first_rank else None
            ranks[rank] = RankResults(rank, [], until_opened=until_opened)
        ranks[rank].add(part, section)
        if rank == self._first_rank or self._first_rank not in self._ranks:
            self._attempt, self._ranks = attempt, ranks

    def have_ended(self, attempt: int) -> bool:
        """Return whether all that the first rank sends in this attempt has arrived."""
        newest, ranks = self._newer
        return newest == attempt and self._first_rank in ranks and ranks[self._first_rank].has_ended

    def of(self, rank: int) -> RankResults:
        """Return the results of ``rank``, possibly none."""
        return self._ranks.get(rank, RankResults(rank, []))

    def value(self, rank: int) -> Any:
        """Return the value of ``rank``; raises ResultError if it did not arrive."""
        return self.of(rank).value()

    def value_or_error(self, rank: int) -> Any:
        """Return the value of ``rank``, or the ResultError in its place."""
        try:
            return self.value(rank)
        except ResultError as error:
            return error

    @property
    def are_complete(self) -> bool:
        """Whether all that the notebook was to get has arrived."""
        parts = self.of(self._first_rank).parts
        return not any(part.error or part.is_partial for part, _ in parts)

    def are_worth_saving(self, has_succeeded: bool) -> bool:
        """Whether :meth:`save` has something to do."""
        return not self.saved_note and bool(self._worth_saving(has_succeeded))

    def _worth_saving(self, has_succeeded: bool) -> list[int]:
        """Return the ranks whose results are to be saved: the notebook has those of others in memory."""
        ranks = [self._first_rank] if has_succeeded else sorted(self._ranks)
        return [rank for rank in ranks if self.of(rank).is_worth_saving(has_succeeded)]

    def save(self, has_succeeded: bool, n_attempts: int = 1) -> str:
        """Save results in the run log if the notebook may not get all of them.

        After a failure or a stop those of every rank that has sent some; of incomplete results those of the
        first rank. Returns a sentence about it, empty if there is nothing to save, which names the attempt
        if there were several.
        """
        if not self.are_worth_saving(has_succeeded):
            return self.saved_note
        self._newer = self._attempt, self._ranks
        found: dict[str, list[_Sent]] = {}
        for rank in self._worth_saving(has_succeeded):
            results = self.of(rank)
            is_all = results.has_ended and not (has_succeeded and rank == self._first_rank)
            sent = _Sent(rank, ", ".join(map(label, results.names)), is_all)
            try:
                result_stream.save(results.parts, saved_path(self._folder, rank))
            except OSError as error:
                where = f"{self._not_saved} ({error.strerror or error})"
            else:
                where = _SAVED_HERE if self.are_temporary else _SAVED
                if not has_succeeded:
                    del self._ranks[rank]  # before the next one is read: these are memory files
            if sent.names:  # else there are only the reasons why nothing was sent
                found.setdefault(where, []).append(sent)
        of = f" of attempt {self._attempt + 1}" if n_attempts > 1 and not has_succeeded else ""
        self.saved_note = "; ".join(self._note(where, sent, of) for where, sent in found.items())
        return self.saved_note

    def keep(self, checkpoints: Path) -> str:
        """Keep what replaces the results of a gang that has succeeded until its kernel has unpickled them.

        These are copies in the run log if no cell waits for the results, and otherwise ``checkpoints``, the
        folder of the ranks, which is deleted as soon as it is not needed; it stays if results are missing.
        Return a sentence if copies could not be saved, else an empty text.
        """
        arrived = [each for each in self._ranks.values() if each.names]
        found = [each for each in arrived if each.is_worth_saving(False)]
        problem = ""
        if found and (self.are_awaited or self.are_temporary or (problem := self._copy(found))):
            self._until_opened += [checkpoints] if self.are_complete else []
        elif self.are_complete:
            shutil.rmtree(checkpoints, ignore_errors=True)
        return problem

    def _copy(self, found: Iterable[RankResults]) -> str:
        """Save results in the run log; return why that failed, else an empty text."""
        try:
            for results in found:
                path = saved_path(self._folder, results.rank)
                result_stream.save(results.parts, path)
                if not results.are_partial:  # these can be loaded from there alone
                    self._until_opened.append(path)
            run_log.mark_unseen(self._folder)
            self._until_opened.append(self._folder / run_log.UNSEEN)
            # Else a loop that launches gangs and uses no result would fill the disk.
            dropped_objects.when_dropped(self, functools.partial(_delete, self._until_opened))
        except OSError as error:
            _delete(self._until_opened)
            why = error.strerror or error
            return f"until they are used, the results are {self._not_saved} ({why})"
        return ""

    def _note(self, where: str, sent: Sequence[_Sent], of: str) -> str:
        """Return a sentence about results that are in one place."""
        note = f"{_text_of(sent)}{of} are {where}"
        if where.startswith(LOST):
            return note
        calls = [load_call(self._gang_id, one.rank) for one in sent]
        which = " and ".join(calls) if len(calls) < 3 else load_call(self._gang_id, "RANK")
        return f"{note}; load them with {which}"

    @property
    def load_call(self) -> str:
        """The call that loads what :meth:`save` has saved of the first rank."""
        return load_call(self._gang_id, self._first_rank)

    @property
    def nbytes(self) -> int:
        """Size of all that arrived."""
        return sum(one.nbytes for one in self._ranks.values())


def load_call(gang_id: str, rank: int | str) -> str:
    """Return the call that loads the saved results of a rank."""
    which = f", {rank}" if rank else ""
    return f"hydrogen_magic.load_results({gang_id!r}{which})"


def _delete(paths: list[Path]) -> None:
    """Delete these files and folders, and remove them from the list."""
    while paths:
        path = paths.pop()
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink(missing_ok=True)


def saved_path(folder: Path, rank: int) -> Path:
    """Return the file of a run log with the results of ``rank``."""
    return folder / f"{run_log.RESULTS}{rank}"


def load_saved(folder: Path, rank: int) -> RankResults:
    """Return saved results, none if there is no file or it cannot be read: see :attr:`RankResults.damage`."""
    path = saved_path(folder, rank)
    try:
        return RankResults(rank, result_stream.load(path))
    except FileNotFoundError:
        return RankResults(rank, [])
    except OSError as error:
        return RankResults(rank, [], f"the file of its results cannot be read: {error}")
    except ValueError as error:
        return RankResults(rank, [], f"the file of its results is damaged: {path} ({error})")


def _remedy(reason: str) -> str:
    for pattern, remedy in _REMEDIES.items():
        if found := re.search(pattern, reason):
            return f"; {remedy.format(found[1])}, and try again"
    return ""
