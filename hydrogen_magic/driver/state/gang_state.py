"""``fold(state, event) -> state``: the complete state of a gang, computed only from its events.

It has no access to sockets, clocks, processes or widgets, so that a recorded list of events replays a run
in a test, in a saved notebook or after a kernel restart. Views depend only on :class:`GangState`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.frozen_values import replaced
from hydrogen_magic.driver.state.collective_waits import RankWaits, added

TERMINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})

_FEW_SKIPPED = 100
"""With several threads, points that are still to come may count as dropped for a moment."""
_RATE_WINDOW_S = 5.0
"""Steps per second are averaged over this time: a shorter one fluctuates, a longer one lags."""


@dataclass(frozen=True)
class ProgressBar:
    """A progress bar on a rank."""

    desc: str
    n: float
    total: float | None
    unit: str
    started_s: float
    updated_s: float
    closed: bool = False
    began_at: float = 0.0
    """``n`` at ``started_s``: a resumed bar does not begin at 0."""
    advanced_s: float = 0.0
    """When ``n`` last changed."""
    n_inside: int = 0
    """Bars that have begun inside of it since then: one for training, one for validation, …"""
    most_inside: int = 0
    """The most of them."""

    @property
    def has_total(self) -> bool:
        """Whether it says how much of its work is finished."""
        return math.isfinite(self.n) and 0 < (self.total or 0.0) < math.inf

    @property
    def fraction(self) -> float | None:
        """0 to 1, or None when the total is unknown."""
        return min(1.0, self.n / self.total) if self.total else None

    @property
    def per_s(self) -> float | None:
        """Units per second since the bar was first seen or reset, None before there is a rate."""
        elapsed = self.updated_s - self.started_s
        return (self.n - self.began_at) / elapsed if elapsed > 0 else None


@dataclass(frozen=True)
class RankState:
    """The state of one rank."""

    rank: int
    host: str = ""
    device: str = ""
    pid: int | None = None
    phase: str = "waiting"
    """``waiting`` (no process yet), then the phases of :class:`~hydrogen_magic.core.events.RankPhase`,
    then ``done``, ``failed`` or ``stopped``. ``idle``: a rank of the session that the cell leaves out."""
    detail: str = ""
    phase_since_s: float = 0.0
    bars: Mapping[int, ProgressBar] = field(default_factory=lambda: MappingProxyType({}))
    steps: int = 0
    step_marks: tuple[tuple[float, int], ...] = ()
    """Recent ``(at_s, steps)``, for the rate."""
    n_points: int = 0
    """Number of ``hm.log`` calls, including dropped ones."""
    n_skipped: int = 0
    """Dropped ones."""
    last_metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    rss_bytes: int = 0
    cpu_percent: float = 0.0
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    process_state: str = ""
    waiting_in: str = ""
    """The current collective: ``all_reduce #7``, ``init_process_group``; empty otherwise."""
    waiting_since_s: float = 0.0
    n_collectives: int = 0
    """How many collectives its own code has entered, known when it waits in one and at its end."""
    n_joins: int = 0
    """How often it has joined all ranks of the gang, or has begun to; known at the same times."""
    waits: RankWaits = field(default_factory=RankWaits)
    n_entered: int = 0
    """At least so many collectives a rank of a session has entered."""
    has_entered_all: bool = False
    """It has ended its cell, and enters no more than these."""
    active_s: float = 0.0
    """Time of its last visible activity."""
    input_request: ev.InputRequested | None = None
    """The line of the user that it waits for, None if it waits for none."""
    debugger_request: ev.DebuggerRequested | None = None
    """Its request for the debugger, also after it is granted; None if it has made none."""
    failure: ev.RankFailed | None = None
    exited: ev.RankExited | None = None
    exited_in: str = ""
    """Its last phase before the end."""
    result_bytes: int | None = None
    stacks: str = ""

    @property
    def bar(self) -> ProgressBar | None:
        """The bar to show: the innermost open one, otherwise the last one."""
        opened = [bar for bar in self.bars.values() if not bar.closed]
        known = opened or list(self.bars.values())
        return known[-1] if known else None

    def steps_per_s(self, now_s: float) -> float | None:
        """Return optimizer steps per second over the last few seconds, None if there are none.

        Without new steps for that long, it is the rate that one more step now would result in, if that is
        lower.
        """
        if len(self.step_marks) < 2 or self.is_over:
            return None
        (first_s, first_n), (last_s, last_n) = self.step_marks[0], self.step_marks[-1]
        if last_s <= first_s:
            return None
        rate = (last_n - first_n) / (last_s - first_s)
        if now_s - last_s < _RATE_WINDOW_S:
            return rate
        return min(rate, (last_n - first_n + 1) / (now_s - first_s))

    @property
    def has_run(self) -> bool:
        """Whether it has run the cell to its end; its result may still be on its way."""
        return self.result_bytes is not None or self.phase == "finishing"

    @property
    def is_left_out(self) -> bool:
        """Whether it is a rank of the session that the cell leaves out."""
        return self.phase == "idle"

    @property
    def is_over(self) -> bool:
        return self.phase in ("done", "failed", "stopped", "idle")


