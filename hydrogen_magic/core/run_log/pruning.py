"""Deleting old records, and the data that they keep."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress

from hydrogen_magic.core.run_log.abandoned import is_elsewhere, is_over
from hydrogen_magic.core.run_log.folders import (
    CHECKPOINTS,
    GANG_ID,
    RESULTS,
    delete,
    is_unseen,
    kept_dir,
    recent_ids,
    run_dir,
    written_at,
)
from hydrogen_magic.core.run_log.reading import Summary, recent

_KEEP_RUNS = 50
"""Weeks of work for one person; most records are well below a megabyte."""
_KEEP_DATA_S = 7 * 86400.0
"""Time to notice, after a weekend, that a run left something."""
_KEEP_BYTES = 10 * 10**9
"""Events and output of many ranks that log for days take gigabytes."""


def is_certainly_over(found: Summary) -> bool:
    """Return whether a run has ended, or has been silent for a week: what it has kept is free for others.

    A gang of another machine that waits for slots is silent for hours, and goes on.
    """
    is_here = not is_elsewhere(found.launched)
    silent_s = time.time() - written_at(found.gang)
    return is_over(found) and (found.ended is not None or is_here or silent_s > _KEEP_DATA_S)


def prune(
    keep: int = _KEEP_RUNS, keep_bytes: int = _KEEP_BYTES, keep_data_s: float = _KEEP_DATA_S
) -> None:
    """Delete finished runs except those that ended last, ``keep`` gangs and as many cells of sessions.

    Others with data that are in no notebook (results, finished rows, checkpoints of a gang that did not
    succeed) stay for ``keep_data_s``. When the files of those with data, or of all others, have more than
    ``keep_bytes``, the oldest of them are deleted, too, but for the newest run, and for those among the last
    ``keep`` with data. Runs that no kernel has seen since their end stay. A gang that outlived its kernel may
    have run for days, while dozens of short ones began and ended. Records that cannot be read are deleted
    after ``keep_data_s``.
    """
    # Before they are read: a run that begins meanwhile is not among those that cannot be.
    names = set(filter(GANG_ID.fullmatch, recent_ids()))
    readable = recent()
    _delete_unreadable(names - {found.gang for found in readable}, keep_data_s)
    over = [found for found in readable if is_certainly_over(found)]
    over.sort(key=lambda found: found.last_wall_time, reverse=True)
    n_kept_bytes: Counter[bool] = Counter()
    """Of runs with data and of those without: large data leave no place for small records."""
    places: Counter[bool] = Counter()
    for found in over:
        files = _files(found.gang)
        n_bytes = sum(files.values())
        is_of_session = bool(found.launched.session)
        places[is_of_session] += 1
        has_data = _has_data(found.gang, files)
        is_too_much = n_kept_bytes[has_data] + n_bytes > keep_bytes
        if places[is_of_session] > keep:
            is_fresh = time.time() - found.last_wall_time < keep_data_s
            is_kept = has_data and is_fresh and not is_too_much
        else:
            is_kept = has_data or not is_too_much or found is over[0]
        if is_kept or (found.ended is not None and is_unseen(found.gang)):
            n_kept_bytes[has_data] += n_bytes
        else:
            delete(found.gang)


def _delete_unreadable(gang_ids: Iterable[str], older_s: float) -> None:
    """Delete old records that this version cannot read: of another version, or of a full disk."""
    for gang_id in gang_ids:
        with suppress(OSError):
            paths = [run_dir(gang_id), *run_dir(gang_id).iterdir()]
            is_old = time.time() - max(path.lstat().st_mtime for path in paths) > older_s
            if is_old:
                delete(gang_id)


def _has_data(gang_id: str, files: Collection[str]) -> bool:
    """Return whether a record has results, finished rows, or checkpoints, which are deleted if not needed."""
    has_results = any(name.startswith(RESULTS) for name in files)
    return has_results or CHECKPOINTS in files or kept_dir(gang_id).is_dir()


def _files(gang_id: str) -> dict[str, int]:
    """Return the number of bytes of each file of a run, of its checkpoints, and of its finished rows."""
    folder, kept = run_dir(gang_id), kept_dir(gang_id)
    try:
        entries = list(os.scandir(folder))
        found = {each.name: each.stat(follow_symlinks=False).st_size for each in entries}
    except OSError:  # another kernel deletes it
        return {}
    for name in {CHECKPOINTS, kept.name} & found.keys():
        # Finished rows may be beside their data, where a link leads: on a file server that does not answer.
        with suppress(OSError):
            files = (folder / name).resolve().rglob("*")
            found[name] = sum(path.lstat().st_size for path in files)
    return found
