"""The runs that are on record, and those of this kernel: one row each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hydrogen_magic.core import run_log
from hydrogen_magic.core.events import Event, GangEnded, GangLaunched
from hydrogen_magic.core.units import counted, first_of
from hydrogen_magic.driver import known_gangs
from hydrogen_magic.driver.state.gang_state import GangState, replay
from hydrogen_magic.errors import HydrogenError

if TYPE_CHECKING:
    import pandas as pd


def history() -> pd.DataFrame:
    """Return one row for each recorded run, of all notebooks of this user, oldest first.

    A warning names those whose record cannot be read.

    ``%load_ext hydrogen_magic`` deletes old records: it keeps the 50 gangs that ended last, as many cells of
    sessions, and for a week those with data that are in no notebook. If records have more than 10 GB, the
    oldest are deleted, too, but none of the last 50 with such data.

    Columns: ``gang`` (its id, for ``%gang show``), ``name`` (of ``--name``, or of notebook and cell),
    ``state`` (``PENDING RUNNING SUCCEEDED FAILED STOPPED``), ``started`` (UTC), ``duration_s`` (so far, for
    a running gang), ``np``, ``placement``, ``rendezvous`` and ``title`` (the line of the magic). Then
    ``params.NAME`` for each number, flag or short text that a cell captured, and ``metrics.NAME`` for the
    last value of each logged metric, of the first rank that logged it; missing where a run has none.
    Values whose names mark them as secret (``token``, ``password``) are left out.
    """
    import pandas as pd

    if line := unreadable_line():
        print(f"warning: {line}", file=sys.stderr)
    found = states()
    rows = [_row(state) for state in found]
    names = [*_FIXED, *_names("params", [s.params for s in found])]
    names += _names("metrics", [s.last_metrics for s in found])
    table: pd.DataFrame = pd.DataFrame(rows, columns=names)
    table["started"] = pd.to_datetime(table["started"], unit="s", utc=True)
    return table


_FIXED: Mapping[str, Callable[[GangState], Any]] = {
    "gang": lambda state: state.gang,
    "name": lambda state: state.name,
    "state": lambda state: state.state,
    "started": lambda state: state.wall_time,
    "duration_s": lambda state: state.length_s(time.time()),
    "np": lambda state: len(state.ranks),
    "placement": lambda state: state.placement,
    "rendezvous": lambda state: state.rendezvous,
    "title": lambda state: state.title,
}
"""The columns of every table."""


def _row(state: GangState) -> dict[str, Any]:
    fixed = {name: read(state) for name, read in _FIXED.items()}
    params = {f"params.{name}": value for name, value in state.params.items()}
    metrics = {f"metrics.{name}": value for name, value in state.last_metrics.items()}
    return {**fixed, **params, **metrics}


def _names(kind: str, tables: Sequence[Any]) -> list[str]:
    return [f"{kind}.{name}" for name in dict.fromkeys(name for table in tables for name in table)]


def states(limit: int | None = None) -> list[GangState]:
    """Return the state of this kernel's gangs and of ``limit`` recorded ones, newest last."""
    live = known_gangs.gangs()
    earlier = [found for found in run_log.recent() if found.gang not in live][:limit]
    found = [*map(_last_state, earlier), *(gang.snapshot() for gang in live.values())]
    return sorted(found, key=lambda state: state.wall_time)


def unreadable_line() -> str:
    """Return a line about records that cannot be read, which lists leave out; empty without any."""
    if why := run_log.why_inaccessible():
        return why
    ids = [each for each in run_log.unreadable() if each not in known_gangs.gangs()]
    if not ids:
        return ""
    return f"{counted(len(ids), 'record')} cannot be read ({first_of(ids, 4)}): %gang show {ids[0]} says why"


def missing_end(events: Sequence[Event]) -> list[GangEnded]:
    """Return the end of a run with these recorded events, if its kernel died without recording one."""
    launched = events[0] if events else None
    if not isinstance(launched, GangLaunched) or isinstance(events[-1], GangEnded):
        return []
    is_known = not run_log.is_elsewhere(launched)
    if not (is_known and run_log.is_owner_gone(launched.gang, launched.owner)):
        return []
    return [GangEnded(events[-1].at_s, "STOPPED", run_log.why_over(launched))]


def with_machine(state: GangState) -> GangState:
    """Return the state after a run's recorded events and :func:`missing_end`, with its machine if it runs on
    another one.
    """
    if state.is_terminal or run_log.is_alive(state.owner):
        return state
    reason = f"runs on {state.host}"
    if run_log.is_owner_gone(state.gang, state.owner):
        written = time.localtime(run_log.written_at(state.gang))
        reason += f", not heard of since {time.strftime('%Y-%m-%d %H:%M', written)}"
    return replace(state, reason=reason)


def _last_state(found: run_log.Summary) -> GangState:
    """Return the state for a list; for a finished run, the first and last event are sufficient."""
    events: Sequence[Event] = [found.launched, found.last]
    if found.ended is None:
        with suppress(HydrogenError):  # the record is damaged, or another kernel has deleted it
            events = run_log.read(found.gang)
    return with_machine(replay([*events, *missing_end(events)]))