@dataclass(frozen=True)
class GangState:
    """The state of a gang."""

    gang: str = ""
    title: str = ""
    name: str = ""
    params: Mapping[str, bool | int | float | str] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Plain values that the cell captured, by name."""
    placement: str = ""
    rendezvous: str = ""
    session: str = ""
    """Name of the session whose ranks run the cell, empty without one."""
    state: str = "PENDING"
    """``PENDING RUNNING SUCCEEDED FAILED STOPPED``."""
    stop_reason: str = ""
    """Reason of a requested end, a key of :data:`~.events.STOP_REASONS`; empty without one."""
    before_stop: GangState | None = None
    """Its state when the end was requested for another reason than a failure."""
    killed: bool = False
    attempt: int = 0
    queued: tuple[int, int] | None = None
    """Available and needed slots while the attempt waits for them, None otherwise."""
    waits_for: str = ""
    """See :class:`~hydrogen_magic.core.events.Queued`; empty when it waits no longer."""
    closure: ev.ClosureSent | None = None
    """How much of the closure, or of data, has reached the hosts while it is sent, None otherwise."""
    ranks: tuple[RankState, ...] = ()
    now_s: float = 0.0
    """Time of the newest event."""
    wall_time: float = 0.0
    owner: str = ""
    host: str = ""
    """Of its owner."""
    outlives: bool = False
    """Its owner is not a kernel."""
    cells: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    culprit: int | None = None
    fault: ev.ErrorReport | None = None
    """Why the attempt cannot continue although no rank failed."""
    reason: str = ""
    final_metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """:attr:`last_metrics` as recorded at the end."""
    rows: ev.RowsDone | None = None
    """Progress of ``%%infer``, None for other gangs and before its start."""
    notices: tuple[ev.Notice, ...] = ()
    is_recording: bool = False
    """Whether ranks record spans (forward, backward, ...)."""
    profiling: str = ""
    """Phase of :class:`~hydrogen_magic.core.events.Profiling`, empty without a request."""
    profile_requested_s: float = 0.0
    profiled_since_s: float = 0.0
    """Time of the last request whose profile ranks have begun to record, 0 without one."""
    profile_path: str = ""
    """The last merged profile."""

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_STATES

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Last logged values by name, each of the first rank that logged it."""
        return self.final_metrics or ev.of_first_ranks(rank.last_metrics for rank in self.ranks)

    def length_s(self, now: float) -> float:
        """Return how long the gang has run until ``now``, a Unix time, or until its end."""
        return self.now_s if self.is_terminal else max(0.0, now - self.wall_time)


