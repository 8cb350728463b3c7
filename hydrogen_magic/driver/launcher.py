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
import difflib
import inspect
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from functools import partial
from numbers import Integral
from typing import Any, Protocol, TypeGuard
from weakref import WeakValueDictionary

from hydrogen_magic import capture, plugins
from hydrogen_magic.capture.imports import IMPORTED_ON_FIRST_USE
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import file_limit, processes, run_log
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import DEFAULT_MAX_CLOSURE_BYTES, JobSpec, Plan, variables
from hydrogen_magic.core.masking import Mask, holds, secret_values
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver import tracking
from hydrogen_magic.driver.controller import GangController
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.input_line import NotebookInputLine
from hydrogen_magic.driver.placements import (
    AgentGroup,
    Attempt,
    ClosureFile,
    EventSink,
    InKernelPlacement,
    Job,
    Placement,
    SessionAgentGroup,
    WorkFeed,
)
from hydrogen_magic.driver.placements.local_agents import hub
from hydrogen_magic.driver.state import gang_results
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.stored_results import StoredResults
from hydrogen_magic.driver.tracking import SweepGroup
from hydrogen_magic.errors import (
    HydrogenError,
    OptionTypeError,
    OptionValueError,
    PlacementError,
)
from hydrogen_magic.node.agent.file_versions import modified_ns
from hydrogen_magic.node.worker.nesting import refuse_nested
from hydrogen_magic.views import View, draws_html, pick_view, static_picture

_LAUNCH_FILES = 48
"""Files that this process opens for its first gang, at most: the hub's sockets, an agent, a run log."""

_running: dict[str, tuple[Gang, Plan]] = {}
_recent: deque[Gang] = deque(maxlen=4)
"""The gangs launched last, kept for inspection; more would hold results, which may be large."""
_LARGE_BYTES = 64 << 20
"""Results of this size that the notebook has taken are not kept for that."""
_shown_hints: set[str] = set()
_IMPORTED_NS = modified_ns(msg.__file__)
"""Agents and ranks that speak another version's messages cannot be started."""
_claiming = threading.Lock()
_known: WeakValueDictionary[str, Gang] = WeakValueDictionary()


def gangs() -> dict[str, Gang]:
    """Return this kernel's gangs by id: running ones, the last four, and referenced ones.

    They are in the order in which they were launched or attached to. Of the last four, those whose large
    results became variables of the notebook are left out. Older ones are in the records that ``%gang``
    lists.
    """
    return dict(_known)


def load_results(gang_id: str, rank: int = 0) -> dict[str, Any]:
    """Return the saved results of a rank whose gang failed, was stopped, or returned only some of them.

    The value of the cell is named ``_``, or ``""`` if ``--out`` names a variable ``_``;
    ``MissingObject`` replaces every missing object. With ``retries`` the results of all ranks are those of
    one attempt, the newest in which rank 0 had sent some. Raises HydrogenError when nothing is saved under
    this id.
    """
    try:
        kept = gang_results.load_saved(run_log.run_dir(gang_id), rank)
    except OSError:
        known = gangs().get(gang_id)
        kept = known.received.of(rank) if known else gang_results.RankResults(rank, [])
    found = {name or kept.key_of_value: value for name, value in kept.everything().items()}
    if not found:
        why = "".join(f": {text}" for text in kept.errors.values())
        raise HydrogenError(f"no results of rank {rank} are saved for run {gang_id!r}{why}")
    return found


def plan(spec: JobSpec) -> Plan:
    """Return the plan of a gang without starting it; raises PlacementError if it is impossible.

    Gangs cannot be nested: a rank cannot start a gang.
    """
    refuse_nested()
    _check_file_limit(0)  # looking for plug-ins and capturing local modules open files, too
    plugins.check(spec)
    if (running := sessions.live(spec.session)) is not None:
        return running.plan
    return plugins.placement(spec.placement).plan_beside(spec, _plans())


def _plans() -> list[Plan]:
    """Return the plans of the gangs that run, and of the sessions."""
    gangs = [plan for gang, plan in list(_running.values()) if not gang.wait(0)]
    named = [session for session in sessions.sessions() if session.name != sessions.UNNAMED]
    return [*gangs, *(session.plan for session in named)]  # the ranks of %%infer make room


