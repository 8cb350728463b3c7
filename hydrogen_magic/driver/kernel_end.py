"""The end of this kernel, which stops its gangs, and the gangs of earlier kernels that ended without that."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes, run_log
from hydrogen_magic.core.dropped_objects import process_ends
from hydrogen_magic.core.units import counted, first_of
from hydrogen_magic.driver import known_gangs, tracking
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.views import kernel_here
from hydrogen_magic.views.output_stream import OutputStream

_TRACKED_S = 2.5
"""How long an exit may take until trackers know of it: front ends kill a kernel after five seconds."""
_AT_EXIT_S = 1.0
"""How long this process waits at its end for gangs that it stops, and then once more for those it kills."""
_INTERRUPTED_S = 5.0
"""A gang that was stopped so short a time before the kernel is shut down was most likely stopped by that:
Jupyter kills a kernel that takes longer."""


def end_with_kernel() -> None:
    """Stop what runs, so that records say why it ended; ranks have a moment for their ``finally``."""
    began_s = time.monotonic()
    process_ends.set()
    gangs = [gang for gang, _ in list(known_gangs.running.values())]
    running = [gang.id for gang in gangs if not gang.wait(0)]
    if running and kernel_here() is None:  # the next kernel reports those of this one
        stopped = f"{counted(len(running), 'running gang')} ({first_of(running, 4)})"
        print(
            f"hydrogen_magic: this process ends, which stops {stopped}: gang.wait() waits for the end of a "
            "gang, as hm.run does",
            file=OutputStream("stderr", optional=True),
        )
    for kill in (False, True):
        for gang in gangs:
            with suppress(RuntimeError):  # its agents have been closed, and their loop with them
                gang.stop_for("kernel", kill)
        deadline = time.monotonic() + _AT_EXIT_S
        for gang in gangs:
            gang.wait(max(0.0, deadline - time.monotonic()))
    tracking.finish_all(max(0.0, began_s + _TRACKED_S - time.monotonic()))


def note_shutdown(began: float, cell_began: float) -> None:
    """Note in the records of the gangs that this stopped that their kernel was shut down.

    Jupyter interrupts a kernel before it asks for that, which stops the gangs of the current cell.
    ``began``: when it asked; ``cell_began``: when the last cell was started; both in Unix time.
    """
    for gang in known_gangs.gangs().values():
        state = gang.snapshot()
        is_stopped = (state.state, state.stop_reason) == ("STOPPED", "user")
        is_recent = began - state.wall_time - state.now_s < _INTERRUPTED_S
        if is_stopped and is_recent and state.wall_time >= cell_began and not state.outlives:
            run_log.write_end(gang.folder, ev.KERNEL_ENDED)


def clean_up_abandoned() -> list[str]:
    """End processes that gangs of dead kernels may have left; return those gangs' ids, newest first.

    A gang ends with its kernel. Only if its agent was killed too, processes may be left that had made
    themselves independent of their rank.
    """
    abandoned = run_log.unfinished()
    end_abandoned(abandoned)
    folders.prune()
    return abandoned


def untaken() -> list[run_log.Summary]:
    """Return, once, the gangs that succeeded and whose kernel ended before it used their results.

    The kernel of a gang of another machine seems to have ended: its record is silent.
    """
    found = [
        each
        for each in run_log.recent()
        if each.ended is not None
        and not each.launched.outlives
        and run_log.is_unseen(each.gang)
        and run_log.is_owner_gone(each.gang, each.launched.owner)
    ]
    for each in found:
        run_log.mark_seen(each.gang)
    return found


def end_abandoned(gang_ids: Iterable[str]) -> None:
    """End processes of these gangs, whose owners no longer run, and finish their records."""
    launched = [
        found.launched for gang_id in gang_ids if (found := run_log.summary(gang_id)) is not None
    ]
    if launched:
        processes.kill_marked(processes.OWNER, {one.owner for one in launched})
    for one in launched:
        run_log.end_abandoned(one.gang)