def fold(state: GangState, event: ev.Event) -> GangState:
    """Return the state after ``event``. Pure; unknown ranks are ignored."""
    now_s = max(state.now_s, event.at_s)
    number = getattr(event, "rank", None)
    if number is None:
        return _GANG_RULES[type(event)](replaced(state, now_s=now_s), event)
    if not 0 <= number < len(state.ranks):
        return replaced(state, now_s=now_s)
    ranks = list(state.ranks)
    after = ranks[number] = _RANK_RULES[type(event)](ranks[number], event)
    running = state.state == "PENDING" and after.phase in ("loading", "running")
    after_state = "RUNNING" if running else state.state
    notices = state.notices
    if isinstance(event, ev.Metrics) and event.skipped:
        notices = _with_skipped(state, after, event)
    # One copy of the gang per event: a thousand ranks make thousands of events a second.
    return replaced(state, now_s=now_s, ranks=tuple(ranks), state=after_state, notices=notices)


def _with_skipped(state: GangState, rank: RankState, e: ev.Metrics) -> tuple[ev.Notice, ...]:
    """Return the notices, with one if ``rank`` is the first that has logged more than can be sent."""
    before = max(other.n_skipped for other in state.ranks)
    if rank.n_skipped < _FEW_SKIPPED or before >= _FEW_SKIPPED:
        return state.notices
    text = (
        f"rank {rank.rank} logs faster than values can be sent: some points are missing in the curves and in "
        "gang.metrics; log every tenth step, for example"
    )
    return (*state.notices, ev.Notice(e.at_s, "warning", text))


def replay(events: Iterable[ev.Event]) -> GangState:
    """Return the state after all ``events``."""
    state = GangState()
    for event in events:
        state = fold(state, event)
    return state


# ── rules for the gang ───────────────────────────────────────────────────────────────────────────


def _launched(state: GangState, e: ev.GangLaunched) -> GangState:
    return replaced(
        state,
        gang=e.gang,
        title=e.title,
        name=e.name or e.title,
        params=e.params,
        placement=e.placement,
        rendezvous=e.rendezvous,
        session=e.session,
        wall_time=e.wall_time,
        owner=e.owner,
        host=e.host,
        outlives=e.outlives,
        cells=e.cells,
        ranks=tuple(RankState(rank) for rank in range(e.np)),
    )


def _attempt_started(state: GangState, e: ev.AttemptStarted) -> GangState:
    ranks = tuple(
        RankState(rank.rank, phase_since_s=e.at_s, active_s=e.at_s) for rank in state.ranks
    )
    # A failure of the last attempt is reset; a request to end the gang is not.
    if state.stop_reason == "failure":
        state = replaced(state, stop_reason="", killed=False)
    return replaced(
        state,
        attempt=e.attempt,
        queued=None,
        waits_for="",
        closure=None,
        ranks=ranks,
        state="PENDING",
        fault=None,
    )


def _queued(state: GangState, e: ev.Queued) -> GangState:
    if e.have >= e.wanted:
        return replaced(state, queued=None, waits_for="")
    return replaced(state, queued=(e.have, e.wanted), waits_for=e.waits_for)


def _stop_requested(state: GangState, e: ev.StopRequested) -> GangState:
    killed = state.killed or e.kill
    if state.stop_reason not in ("", "failure"):
        return replaced(state, killed=killed)
    # A request takes precedence over a failed rank: it prevents further attempts.
    before = None if e.reason == "failure" else state
    return replaced(state, stop_reason=e.reason, before_stop=before, killed=killed)


def _profiling(state: GangState, e: ev.Profiling) -> GangState:
    requested_s = state.profile_requested_s if state.profiling else e.at_s
    # Ranks have recorded for a while when this is reported: all of it is after the request.
    since_s = requested_s if e.phase == "recording" else state.profiled_since_s
    return replaced(
        state,
        profiling=e.phase,
        profile_requested_s=requested_s,
        profiled_since_s=since_s,
        profile_path=e.path or state.profile_path,
    )


def _ended(state: GangState, e: ev.GangEnded) -> GangState:
    return replaced(
        state,
        state=e.state,
        ranks=tuple(_over(rank, e.state) for rank in state.ranks),
        reason=e.reason,
        culprit=e.culprit,
        final_metrics=e.metrics,
        queued=None,
        waits_for="",
        closure=None,
    )


def _over(rank: RankState, gang: str) -> RankState:
    """Return a rank of an ended gang: it may have had no process yet, or its end may not be recorded."""
    if rank.is_over or gang == "FAILED":
        return rank
    phase = "done" if gang == "SUCCEEDED" else "stopped"
    return replaced(rank, phase=phase, detail="", waiting_in="")