def launch_captured(
    captured: capture.Captured,
    spec: JobSpec,
    *,
    title: str,
    feed: WorkFeed | None = None,
    place: Placement | None = None,
    group: SweepGroup | None = None,
) -> Gang:
    """Start a gang, with ``feed`` if its ranks receive data, at ``place`` if given.

    ``group``: the tracker's group of the sweep that it belongs to. Raises PlacementError.
    """
    clock_zero_s, wall_time = time.monotonic(), time.time()
    planned = plan(spec) if place is None else place.plan(spec)
    placement = place or plugins.placement(spec.placement)
    _check_file_limit(spec.np if feed is not None else 0)
    # All refusals come first, before there is a gang.
    if captured.session is not None:
        captured.session.check()
    with _claimed_session(placement, spec, planned, captured, feed) as (session, notes):
        start = _starter(placement, spec, session)
        # Here and now: what a running gang sees must not change with the notebook's arrays.
        closure = (
            captured.payload
            if isinstance(placement, InKernelPlacement)
            else ClosureFile(captured.payload)
        )
        known = secret_values(os.environ, dict(spec.env), plugins.forwarded())
        run = _new_run(captured, spec, title, wall_time, known)
        for text in (*notes, *_outdated(), *captured.warnings, *_new_hints(captured)):
            run.emit(ev.Notice(0.0, "warning", text))
        if spec.track is not None:
            tracking.follow(run, spec.track, plugins.tracker(spec.track), captured.source, group)
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
    return start(run, job)


def _outdated() -> list[str]:
    """Return a note if the package was updated meanwhile, as by ``%pip install`` in the notebook."""
    if modified_ns(msg.__file__) == _IMPORTED_NS:
        return []
    return [
        "hydrogen_magic has been updated since this kernel imported it: restart the kernel, because new "
        "processes have the other version"
    ]


def _new_hints(captured: capture.Captured) -> list[str]:
    new = [text for text in captured.hints if text not in _shown_hints]
    _shown_hints.update(new)
    return new


def _check_file_limit(n_channels: int) -> None:
    try:
        file_limit.check(_LAUNCH_FILES + 2 * n_channels, "a gang")
    except file_limit.LimitError as error:
        raise PlacementError(file_limit.explained(error)) from None


def _new_run(
    captured: capture.Captured, spec: JobSpec, title: str, wall_time: float, known: Iterable[str]
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
        )
    )
    record.on_problem = lambda text: run.emit(ev.Notice(run.state.now_s, "warning", text))
    if isinstance(results, StoredResults):
        results.on_problem = record.on_problem
    for text in problems:
        run.emit(ev.Notice(0.0, "warning", text))
    return run


def register(gang: Gang) -> Gang:
    """Make ``gang`` known in this kernel."""
    _known[gang.id] = gang
    _forget_large_results()
    _recent.append(gang)
    return gang


def forget(gang: Gang) -> None:
    """Delete the record of an ended gang, and do not list it any more."""
    _known.pop(gang.id, None)
    if gang in _recent:
        _recent.remove(gang)
    run_log.delete(gang.id)


def _forget_large_results() -> None:
    """Let go of gangs with large results that the notebook has taken; their handles keep them."""
    for gang in list(_recent):
        if gang.received.of(gang.first_rank).is_taken and gang.received.nbytes > _LARGE_BYTES:
            _recent.remove(gang)


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


@contextmanager
def _claimed_session(
    placement: Placement | InKernelPlacement,
    spec: JobSpec,
    planned: Plan,
    captured: capture.Captured,
    feed: WorkFeed | None,
) -> Iterator[tuple[sessions.RankSession | None, tuple[str, ...]]]:
    """Give what :func:`_session_of` returns, to this gang alone; after an error others may have it."""
    with _claiming:  # other threads may launch, too
        session, notes = _session_of(placement, spec, planned, captured, feed)
        if session is not None:
            session.is_running = True
    try:
        yield session, notes
    except BaseException:
        if session is not None:
            session.is_running = False
        raise


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
    agents = placement.open_session(spec)
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
    if feed is None or not feed.key or not _keeps_ranks(placement):
        _end_kept_ranks(placement)
        return None
    kept = sessions.live(sessions.UNNAMED)
    if kept is None:
        agents = placement.open(spec)
        if not isinstance(agents, SessionAgentGroup):
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
    if kept is not None and not kept.is_running and _keeps_ranks(placement):
        kept.end("another gang has begun")


def _keeps_ranks(placement: Placement | InKernelPlacement) -> TypeGuard[Placement]:
    return isinstance(placement, Placement) and placement.on_this_machine


def _start_controller(
    agent_group: AgentGroup, loop: asyncio.AbstractEventLoop, run: GangRun, job: Job
) -> Gang:
    controller = GangController(run, job, agent_group, loop)
    gang = register(Gang(run, controller, static_picture))
    _running[gang.id] = gang, job.plan
    done = asyncio.run_coroutine_threadsafe(controller.run(), loop)
    done.add_done_callback(lambda future: _on_controller_end(run, future))
    return gang


