"""Sessions: ranks that stay between cells, with their variables, process groups and devices.

Each cell is a gang of its own, with its run log, view, Stop and culprit. Its agents keep the ranks, and the
:class:`RankSession` here knows what they hold.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hydrogen_magic import plugins
from hydrogen_magic.capture import Captured, SessionCapture
from hydrogen_magic.capture.ownership import SessionNames, SessionUse, Version
from hydrogen_magic.capture.versions import note_brought_back, sharing_with, versions_of
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.core.units import counted, first_of
from hydrogen_magic.driver.placements import AgentGroup
from hydrogen_magic.driver.state.formatting import duration, ranks_text
from hydrogen_magic.errors import CaptureError, HydrogenError, OptionValueError
from hydrogen_magic.serialization.identity import Originals

ENDED_BY_USER = "ended by %gang end"
UNNAMED = ""
"""Name of the session whose ranks ``%%infer`` keeps, and which no cell can use."""
_END_S = 30.0
"""An agent that is not needed any more is ended within ten seconds."""
_MOST_NAMES = 8
"""Names in a message."""
_FIXED = {
    "np": "--np",
    "placement": "--on",
    "rendezvous": "--with",
    "gpu": "--gpu or --cpu",
    "pack": "--pack or --spread",
}
"""Fields that all cells of a session share, and the options that set them."""


@dataclass(frozen=True)
class RankHoldings:
    """What a rank of a session holds."""

    names: Mapping[str, ev.HeldName] = field(default_factory=dict)
    rss_bytes: int = 0
    gpu_memory_bytes: int | None = None
    is_joined: bool = False
    """As in :class:`~hydrogen_magic.core.events.NamesChanged`."""

    def after(self, event: ev.NamesChanged) -> RankHoldings:
        """Return the holdings after a cell."""
        names = {**self.names, **event.received, **event.assigned}
        for name in event.deleted:
            names.pop(name, None)
        return RankHoldings(names, event.rss_bytes, event.gpu_memory_bytes, event.is_joined)


class RankSession:
    """The ranks of one session. Its state changes on the hub's loop; other threads read it."""

    def __init__(
        self,
        spec: JobSpec,
        plan: Plan,
        agents: AgentGroup,
        loop: asyncio.AbstractEventLoop,
        captured: Captured,
    ) -> None:
        """``spec``, ``plan``, ``captured``: those of its first cell."""
        self.name = spec.session or UNNAMED
        self.key = f"session-{secrets.token_hex(8)}"
        """Identifies it for its agents."""
        self.spec = spec
        """Of its first cell."""
        self.plan = plan
        self.agents = agents
        self.since = time.time()
        """Unix time of its start."""
        self._why_ended = ""
        self.is_running = False
        """A cell runs."""
        self._gang = ""
        """The gang of this cell, once it has begun."""
        self.ranks = {rank: RankHoldings() for rank in range(spec.np)}
        """What each rank holds."""
        self.names = captured.session.names if captured.session else SessionNames()
        """Which side has changed a name."""
        self.originals = captured.originals
        """Numbers of the notebook's objects that the ranks have."""
        self.hosts: dict[int, str] = {}
        """Of the ranks."""
        self.idle_since_s = time.monotonic()
        self.idle_s = spec.idle_s
        """Time without a cell after which it ends."""
        self._n_cells = 0
        self._epoch = 0
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        self._stop_cell: Callable[[str, bool], None] = lambda reason, kill: agents.kill()
        agents.on_lost = self._on_lost

    # ── from any thread ──

    @property
    def why_ended(self) -> str:
        """Why it has ended; empty before that."""
        is_closed = self._loop.is_closed()  # with all agents, before it could call :meth:`_on_lost`
        return self._why_ended or ("all agents of this process were ended" if is_closed else "")

    def refuse_if_running(self) -> None:
        """Raise HydrogenError while a cell runs."""
        if self.is_running:
            cell = f" {self._gang}" if self._gang else ""
            raise HydrogenError(
                f"session {self.name!r} runs another cell: wait for it with %gang wait{cell}, or stop it "
                f"with %gang stop{cell}"
            )

    def next_cell(self, spec: JobSpec, captured: Captured) -> CellRun:
        """Return the session's next cell, which has to be launched."""
        self.is_running = True
        self.idle_s = spec.idle_s
        if self.name == UNNAMED:
            return CellRun(self, None, tuple(range(self.spec.np)), None)
        ranks = spec.on_ranks or tuple(range(self.spec.np))
        is_joined = all(rank.is_joined for rank in self.ranks.values())
        is_whole = len(ranks) == self.spec.np
        cell = msg.SessionCell(self._n_cells, self._epoch, is_whole, is_joined)
        self._n_cells += 1
        return CellRun(self, cell, ranks, captured.session)

    def end(self, why: str = ENDED_BY_USER) -> None:
        """End it; return once the request to end has been sent to its ranks."""
        ending = asyncio.run_coroutine_threadsafe(self._end(why), self._loop)
        ending.result(timeout=_END_S)

    def start_again(self, spec: JobSpec, plan: Plan) -> None:
        """Be the session of the next ``%%infer``, whose ranks may be new ones."""
        self.spec, self.plan, self.since = spec, plan, time.time()
        self.ranks = {rank: RankHoldings() for rank in range(spec.np)}

    # ── on the loop ──

    def finish_cell(
        self, reports: Mapping[int, ev.NamesChanged], has_failed: bool, cause: str
    ) -> str:
        """Take what the ranks report at the end of a cell; return a text if the session is over.

        ``cause``: which rank ended first, and how; empty if none did.
        """
        self.is_running, self._gang = False, ""
        entered = {report.n_collectives for report in reports.values()}
        has_left = any(report.has_left_groups for report in reports.values())
        if has_left or (has_failed and len(entered) > 1):  # else ranks agree on the next collective
            self._epoch += 1
        for rank, report in reports.items():
            self.ranks[rank] = self.ranks[rank].after(report)
        if self.agents.is_retained and not self.why_ended:
            self.idle_since_s = time.monotonic()
            self._timer = self._loop.call_later(self.idle_s, self._end_if_idle)
            return ""
        # Ranks that returned before the kill still wait.
        self._ending = asyncio.ensure_future(self.agents.end_session())
        have_started = "its ranks have ended with a cell"
        why = f"{have_started if self.hosts else 'no rank has started'}{cause and ': '}{cause}"
        self._why_ended = self._why_ended or why
        if self.name == UNNAMED:
            return ""
        return f"session {self.name!r} has ended: {self.why_ended}{self.loss}"

    @property
    def title(self) -> str:
        """Its name in lists."""
        return self.name or "%%infer"

    @property
    def place(self) -> str:
        """Where its ranks are: ``local``, or what they hold of a cluster."""
        if plugins.placement(self.spec.placement).on_this_machine:
            return self.spec.placement
        hosts = ", ".join(sorted(set(self.hosts.values())))
        return (
            f"{self.spec.placement}: {counted(self.spec.np, 'slot')} on {hosts or 'hosts to come'}"
        )

    @property
    def memory_bytes(self) -> int:
        """Memory of all ranks at the end of the last cell."""
        return sum(rank.rss_bytes for rank in self.ranks.values())

    @property
    def gpu_memory_bytes(self) -> int:
        """GPU memory of all ranks at the end of the last cell."""
        return sum(rank.gpu_memory_bytes or 0 for rank in self.ranks.values())

    @property
    def shown_names(self) -> str:
        """The variables that any rank holds, shortened: no functions, classes and modules."""
        held = {name: one for rank in self.ranks.values() for name, one in rank.names.items()}
        names = sorted(n for n, one in held.items() if one.kind == "value" and n[:1] != "_")
        return first_of(names, _MOST_NAMES)

    @property
    def loss(self) -> str:
        """What is lost with its ranks, as the end of a sentence."""
        return f"; lost with its ranks: {self.shown_names}" if self.shown_names else ""

    def begin_cell(self, gang: str, stop: Callable[[str, bool], None]) -> None:
        """A cell begins, which ``stop`` stops."""
        self._gang, self._stop_cell = gang, stop
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_if_idle(self) -> None:
        if not self.is_running:  # else its next cell has been launched, and begins soon
            self._begin_end(f"{duration(self.idle_s)} without a cell")

    def _on_lost(self, why: str) -> None:
        """The ranks that waited for a cell are lost; for ``%%infer``, the agents start new ones."""
        if self.name != UNNAMED or not self.is_running:
            self._begin_end(why)

    def _begin_end(self, why: str) -> None:
        """End it in a task, which has to be referenced while it runs."""
        self._ending = asyncio.ensure_future(self._end(why))

    async def _end(self, why: str) -> None:
        if self.why_ended:
            return
        self._cancel_timer()
        self._why_ended = why
        if not self.is_running:
            await self.agents.end_session()
        elif why == ENDED_BY_USER:
            self._stop_cell("session", True)  # its ranks end with the cell
        else:
            self.agents.kill()


