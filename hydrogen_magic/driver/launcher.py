"""The launch of a gang: from the text of a cell to its result.

notebook kernel                             one host                          one rank
───────────────                             ────────                          ────────
magics ── arguments ──► JobSpec ─┐
   └──── capture ─────► Captured ┤
                                 ▼
                  placement.plan (pure)
              GangController ────┼── hub ══ channel, encrypted ══ agent ── forkserver
                       ▲         │             │                     │          │ fork
                       │         └── closure ──┼── memory file ──────┼──────► worker
                       │                       │                     │          │ load, run
         fold(state, event) ◄──────────────────┴──── events ─────────┤◄─────────┤ events, result
                       │                                             │◄─────────┘ output
                   GangState ──► views                               │
                       └──► record on disk                           ▼
                                                     stop, SIGINT, SIGTERM, SIGKILL, clean-up
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeGuard

from hydrogen_magic import capture, plugins
from hydrogen_magic.capture.imports import IMPORTED_ON_FIRST_USE
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import file_limit, run_log
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.core.masking import Mask, holds, secret_values
from hydrogen_magic.driver import kernel_end, known_gangs, tracking
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.controller import GangController
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.interrupts import interrupts_raise
from hydrogen_magic.driver.placements import (
    AgentGroup,
    Attempt,
    ClosureFile,
    EventSink,
    InKernelPlacement,
    Job,
    Placement,
    WorkFeed,
    devices,
)
from hydrogen_magic.driver.placements.local_agents import hub
from hydrogen_magic.driver.state import gang_results
from hydrogen_magic.driver.state.stored_results import StoredResults
from hydrogen_magic.driver.tracking import SweepGroup
from hydrogen_magic.errors import (
    HydrogenError,
    PlacementError,
)
from hydrogen_magic.node.agent.file_versions import modified_ns
from hydrogen_magic.node.worker.nesting import refuse_nested
from hydrogen_magic.views import static_picture

_FED_FILES = {True: 2, False: 8}
"""Descriptors for each rank that is fed, on this machine and elsewhere."""
_LAUNCH_FILES = 48
"""Files that this process opens for its first gang, at most: the hub's sockets, an agent, a run log."""

_shown_hints: set[str] = set()
_IMPORTED_NS = modified_ns(msg.__file__)
"""Agents and ranks that speak another version's messages cannot be started."""
_claiming = threading.Lock()


def plan(spec: JobSpec) -> Plan:
    """Return the plan of a gang without starting it; raises PlacementError if it is impossible.

    Gangs cannot be nested: a rank cannot start a gang.
    """
    refuse_nested()
    _check_file_limit(0)  # looking for plug-ins and capturing local modules open files, too
    plugins.check(spec)
    if (running := sessions.live(spec.session)) is not None:
        return running.plan
    return plugins.placement(spec.placement).plan_beside(spec, _gpus_in_use)


def _gpus_in_use() -> list[str]:
    """Return the GPUs of this kernel's gangs and sessions, and of the user's other gangs on this machine.

    Each GPU occurs once for every rank that uses it. Ranks that ``%%infer`` keeps make room.
    """
    found = [gpus for gang, gpus in list(known_gangs.running.values()) if not gang.wait(0)]
    named = [each for each in sessions.sessions() if each.name != sessions.UNNAMED]
    found += [_gpus(each.plan, plugins.placement(each.spec.placement)) for each in named]
    own = run_log.owner_of_this_process()
    found += [each.gpus for each in run_log.going_on() if each.owner != own]
    return [gpu for gpus in found for gpu in gpus]