# ── rules for one rank ───────────────────────────────────────────────────────────────────────────


def _started(rank: RankState, e: ev.RankStarted) -> RankState:
    return replaced(
        rank,
        pid=e.pid,
        host=e.host,
        device=e.device,
        phase="starting",
        phase_since_s=e.at_s,
        active_s=e.at_s,
    )


def _phase(rank: RankState, e: ev.RankPhase) -> RankState:
    if rank.is_over:  # its results are still on their way
        return replaced(rank, detail=e.detail)
    if e.phase == "finishing":  # the cell is over, and so is what it handled
        rank = _without_exception_in_flight(rank)
    since = rank.phase_since_s if rank.phase == e.phase else e.at_s
    return replaced(rank, phase=e.phase, detail=e.detail, phase_since_s=since, active_s=e.at_s)


def _metrics(rank: RankState, e: ev.Metrics) -> RankState:
    last = dict(rank.last_metrics)
    for name, column in e.values.items():
        newest = next((value for value in reversed(column) if value is not None), None)
        if newest is not None and (name in last or len(last) < ev.MOST_METRICS):
            last[name] = newest
    return replaced(
        rank,
        n_points=rank.n_points + len(e.steps) + e.skipped,
        n_skipped=rank.n_skipped + e.skipped,
        last_metrics=MappingProxyType(last),
        active_s=e.at_s,
    )


def _progress(rank: RankState, e: ev.Progress) -> RankState:
    known = rank.bars.get(e.bar)
    # A bar that goes back was reset, for the next epoch: its rate counts from here.
    same = known if known is not None and e.n >= known.n else None
    bar = ProgressBar(e.desc, e.n, e.total, e.unit, e.at_s, e.at_s, e.closed, e.n, e.at_s)
    kept = {key: old for key, old in rank.bars.items() if not old.closed or key == e.bar}
    if same is None:
        kept = _with_one_inside(kept, e.bar)
    else:
        has_advanced = e.n > same.n
        bar = replaced(
            bar,
            started_s=same.started_s,
            began_at=same.began_at,
            advanced_s=e.at_s if has_advanced else same.advanced_s,
            n_inside=0 if has_advanced else same.n_inside,
            most_inside=same.most_inside,
        )
    # %%infer reports bars again and again, for their rates: a rank that hangs is not active. One whose
    # bar is closed has nothing to do.
    is_active = e.closed or known is None or replaced(bar, updated_s=known.updated_s) != known
    active_s = e.at_s if is_active else rank.active_s
    return replaced(rank, bars=MappingProxyType({**kept, e.bar: bar}), active_s=active_s)


def _with_one_inside(bars: Mapping[int, ProgressBar], begun: int) -> dict[int, ProgressBar]:
    """Return the bars after one has begun, inside of the last open one before it."""
    outer = None
    for key, bar in bars.items():
        if key == begun:
            break
        if bar.has_total and not bar.closed:
            outer = key
    if outer is None:
        return dict(bars)
    around = bars[outer]
    n_inside = around.n_inside + 1
    most_inside = max(around.most_inside, n_inside)
    return {**bars, outer: replaced(around, n_inside=n_inside, most_inside=most_inside)}


def _steps(rank: RankState, e: ev.Steps) -> RankState:
    marks = (*rank.step_marks, (e.at_s, e.count))
    recent = tuple(mark for mark in marks if mark[0] >= e.at_s - _RATE_WINDOW_S)
    # A step may take longer than the window: two marks are needed for a rate.
    kept = recent if len(recent) > 1 else marks[-2:]
    return replaced(rank, steps=e.count, step_marks=kept, active_s=e.at_s)


def _seen(rank: RankState, e: ev.Spans) -> RankState:
    return replaced(rank, active_s=e.at_s, waits=added(rank.waits, e))


def _health(rank: RankState, e: ev.RankHealth) -> RankState:
    return replaced(
        rank,
        rss_bytes=e.rss_bytes or rank.rss_bytes,  # an ended process has none until it is reaped
        cpu_percent=e.cpu_percent,
        process_state=e.process_state,
        gpu_percent=e.gpu_percent,
        gpu_memory_bytes=e.gpu_memory_bytes,
    )