class CellRun:
    """One cell: see :class:`hydrogen_magic.driver.placements.SessionRun`."""

    def __init__(
        self,
        session: RankSession,
        cell: msg.SessionCell | None,
        ranks: tuple[int, ...],
        use: SessionUse | None,
    ) -> None:
        self.key = session.key
        self.cell = cell
        self.ranks = ranks
        self._session = session
        self._use = use
        self._reports: dict[int, ev.NamesChanged] = {}
        self._has_failed = False
        self._has_raised: set[int] = set()
        """Ranks that stay after an exception."""
        self._cause = ""
        """Which rank ended first, and how."""

    def begin(self, gang: str, stop: Callable[[str, bool], None]) -> None:
        self._session.begin_cell(gang, stop)

    def note(self, event: ev.Event) -> None:
        if isinstance(event, ev.RankStarted):
            self._session.hosts[event.rank] = event.host
        if isinstance(event, ev.NamesChanged):
            self._reports[event.rank] = event
        if isinstance(event, ev.RankFailed):
            self._has_raised.add(event.rank)
        if isinstance(event, ev.RankExited) and event.exit_code != 0:
            self._has_failed = True
            self._cause = self._cause or self._end_of(event)

    def _end_of(self, exited: ev.RankExited) -> str:
        """Return how the process of a rank ended; empty for one that may stay."""
        if exited.signal_name:
            when = " when the cell was stopped" if exited.asked else ""
            return f"rank {exited.rank} was killed by {exited.signal_name}{when}"
        if exited.rank in self._has_raised:
            return ""
        return f"rank {exited.rank} exited with status {exited.exit_code}"

    def finish(self) -> str:
        if self._use is not None:
            names, is_whole = self._session.names, len(self.ranks) == self._session.spec.np
            names.after_cell(self._use, self._reports)
            names.modules.after_cell(self._use.files, is_whole=is_whole, failed=self._has_failed)
        return self._session.finish_cell(self._reports, self._has_failed, self._cause)


