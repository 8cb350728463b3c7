"""Gangs of earlier kernels that run, or whose results no kernel has: a new kernel reports and takes them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from hydrogen_magic.core import run_log
from hydrogen_magic.core.units import counted, first_of
from hydrogen_magic.driver import kernel_end, known_gangs, result_assignment
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.owner.connection import connect
from hydrogen_magic.driver.owner.start import LIMIT_S
from hydrogen_magic.driver.state.gang_results import load_call, saved_path
from hydrogen_magic.errors import HydrogenError, ResultError
from hydrogen_magic.inference import fingerprints
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from hydrogen_magic.serialization.identity import Originals

LIMIT = f"will be stopped after {LIMIT_S / 3600:.0f} hours; --timeout sets another limit"

_MOST_UNTAKEN = 3
"""Gangs with results that have a line of their own."""


def is_outliving(gang_id: str) -> bool:
    """Whether the run was launched to outlive its kernel."""
    found = run_log.summary(gang_id)
    return found is not None and found.launched.outlives


def attachable_lines(*, running_alone: bool = False) -> Iterator[str]:
    """Yield a line for each gang that runs without this kernel, or ended without any.

    ``running_alone``: leave out those that have ended.
    """
    for gang_id in run_log.unreadable():
        if run_log.is_unseen(gang_id) and gang_id not in known_gangs.gangs():
            why = run_log.why_unreadable(gang_id)
            yield f"gang {gang_id}, which this kernel has not seen end, cannot be attached to: {why}"
    for found in run_log.recent():
        is_elsewhere = found.launched.outlives and found.gang not in known_gangs.gangs()
        if running_alone and found.ended is not None:
            continue
        if is_elsewhere and (state := _state(found)):
            yield f"gang {found.gang} {state}: %gang attach {found.gang}"


def _state(found: run_log.Summary) -> str:
    """Return what a new kernel reports about a gang; empty for one that needs no report."""
    about = [found.launched.name, f"since {_time(found.launched.wall_time)}"]
    if found.ended is None and run_log.is_alive(found.launched.owner):
        about += filter(None, [_progress(found.gang)])
        return f"is still running ({', '.join(about)})"
    if found.ended is not None and run_log.is_unseen(found.gang):
        return f"has ended: {found.ended.reason} ({', '.join(about)})"
    return ""


def ended_lines(gang_ids: Iterable[str]) -> Iterator[str]:
    """Yield a line for each of these gangs whose owner ended unexpectedly."""
    for gang_id in filter(is_outliving, gang_ids):
        found = run_log.summary(gang_id)
        if found is not None and found.ended is not None:
            yield f"gang {gang_id} has ended: {found.ended.reason} (%gang show {gang_id})"


def untaken_lines() -> Iterator[str]:
    """Yield lines about the gangs whose kernel ended before it used the results; each is reported once."""
    gangs = kernel_end.untaken()  # newest first; many if they were of a sweep
    for found in gangs[:_MOST_UNTAKEN]:
        about = f"{found.launched.name}, started {_time(found.launched.wall_time)}"
        yield (
            f"gang {found.gang} succeeded ({about}), and its results have not been used: "
            f"{_way_to_load(found)}"
        )
    if others := [found.gang for found in gangs[_MOST_UNTAKEN:]]:
        yield f"the same holds for {counted(len(others), 'more gang')}: {first_of(others, 8)}"


def _way_to_load(found: run_log.Summary) -> str:
    if fingerprints.has_answers(found.gang):
        return "run the %%infer cell with --resume, which returns them"
    folder = run_log.run_dir(found.gang)
    ranks = (rank for rank in range(found.launched.np) if saved_path(folder, rank).exists())
    return load_call(found.gang, next(ranks, 0))


def _time(wall_time: float) -> str:
    began, now = time.localtime(wall_time), time.localtime()
    is_today = (began.tm_year, began.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M" if is_today else "%d %b %H:%M", began)


def _progress(gang_id: str) -> str:
    """Return how far the gang is; empty if unknown."""
    with suppress(OSError, HydrogenError):
        connection = connect(gang_id, "status")
        connection.close()
        if connection.attached.progress is not None:
            return f"{100 * connection.attached.progress:.0f} %"
    return ""


def assign(gang: Gang, names: Sequence[str], namespace: MutableMapping[str, Any]) -> str:
    """Assign these variables of the first rank in ``namespace``; return a sentence about it.

    Raises ArgumentsError if the gang still runs or has no such variable, the gang's own error, and
    ResultError, after the others are assigned, if some did not arrive.
    """
    if not gang.snapshot().is_terminal:
        raise ArgumentsError(
            f"gang {gang.id} is still running, and its variables arrive at its end: wait for it with "
            f"%gang wait {gang.id}"
        )
    gang.raise_for_state()
    results = gang.received.of(gang.first_rank)
    there = dict.fromkeys(part.name for part, _ in results.parts if part.name)
    unknown = [name for name in names if name not in there]
    if unknown and not results.damage:
        raise ArgumentsError(f"--out {unknown[0]}: gang {gang.id} has {', '.join(there) or 'none'}")
    arrived: list[str] = []
    lost: list[str] = []
    for name in names:
        try:
            results.result(name)
            arrived.append(name)
        except ResultError as error:
            lost.append(str(error))
    replaced = [name for name in arrived if name in namespace]
    result_assignment.assign(results, arrived, namespace, Originals())
    text = f"assigned {', '.join(arrived)} of gang {gang.id}" if arrived else ""
    text += f" (replaced: {', '.join(replaced)})" if replaced else ""
    if lost:
        raise ResultError("\n".join(filter(None, [*dict.fromkeys(lost), text])))
    return text