def _gpus(plan: Plan, placement: Placement | InKernelPlacement) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of ranks on this machine, one for each rank."""
    gpus = (slot.gpu for slot in plan.slots if slot.gpu is not None)
    return devices.uuids(gpus) if placement.on_this_machine else ()


def launch_captured(
    captured: capture.Captured,
    spec: JobSpec,
    *,
    title: str,
    feed: WorkFeed | None = None,
    planned: Plan | None = None,
    place: Placement | None = None,
    group: SweepGroup | None = None,
) -> Gang:
    """Start a gang, with ``feed`` if its ranks receive data, at ``place`` if given.

    ``planned``: the result of :func:`plan`, if the caller has it. ``group``: the tracker's group of the sweep
    that it belongs to. Raises PlacementError.
    """
    clock_zero_s, wall_time = time.monotonic(), time.time()
    planned = planned or (plan(spec) if place is None else place.plan(spec))
    placement = place or plugins.placement(spec.placement)
    _check_file_limit(0 if feed is None else spec.np * _FED_FILES[_is_on_this_machine(placement)])
    # All refusals come first, before there is a gang.
    tracker = None if spec.track is None else plugins.tracker(spec.track)
    if captured.session is not None:
        captured.session.check()
    with ExitStack() as on_error:
        with _claiming:  # other threads may launch, too
            session, notes = _session_of(placement, spec, planned, captured, feed)
            if session is not None:  # this gang has it alone
                session.is_running = True
                on_error.callback(sessions.give_back, session)
        start = _starter(placement, spec, session)
        known = secret_values(os.environ, dict(spec.env), plugins.forwarded())
        closure = ClosureFile(captured.payload)  # the notebook's arrays may change
        on_error.callback(closure.release)
        gpus = _gpus(planned, placement)
        run = _new_run(captured, spec, title, wall_time, known, gpus)
        for text in (*notes, *_outdated(), *captured.warnings, *_new_hints(captured, spec)):
            run.emit(ev.Notice(0.0, "warning", text))
        if spec.track is not None and tracker is not None:
            tracking.follow(run, spec.track, tracker, captured.source, group)
        rendezvous = plugins.rendezvous(spec.rendezvous)
        job = Job(
            spec=spec,
            plan=planned,
            closure=closure,
            preload=_preload(rendezvous, captured.preload),
            needs=captured.required_modules,
            rendezvous=rendezvous,
            record_dir=run.rank_logs.folder,
            clock_zero_s=clock_zero_s,
            secrets=_sent_secrets(known, captured, spec),
            observers=plugins.observers(),
            feed=feed,
            datasets=captured.datasets,
            session=None if session is None else session.next_cell(spec, captured),
        )
        on_error.pop_all()
    return start(run, job)


def _outdated() -> list[str]:
    """Return a note if the package was updated meanwhile, as by ``%pip install`` in the notebook."""
    if modified_ns(msg.__file__) == _IMPORTED_NS:
        return []
    return [
        "hydrogen_magic has been updated since this kernel imported it: restart the kernel, because new "
        "processes have the other version"
    ]


def _new_hints(captured: capture.Captured, spec: JobSpec) -> list[str]:
    new = [text for text in captured.hints if text not in _shown_hints]
    if not spec.quiet:  # which shows no notices
        _shown_hints.update(new)
    return new


def _check_file_limit(n_files: int) -> None:
    try:
        file_limit.check(_LAUNCH_FILES + n_files, "a gang")
    except file_limit.LimitError as error:
        raise PlacementError(file_limit.explained(error)) from None


def _new_run(
    captured: capture.Captured,
    spec: JobSpec,
    title: str,
    wall_time: float,
    known: Iterable[str],
    gpus: tuple[str, ...],
) -> GangRun:
    """Return the run of a new gang, with its run log."""
    problems: list[str] = []
    gang_id, record = _new_record(problems.append)
    kind = StoredResults if spec.outlive else gang_results.GangResults
    results = kind(gang_id, record.path, spec.first_rank)
    run = GangRun(gang_id, record, Mask(known), results)
    run.emit(
        ev.GangLaunched(
            at_s=0.0,
            gang=gang_id,
            title=title,
            np=spec.np,
            placement=spec.placement,
            rendezvous=spec.rendezvous,
            wall_time=wall_time,
            owner=run_log.owner_of_this_process(),
            cells=dict(captured.cells),
            name=spec.name or title,
            params=dict(captured.params),
            host=os.uname().nodename,
            outlives=spec.outlive,
            session=spec.session or "",
            gpus=gpus,
        )
    )
    known_run = weakref.ref(run)  # in a reference cycle it would keep its results for long

    def warn(text: str) -> None:
        if (running := known_run()) is not None:
            running.emit(ev.Notice(running.state.now_s, "warning", text))

    record.on_problem = warn
    if isinstance(results, StoredResults):
        results.on_problem = record.on_problem
    for text in problems:
        run.emit(ev.Notice(0.0, "warning", text))
    return run


def _sent_secrets(
    known: Iterable[str], captured: capture.Captured, spec: JobSpec
) -> tuple[str, ...]:
    """Return the secrets that ranks get from here: no other one leaves this process."""
    given = secret_values({}, dict(spec.env), plugins.forwarded())
    # The header and the pickled names; what follows are the contents of arrays.
    pickles = (captured.payload.pickled, *captured.payload.buffers[:1])
    return tuple(s for s in known if s in given or any(holds(text, s) for text in pickles))


def _preload(rendezvous: plugins.Rendezvous, captured: tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules to import before ranks are forked, of those that the ranks will import."""
    refused = tuple(f"{module}." for module in rendezvous.not_preloaded)
    mine = [name for name in captured if not f"{name}.".startswith(refused)]
    later = [IMPORTED_ON_FIRST_USE[name] for name in mine if name in IMPORTED_ON_FIRST_USE]
    return tuple(dict.fromkeys((*rendezvous.preloaded, *mine, *later)))


def _starter(
    placement: Placement | InKernelPlacement, spec: JobSpec, session: sessions.RankSession | None
) -> Callable[[GangRun, Job], Gang]:
    """Return what starts a gang there, or runs it. Raises PlacementError if that is impossible."""
    if isinstance(placement, InKernelPlacement):
        return partial(_run_here, placement)
    agents: AgentGroup = placement.open(spec) if session is None else session.agents
    return partial(_start_controller, agents, hub().loop)