def _failed(rank: RankState, e: ev.RankFailed) -> RankState:
    # An exception that is unwinding is kept only until the rank handles it or reports its end.
    before = rank.failure
    if before is not None and not before.in_flight:
        return rank
    same = before is not None and (before.error.type, before.error.message) == (
        e.error.type,
        e.error.message,
    )
    began_s = before.at_s if before is not None and same else e.at_s
    return replaced(rank, failure=replaced(e, at_s=began_s), active_s=e.at_s)


def _without_exception_in_flight(rank: RankState) -> RankState:
    if rank.failure is None or not rank.failure.in_flight:
        return rank
    return replaced(rank, failure=None)


def _exited(rank: RankState, e: ev.RankExited) -> RankState:
    if rank.exited is not None:  # the first report is the cause
        return rank
    failed = rank.failure is not None and not rank.failure.in_flight
    if rank.result_bytes is not None and (e.exit_code == 0 or e.asked):
        phase = "done"
    elif e.asked and not failed:
        phase = "stopped"
    else:
        phase = "failed"
    return replaced(
        rank,
        exited=e,
        exited_in=rank.phase,
        phase=phase,
        detail="",
        phase_since_s=e.at_s,
        waiting_in="",
        input_request=None,
    )


_GANG_RULES: Mapping[type, Callable[[GangState, Any], GangState]] = {
    ev.GangLaunched: _launched,
    ev.AttemptStarted: _attempt_started,
    ev.AttemptFailed: lambda state, e: replaced(state, fault=state.fault or e.error),
    ev.Queued: _queued,
    ev.ClosureSent: lambda state, e: replaced(state, closure=e if e.hosts_done < e.hosts else None),
    ev.RowsDone: lambda state, e: replaced(state, rows=e),
    ev.StopRequested: _stop_requested,
    ev.Notice: lambda state, e: replaced(state, notices=(*state.notices, e)),
    ev.Recording: lambda state, e: replaced(state, is_recording=e.on),
    ev.Profiling: _profiling,
    ev.GangEnded: _ended,
}

_RANK_RULES: Mapping[type, Callable[[RankState, Any], RankState]] = {
    ev.RankStarted: _started,
    ev.RankPhase: _phase,
    ev.Output: lambda rank, e: replaced(rank, active_s=e.at_s),
    ev.Display: lambda rank, e: replaced(rank, active_s=e.at_s),
    ev.InputRequested: lambda rank, e: replaced(rank, input_request=e, active_s=e.at_s),
    ev.DebuggerRequested: lambda rank, e: replaced(rank, debugger_request=e, active_s=e.at_s),
    ev.InputAnswered: lambda rank, e: replaced(rank, input_request=None, active_s=e.at_s),
    ev.Metrics: _metrics,
    ev.Progress: _progress,
    ev.Steps: _steps,
    ev.Spans: _seen,
    ev.CollectiveWait: lambda rank, e: replaced(
        rank,
        waiting_in=f"{e.name} #{e.seq}" if e.name and e.seq else e.name,
        waiting_since_s=e.since_s,
        n_collectives=max(rank.n_collectives, e.seq),
        n_joins=e.n_joins,
        active_s=e.at_s,
    ),
    ev.CollectivesEntered: lambda rank, e: replaced(
        rank, n_entered=e.count, has_entered_all=e.is_final
    ),
    ev.RankHealth: _health,
    ev.RankFailed: _failed,
    ev.ExceptionHandled: lambda rank, e: replaced(
        _without_exception_in_flight(rank), active_s=e.at_s
    ),
    ev.RankStacks: lambda rank, e: replaced(rank, stacks=e.text),
    ev.NamesChanged: lambda rank, e: rank,
    ev.RecordAwaited: lambda rank, e: rank,
    ev.RankResult: lambda rank, e: replaced(rank, result_bytes=e.result_bytes, active_s=e.at_s),
    ev.RankExited: _exited,
}