def _on_controller_end(run: GangRun, done: Future[None]) -> None:
    _running.pop(run.id, None)
    error = "its controller was cancelled" if done.cancelled() else done.exception()
    if error is not None:  # a fault of ours; callers wait for the gang's end
        run.finish(HydrogenError(f"the gang was lost: {error!r}"))


def _run_here(placement: InKernelPlacement, run: GangRun, job: Job) -> Gang:
    """Run the one rank here and now; its exception stays the user's own, for ``%debug``."""
    gang = register(Gang(run, picture=static_picture))
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
    while (name := secrets.token_hex(2)) in _known:
        pass
    return name


def clean_up_abandoned() -> list[str]:
    """End processes that gangs of dead kernels may have left; return those gangs' ids, newest first.

    A gang ends with its kernel. Only if its agent was killed too, processes may be left that had made
    themselves independent of their rank.
    """
    abandoned = run_log.unfinished()
    end_abandoned(abandoned)
    folders.prune()
    return abandoned


def end_abandoned(gang_ids: Iterable[str]) -> None:
    """End processes of these gangs, whose owners no longer run, and finish their records."""
    launched = [
        found.launched for gang_id in gang_ids if (found := run_log.summary(gang_id)) is not None
    ]
    if launched:
        processes.kill_marked(processes.OWNER, {one.owner for one in launched})
    for one in launched:
        run_log.end_abandoned(one.gang)


# ── waiting for a gang ───────────────────────────────────────────────────────────────────────────


def attend(gang: Gang, view: View) -> None:
    """Show the gang until it has ended. The first interrupt stops the gang, the second kills it."""
    with interrupts_held() as interrupts, ExitStack() as endings:
        endings.callback(tracking.finish, [gang])
        endings.callback(lambda: view.close(gang.snapshot()))
        endings.callback(_end, gang)  # the first of them
        interrupts.take(gang)
        gang.attend()
        line = NotebookInputLine(gang, interrupts.while_asking)
        # A terminal shows the typed line where the view would be drawn.
        wait = partial(gang.wait, view.interval_s)
        ask = line.serve if draws_html() else lambda update: line.serve(wait)
        show(gang, view, ask=ask)


def _end(gang: Gang) -> None:
    """End a gang that would continue unseen, since its view failed."""
    if not gang.wait(0):
        gang.stop_for("cell")
        gang.wait()


class Followed(Protocol):
    """A gang of this kernel, or one that another kernel runs."""

    @property
    def id(self) -> str: ...
    def events(self, start: int = 0) -> Sequence[ev.Event]: ...
    def snapshot(self) -> GangState: ...
    def wait(self, timeout: float | None = None) -> bool: ...


def show(
    gang: Followed,
    view: View,
    seen: int = 0,
    ask: Callable[[Callable[[], bool]], None] = lambda update: None,
) -> None:
    """Update ``view``, which has ``seen`` so many events, until the gang has ended.

    ``ask`` is called after each update with a function that makes the next one, and returns whether the
    gang has ended; it may make several.
    """

    def update() -> bool:
        nonlocal seen
        ended = gang.wait(view.interval_s)
        fresh = gang.events(seen)
        seen += len(fresh)
        view.update(gang.snapshot(), fresh)
        return ended

    while not update():
        ask(update)


def follow(gang: Followed, view: View, and_then: Callable[[], None] = lambda: None) -> None:
    """Show the gang in a thread while other cells run, and call ``and_then`` when it has ended."""
    # Its display belongs under the requesting cell, so it is created here.
    seen = gang.events()
    view.update(gang.snapshot(), seen)

    def going_on() -> None:
        try:
            show(gang, view, len(seen))
            view.close(gang.snapshot())
        finally:  # the view may fail; the gang continues
            gang.wait()
            and_then()

    # In this context, ipykernel knows the cell of the thread's output.
    run, name = copy_context().run, f"hydrogen_magic view of gang {gang.id}"
    threading.Thread(target=run, args=(going_on,), name=name, daemon=True).start()


class _Stoppable(Protocol):
    """A gang, or several."""

    @property
    def is_stopping(self) -> bool: ...
    def stop(self, kill: bool = False) -> None: ...