def _session_of(
    placement: Placement | InKernelPlacement,
    spec: JobSpec,
    planned: Plan,
    captured: capture.Captured,
    feed: WorkFeed | None,
) -> tuple[sessions.RankSession | None, tuple[str, ...]]:
    """Return the session of a gang, a new one at its first cell, and notes for the user.

    Raises PlacementError if the placement has no sessions, HydrogenError while another cell runs.
    """
    if spec.session is None:
        return _kept_ranks(placement, spec, planned, captured, feed), planned.notes
    if isinstance(placement, InKernelPlacement):
        raise PlacementError(f"`--on {spec.placement}` does not support --session")
    session = sessions.live(spec.session)
    if session is not None:
        session.refuse_if_running()
        return session, ()
    if captured.session is not None and captured.session.held:
        why = "has ended since the cell was captured: run the cell again"
        raise PlacementError(f"session {spec.session!r} {why}")
    _end_kept_ranks(placement)
    agents = placement.open(spec)
    if not agents.has_sessions:
        raise PlacementError(f"`--on {spec.placement}` does not support --session")
    session = sessions.RankSession(spec, planned, agents, hub().loop, captured)
    return session, (*planned.notes, *sessions.register(session))


def _kept_ranks(
    placement: Placement | InKernelPlacement,
    spec: JobSpec,
    planned: Plan,
    captured: capture.Captured,
    feed: WorkFeed | None,
) -> sessions.RankSession | None:
    """Return the session that keeps the ranks of ``%%infer``; other gangs on this machine end it."""
    if feed is None or not feed.key or not _is_on_this_machine(placement):
        _end_kept_ranks(placement)
        return None
    kept = sessions.live(sessions.UNNAMED)
    if kept is not None and kept.spec.placement != spec.placement:
        _end_kept_ranks(placement)  # its agents would start the ranks where the last ones were
        kept = sessions.live(sessions.UNNAMED)
    if kept is None:
        agents = placement.open(spec)
        if not agents.has_sessions:
            return None
        kept = sessions.RankSession(spec, planned, agents, hub().loop, captured)
        sessions.register(kept)
    elif kept.is_running:  # by a detached one
        return None
    kept.start_again(spec, planned)
    return kept


def _end_kept_ranks(placement: Placement | InKernelPlacement) -> None:
    """Free the memory of ranks that ``%%infer`` keeps, for another gang on this machine."""
    kept = sessions.live(sessions.UNNAMED)
    if kept is not None and not kept.is_running and _is_on_this_machine(placement):
        kept.end("another gang has begun")


def _is_on_this_machine(placement: Placement | InKernelPlacement) -> TypeGuard[Placement]:
    return isinstance(placement, Placement) and placement.on_this_machine


def _start_controller(
    agent_group: AgentGroup, loop: asyncio.AbstractEventLoop, run: GangRun, job: Job
) -> Gang:
    controller = GangController(run, job, agent_group, loop)
    gang = known_gangs.register(Gang(run, controller, static_picture))
    gpus = _gpus(job.plan, plugins.placement(job.spec.placement))
    known_gangs.running[gang.id] = gang, gpus if job.session_cell is None else ()
    done = asyncio.run_coroutine_threadsafe(controller.run(), loop)
    done.add_done_callback(lambda future: _on_controller_end(run, future))
    return gang


atexit.register(kernel_end.end_with_kernel)  # after that of the agents, so it runs before


def _on_controller_end(run: GangRun, done: Future[None]) -> None:
    gang, _ = known_gangs.running.pop(run.id, (None, None))
    error = "its controller was cancelled" if done.cancelled() else done.exception()
    if error is not None:  # a fault of ours; callers wait for the gang's end
        run.finish(HydrogenError(f"the gang was lost: {error!r}"))
    if gang is not None:
        known_gangs.keep(gang)  # it may have run for longer than four others


def _run_here(placement: InKernelPlacement, run: GangRun, job: Job) -> Gang:
    """Run the one rank here and now; its exception stays the user's own, for ``%debug``."""
    gang = known_gangs.register(Gang(run, picture=static_picture))
    run.emit(ev.AttemptStarted(0.0, 0))
    error: BaseException | None = None
    try:
        with interrupts_raise():
            placement.run_here(Attempt(run.id, 0, job), EventSink(run.emit, run.deliver))
    except BaseException as problem:  # the user's, an interrupt included: raised by raise_for_state
        error = problem
    job.close("SUCCEEDED" if error is None else "FAILED")
    now_s = job.now_s()
    if error is None:
        job.delete_checkpoints()
        run.emit(ev.GangEnded(now_s, "SUCCEEDED", "1 rank finished"))
    else:
        run.emit(ev.GangEnded(now_s, "FAILED", f"{type(error).__name__}: {error}", 0))
    run.finish(error)
    return gang


def _new_record(on_problem: Callable[[str], None]) -> tuple[str, run_log.Record]:
    """Return a new id and its record; an earlier run may have the same id."""
    while True:
        gang_id = _new_id()
        with suppress(FileExistsError):
            return gang_id, run_log.Record.create(gang_id, on_problem)


def _new_id() -> str:
    """Return a short id that no gang of this kernel has; the folder of a record cannot be made twice."""
    while (name := secrets.token_hex(2)) in known_gangs.gangs():
        pass
    return name