# ── the sessions of this kernel ──────────────────────────────────────────────────────────────────

_sessions: dict[str, RankSession] = {}
"""By name; ended ones until the name is used again."""
_lock = threading.Lock()


def sessions() -> list[RankSession]:
    """Return the live sessions of this kernel, oldest first."""
    return [session for session in list(_sessions.values()) if not session.why_ended]


def live(name: str | None) -> RankSession | None:
    """Return the live session of this name, None without one."""
    session = None if name is None else _sessions.get(name)
    return None if session is None or session.why_ended else session


def capture_for(spec: JobSpec) -> SessionCapture | None:
    """Return what a capture needs to know of the session of a cell; None if it has none.

    Raises HydrogenError while another cell runs: what the ranks hold is not known then.
    """
    if spec.session is None:
        return None
    session = live(spec.session)
    if session is not None:
        session.refuse_if_running()
    names, originals = (
        (session.names, session.originals) if session else (SessionNames(), Originals())
    )
    return SessionCapture(names, originals, _ranks_of(spec), spec.push)


def _ranks_of(spec: JobSpec) -> frozenset[int]:
    """Return the ranks that run a cell."""
    return frozenset(spec.on_ranks or range(spec.np))


def sharing(spec: JobSpec, namespace: Mapping[str, Any]) -> dict[str, Version]:
    """Return the versions of names whose values the variables of ``--out`` may change in place."""
    session = live(spec.session)
    if session is None:
        return {}
    found = sharing_with(session.names, spec.out, session.originals)
    names = [name for name in found if name in namespace]
    return versions_of(names, namespace, session.originals) if names else {}