class _Interrupts:
    """SIGINT while a gang is launched and watched: the first stops it, the second kills it."""

    def __init__(self) -> None:
        self.count = 0
        self.gang: _Stoppable | None = None
        self.before: Any = None
        """The signal handler at other times."""
        self._is_asking = False
        self._is_over = False
        """The gang has ended while its cell asked the user: the next signal is ours."""

    def __call__(self, signum: int, frame: object) -> None:
        if not self._is_over:
            self.count += 1
            self._stop_gang()
        if self._is_asking:
            raise KeyboardInterrupt

    @contextmanager
    def while_asking(self) -> Iterator[Callable[[], None]]:
        """Let SIGINT also raise; the result does it from another thread, when the gang has ended.

        Nothing is raised outside.
        """
        with suppress(KeyboardInterrupt):
            self._is_asking = True
            try:
                yield self._give_up_asking
            finally:
                self._is_asking = False
        self._is_asking = False  # the signal may have come just before it was set above

    def _give_up_asking(self) -> None:
        if self._is_asking and self.before is not None:
            self._is_over = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def take(self, gang: _Stoppable) -> None:
        """Stop ``gang`` (or a sweep) on SIGINT from now on, and at once if there already was one."""
        self.gang = gang
        self._stop_gang()

    def _stop_gang(self) -> None:
        if self.gang is not None and self.count > 0:
            self.gang.stop(kill=self.count > 1 or self.gang.is_stopping)


@contextmanager
def interrupts_held() -> Iterator[_Interrupts]:
    """Prevent SIGINT from raising between two lines of ours, which would leave a gang unattended.

    Interrupts stop the gang that ``take`` gets, as :func:`attend` inside of it does; without a gang they
    raise at the end. Only the main thread receives signals; in other threads this does nothing.
    """
    held = _Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield held  # the installed one is for the main thread's gang
        return
    outer = signal.getsignal(signal.SIGINT)
    if isinstance(outer, _Interrupts):
        yield outer
        return
    held.before = signal.signal(signal.SIGINT, held)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, held.before or signal.SIG_DFL)
    if held.count and held.gang is None:
        raise KeyboardInterrupt


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Undo :func:`interrupts_held` while there is no gang to stop: SIGINT interrupts the code itself."""
    held = signal.getsignal(signal.SIGINT)
    if (
        not isinstance(held, _Interrupts)
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, held.before or signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held)


# ── the public functions ─────────────────────────────────────────────────────────────────────────


def launch(
    function: Callable[..., Any],
    *args: Any,
    np: int | None = None,
    on: str | None = None,
    rendezvous: str | None = None,
    gpu: bool | None = None,
    pack: bool | None = None,
    env: Mapping[str, str] | None = None,
    retries: int = 0,
    timeout: float | None = None,
    wait: float | None = None,
    start_timeout: float = JobSpec.start_timeout_s,
    grace: float = JobSpec.grace_s,
    ports: str | None = None,
    max_closure: int = DEFAULT_MAX_CLOSURE_BYTES,
    run_name: str = "",
    track: str | None = None,
    session: str | None = None,
    ranks: Sequence[int] = (),
    push: Sequence[str] = (),
    idle: float | None = None,
    **kwargs: Any,
) -> Gang:
    """Call ``function(*args, **kwargs)`` on every rank of a new gang; return its Gang object at once.

    Args:
        function: may be defined in the notebook, a local module or a package; sent with all it uses.
        np: number of ranks; ``-N`` means N ranks on this machine. None: 2, or those of the session.
        on: name of a placement: ``"local"``, ``"spark"``, ``"inline"``, or one of a plug-in. None:
            ``"local"``, or that of the session.
        rendezvous: how ranks find each other: ``"torch"``, or what a plug-in provides. None: ``"torch"``, or
            that of the session.
        gpu: True: a GPU for every rank; False: none; None: GPUs if every rank can have one.
        pack: hosts of a cluster. True: as few as possible; False: as many as possible; None: as few as
            possible for ranks with GPUs of their own, otherwise the cluster's choice.
        env: environment variables of every rank.
        retries: how often to start all ranks again after a failure.
        timeout: seconds after which the gang is stopped; None: never.
        wait: seconds to wait for hosts and slots of a cluster. None: refuse a gang that is larger than the
            cluster, and wait for slots that other jobs hold without limit.
        start_timeout: seconds a rank may take until the function is called.
        grace: seconds a rank that reacts to a stop may clean up.
        ports: range of ports to listen on for other machines, such as ``"40000-40100"``; None: any.
        max_closure: size limit of captured data, in bytes.
        run_name: name of the run in lists; by default the function's.
        track: name of a tracker that gets parameters and metrics: ``"mlflow"``, ``"wandb"``, or one of a
            plug-in; None: none.
        session: name of a session: ranks that stay, with their variables, for later calls and cells.
            None: the ranks end with the call.
        ranks: ranks of the session that take part; without a session those on which ``breakpoint()`` opens
            the debugger. Empty: all.
        push: names whose value in the notebook replaces that of the session's ranks.
        idle: seconds without a call or cell after which the session ends. None: one hour.

    Raises:
        CaptureError: an object that the function uses cannot be sent.
        PlacementError: the ranks cannot run as requested.
        TypeError, ValueError: an option is invalid, or the function does not take these arguments.
    """
    _check_call(function, args, kwargs)
    fields = _fields_of(
        np=np,
        on=on,
        rendezvous=rendezvous,
        gpu=gpu,
        pack=pack,
        env=env,
        retries=retries,
        timeout=timeout,
        wait=wait,
        start_timeout=start_timeout,
        grace=grace,
        ports=ports,
        max_closure=max_closure,
        run_name=run_name,
        track=track,
        session=session,
        ranks=ranks,
        push=push,
        idle=idle,
    )
    spec = JobSpec(**fields)
    if session is not None:
        spec = sessions.fitted(spec, fields)
    planned = plan(spec)
    with sessions.explained(spec):
        captured = capture.capture_call(
            function,
            args,
            kwargs,
            max_closure_bytes=max_closure,
            ranks_have_gpu=planned.uses_gpu,
            session=sessions.capture_for(spec),
        )
    return launch_captured(captured, spec, title=getattr(function, "__qualname__", repr(function)))


def spec_of(**options: Any) -> JobSpec:
    """Return the job that :func:`launch` runs with these options, for a plan of it; without a session."""
    return JobSpec(**_fields_of(**options))


def _fields_of(np: Any = None, on: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the fields of a JobSpec. None stands for the default, but for those of :data:`_NEVER_NONE`."""
    if isinstance(np, Integral) and np < 0:
        if on not in (None, "local"):
            raise OptionValueError(
                f"np={np} means {-np} ranks on this machine, which contradicts on={on!r}: pass np={-np}, or "
                "drop on"
            )
        np = -np
    given = {"np": np, "on": on, **options}
    return {
        _FIELDS.get(name, name): _CONVERSIONS[name](value) if name in _CONVERSIONS else value
        for name, value in given.items()
        if value is not None or name in _NEVER_NONE
    }


