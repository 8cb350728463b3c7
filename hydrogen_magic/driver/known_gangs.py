"""The gangs of this kernel, by id, and the results of earlier ones."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from hydrogen_magic.core import run_log
from hydrogen_magic.driver import run_names
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state import gang_results
from hydrogen_magic.errors import HydrogenError

running: dict[str, tuple[Gang, tuple[str, ...]]] = {}
"""Gangs by id, and the GPUs that they have beside those of sessions."""
_recent: deque[Gang] = deque(maxlen=4)
"""The gangs that were launched or ended last, kept for inspection; more would hold large results."""
_keeping = threading.Lock()
_LARGE_BYTES = 64 << 20
"""Results of this size that the notebook has taken are not kept for that."""
_known: WeakValueDictionary[str, Gang] = WeakValueDictionary()


def gangs() -> dict[str, Gang]:
    """Return this kernel's gangs by id: running ones, the last four, and referenced ones.

    They are in the order in which they were launched or attached to. Of the four that were launched or
    ended last, those whose large results became variables of the notebook are left out. Older ones are in
    the records that ``%gang`` lists.
    """
    # A list of the references first: any thread may drop the last one to a gang at any moment.
    return {gang.id: gang for known in _known.valuerefs() if (gang := known()) is not None}


def load_results(gang: str, rank: int = 0) -> dict[str, Any]:
    """Return the saved results of a rank: its gang failed, was stopped, returned only some of them, or its
    kernel ended before it used them.

    The value of the cell is named ``_``, or ``""`` if ``--out`` names a variable ``_``;
    ``MissingObject`` replaces every missing object. With ``retries`` the results of all ranks are those of
    one attempt, the newest in which rank 0 had sent some. ``gang``: its id, the beginning of one, or the
    name of a run, of which the newest is taken. Raises HydrogenError when there is no such run, nothing of
    it is saved, or the file is damaged.
    """
    gang_id = _run_called(gang)
    known = gangs().get(gang_id)  # a run without a record has a folder elsewhere
    saved = gang_results.load_saved(known.folder if known else run_log.run_dir(gang_id), rank)
    kept = saved if known is None or saved.parts else known.received.of(rank)
    found = {name or kept.key_of_value: value for name, value in kept.everything().items()}
    if not found:
        reasons = [saved.damage] if saved.damage else kept.errors.values()
        why = "".join(f": {text}" for text in reasons)
        raise HydrogenError(f"no results of rank {rank} are saved for run {gang_id!r}{why}")
    run_log.mark_seen(gang_id)
    return found


def _run_called(name: str) -> str:
    """Return the id of a run. Raises HydrogenError if there is none."""
    with suppress(HydrogenError, OSError):  # it is no id, or there is no place for records
        if run_log.run_dir(name).is_dir():
            return name
    return run_names.complete(name, run_names.names(gangs(), run_log.recent()))


def register(gang: Gang) -> Gang:
    """Make ``gang`` known in this kernel, as the one that it launched or attached to last."""
    _known.pop(gang.id, None)
    _known[gang.id] = gang
    keep(gang)
    return gang


def forget(gang: Gang) -> None:
    """Delete the record of an ended gang, and do not list it any more."""
    with _keeping:
        _known.pop(gang.id, None)
        with suppress(ValueError):
            _recent.remove(gang)
    run_log.delete(gang.id)


def keep(gang: Gang) -> None:
    """Let go of gangs with large results that the notebook has taken, and of all but the last four.

    Handles keep theirs. The main thread calls it at a launch, the hub's at an end.
    """
    with _keeping:
        if _known.get(gang.id) is not gang:  # `forget` was faster
            return
        kept = [each for each in _recent if each is not gang and not _is_taken(each)]
        _recent.clear()
        _recent.extend([*kept, gang])


def _is_taken(gang: Gang) -> bool:
    """Whether the notebook has taken its results, which are large."""
    received = gang.received
    return received.nbytes > _LARGE_BYTES and received.of(gang.first_rank).is_taken


os.register_at_fork(after_in_child=running.clear)
