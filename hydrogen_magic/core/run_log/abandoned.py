"""Which recorded gangs still run, and which of them lost their owner."""

from __future__ import annotations

import os
import time

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.run_log.ending import write_end
from hydrogen_magic.core.run_log.folders import GANG_ID, mark_seen, recent_ids, run_dir, written_at
from hydrogen_magic.core.run_log.owners import is_alive, machine_of, this_machine
from hydrogen_magic.core.run_log.reading import Summary, recent, summary

_SILENT_S = 60.0
"""Health is recorded about once a second: after this silence, a run seems over whose owner is on another
machine, or which could not record its end."""


def going_on() -> list[ev.GangLaunched]:
    """Return the gangs of this machine that go on, by the records of the last minute.

    The health of ranks is recorded once a second. A record that is silent for longer has lost its end.
    """
    since = time.time() - _SILENT_S
    names = [name for name in recent_ids() if GANG_ID.fullmatch(name) and written_at(name) > since]
    found = [each for each in map(summary, names) if each is not None and each.ended is None]
    return [each.launched for each in found if is_alive(each.launched.owner)]


def unfinished() -> list[str]:
    """Return the unreported runs that ended because their kernel did, newest first.

    Not those of other machines: a gang that waits for slots there is silent, too, and goes on.
    """
    return [
        found.gang
        for found in recent()
        if _is_abandoned(found) and not is_elsewhere(found.launched)
    ]


def end_abandoned(gang_id: str) -> None:
    """Record that the user has been informed of a run that ended because its owner did."""
    found = summary(gang_id)
    write_end(run_dir(gang_id), "its kernel ended" if found is None else why_over(found.launched))
    mark_seen(gang_id)


def why_over(launched: ev.GangLaunched) -> str:
    """Return why a gang ended whose owner no longer runs."""
    boots = (owner.partition("/")[0] for owner in (launched.owner, this_machine()))
    if launched.host == os.uname().nodename and len(set(boots)) > 1:
        return "its machine was restarted"
    return "its owner process ended unexpectedly" if launched.outlives else "its kernel ended"


def _is_abandoned(found: Summary) -> bool:
    unseen = (ev.KERNEL_ENDED, ev.OWNER_ENDED)
    is_seen = found.ended is not None and found.ended.reason not in unseen
    return not is_seen and is_owner_gone(found.gang, found.launched.owner)


def is_over(found: Summary) -> bool:
    """Return whether a run has ended, or its kernel has."""
    return found.ended is not None or _is_abandoned(found)


def is_owner_gone(gang_id: str, owner: str) -> bool:
    """Return whether ``owner``, of this run, no longer runs; on another machine, whether it seems so."""
    if is_alive(owner):
        return False
    if machine_of(owner) == this_machine():
        return True
    # A home directory shared between machines: only the file's age tells of that kernel.
    return time.time() - written_at(gang_id) > _SILENT_S


def is_elsewhere(launched: ev.GangLaunched) -> bool:
    """Return whether the owner is, or was, on a machine of another name, whose processes are out of sight."""
    return machine_of(launched.owner) != this_machine() and launched.host != os.uname().nodename