def _check_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise OptionTypeError for a call that would fail on every rank before its first line."""
    if not callable(function):
        advice = "pass the function and its arguments, as in hm.run(train, model, np=2)"
        if isinstance(function, (str, os.PathLike)):
            advice = f"run a script by the magic: %distributed {function}"
        raise OptionTypeError(f"hm.run and hm.launch expect a function, got {function!r}; {advice}")
    try:  # a decorator may pass other arguments than it takes
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:  # C functions may have none, and annotations are any code
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        called = f"{getattr(function, '__qualname__', repr(function))}()"
        unknown = next((name for name in kwargs if name not in signature.parameters), None)
        if unknown is None:
            raise OptionTypeError(f"{called} does not take these arguments: {error}") from None
        known = [*inspect.signature(launch).parameters, "quiet", *signature.parameters]
        close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.65)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise OptionTypeError(
            f"{unknown!r} is neither an option of hm.run and hm.launch nor a parameter of {called}{hint}"
        ) from None


def _port_range(text: str) -> PortRange:
    if not isinstance(text, str):
        raise OptionTypeError(f"ports should be str, got {text!r}, a {type(text).__name__}")
    try:
        return PortRange.parse(text)
    except ValueError as error:
        raise OptionValueError(f"ports {error}") from None


_FIELDS = {
    "on": "placement",
    "timeout": "timeout_s",
    "wait": "wait_s",
    "start_timeout": "start_timeout_s",
    "grace": "grace_s",
    "max_closure": "max_closure_bytes",
    "run_name": "name",
    "ranks": "on_ranks",
    "idle": "idle_s",
}
"""Options of :func:`launch` whose fields of ``JobSpec`` have other names."""
_NEVER_NONE = ("start_timeout", "grace", "max_closure", "run_name", "ranks", "push")
"""Options for which None is refused: it might mean that there is no limit."""
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "env": variables,
    "ports": _port_range,
    "ranks": tuple,
    "push": tuple,
}


def run(function: Callable[..., Any], *args: Any, quiet: bool = False, **options: Any) -> Any:
    """Like :func:`launch`, but wait, show the gang meanwhile, and return rank 0's value.

    With ``quiet``, only output is shown. Raises the same errors as :func:`launch`, and RankFailedError,
    GangStoppedError and GangTimeoutError.
    """
    with interrupts_held():
        gang = launch(function, *args, **options)
        attend(gang, pick_view(quiet=quiet, actions=gang))
    return gang.result