def brought_back(
    spec: JobSpec,
    names: Sequence[str],
    namespace: Mapping[str, Any],
    sharing: Mapping[str, Version],
) -> None:
    """Note that the ranks' values of ``names`` are now those of the notebook, too.

    ``sharing``: what :func:`sharing` has returned before.
    """
    session = live(spec.session)
    if session is not None and names:
        known, originals = session.names, session.originals
        note_brought_back(known, names, sharing, namespace, originals, _ranks_of(spec))


def register(session: RankSession) -> list[str]:
    """Make ``session`` known; return notes about an earlier one of its name that ended by itself."""
    with _lock:
        before = _sessions.pop(session.name, None)
        _sessions[session.name] = session
    if before is None or before.why_ended == ENDED_BY_USER or session.name == UNNAMED:
        return []
    why = f"{before.why_ended}{before.loss}"
    n_ranks, n_before = session.spec.np, before.spec.np
    size = "" if n_ranks == n_before else f" with --np {n_ranks} (the last one: {n_before})"
    return [f"a new session {session.name!r} begins{size}; the last one ended: {why}"]


def give_back(session: RankSession) -> None:
    """Let other cells use ``session`` after a cell could not be launched; without ranks, forget it."""
    with _lock:
        session.is_running = False
        if not session.agents.is_retained and _sessions.get(session.name) is session:
            del _sessions[session.name]


@contextmanager
def explained(spec: JobSpec) -> Iterator[None]:
    """Add to an error about an undefined name where the session had it."""
    try:
        yield
    except CaptureError as error:
        session = None if spec.session is None else _sessions.get(spec.session)
        advice = _advice(session, str(error))
        if type(error) is not CaptureError or not advice:
            raise
        raise CaptureError(f"{error}\n{advice}") from None


def _advice(session: RankSession | None, message: str) -> str:
    if session is None:
        return ""
    if session.why_ended:
        return f"session {session.name!r} has ended: {session.why_ended}{session.loss}"
    for name in re.findall(r"^`(\w+)`", message, re.MULTILINE):  # not those that it suggests
        holders = [rank for rank, one in session.ranks.items() if name in one.names]
        if 0 < len(holders) < len(session.ranks):
            listed = ",".join(map(str, holders))
            return (
                f"`{name}` is on {ranks_text(holders)} only: to use it there, add --ranks {listed}"
            )
    return ""


def fitted(spec: JobSpec, given: Collection[str]) -> JobSpec:
    """Return ``spec`` with the options that its session's first cell has chosen.

    ``given``: the fields of ``spec`` that the user has set for this cell. Raises OptionValueError if they
    differ from the session's, and for options that a session does not have.
    """
    if spec.retries and "retries" in given:
        raise OptionValueError("a session's cells are not retried: drop --retries, or --session")
    spec = replace(spec, retries=0)
    session = live(spec.session)
    if session is not None:
        _check(session, spec, given)
        fixed = {name: getattr(session.spec, name) for name in _FIXED}
        env = tuple({**dict(session.spec.env), **dict(spec.env)}.items())
        idle_s = spec.idle_s if "idle_s" in given else session.idle_s
        return replace(spec, **fixed, env=env, idle_s=idle_s)
    if spec.on_ranks:
        listed = ",".join(map(str, spec.on_ranks))
        raise OptionValueError(
            f"--ranks {listed}: there is no session {spec.session!r} yet; its first cell runs on all ranks"
        )
    _check_ranks(spec, spec.np)
    return spec


def _check(session: RankSession, spec: JobSpec, given: Collection[str]) -> None:
    """Raise OptionValueError if a cell asks for other ranks than the session has."""
    for name, option in _FIXED.items():
        wanted, has = getattr(spec, name), getattr(session.spec, name)
        if name in given and wanted != has:
            raise OptionValueError(
                f"session {session.name!r} was started with {option} {_shown(has)}, not "
                f"{_shown(wanted)}: drop {option}, or end the session with %gang end {session.name}"
            )
    _check_ranks(spec, session.spec.np)


def _check_ranks(spec: JobSpec, np: int) -> None:
    for option, ranks in (("--ranks", spec.on_ranks), ("--display", spec.display)):
        beyond = [rank for rank in ranks if not 0 <= rank < np]
        if beyond:
            text = f"session {spec.session!r} has ranks 0 to {np - 1}"
            raise OptionValueError(f"{option} {beyond[0]}: {text}")


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)
