"""A gang as the user's object: its state, its results, and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hydrogen_magic.core.events import Event, RankStacks
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.profile_merge import MAX_STEPS
from hydrogen_magic.driver.rank_logs import RankOutputs
from hydrogen_magic.driver.state.gang_results import GangResults
from hydrogen_magic.driver.state.gang_state import GangState, RankState

if TYPE_CHECKING:
    import pandas

_STACKS_S = 3.0
"""How long to wait for ranks' stacks: ``faulthandler`` writes them within milliseconds."""
_POLL_S = 0.02
"""How often to look whether they have come."""

Picture = Callable[[GangState, Sequence[Event]], str]
"""Draws a gang that has ended as HTML."""


class GangControl(Protocol):
    """Carries out requests to a running gang, from any thread, without waiting."""

    def stop(self, reason: str, kill: bool = False) -> None: ...
    def ask_stacks(self) -> None: ...
    def record(self, on: bool) -> None: ...
    def profile(self, steps: int) -> None: ...
    def answer_input(self, rank: int, number: int, text: str, error: str = "") -> None: ...


class Gang:
    """All ranks of one run.

    Created by :func:`hydrogen_magic.launch` and by the magics. Thread-safe.
    """

    def __init__(
        self, run: GangRun, control: GangControl | None = None, picture: Picture | None = None
    ) -> None:
        self.id = run.id
        """Its ID, as in ``%gang show ID``."""
        self._run = run
        self._control = control
        self._picture = picture

    # ── state ──

    @property
    def state(self) -> str:
        """``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
        return self.snapshot().state

    @property
    def ranks(self) -> tuple[RankState, ...]:
        """The current state of every rank."""
        return self.snapshot().ranks

    @property
    def first_rank(self) -> int:
        """The rank whose value is the gang's: 0, or the first of ``--ranks``."""
        return next((rank.rank for rank in self.ranks if rank.phase != "idle"), 0)

    def snapshot(self) -> GangState:
        """Return the current state of the gang: a frozen value."""
        return self._run.state

    def events(self, start: int = 0) -> Sequence[Event]:
        """Return the events so far, oldest first, from the ``start``-th event on."""
        return self._run.events[start:]

    @property
    def metrics(self) -> pandas.DataFrame:
        """Logged values of the ranks: columns ``attempt rank step time_s`` and one per metric."""
        from hydrogen_magic.driver import metrics

        return metrics.frame(self.events())

    @property
    def logs(self) -> Mapping[int, str]:
        """All output of each rank to stdout and stderr, in the order of its arrival; read when it is used."""
        return RankOutputs(self._run.rank_logs, len(self.ranks))

    @property
    def folder(self) -> Path:
        """The folder of its record."""
        return self._run.rank_logs.folder

    def log_path(self, rank: int) -> Path:
        """Return the file with all output of the rank; it does not exist before the first output."""
        return self._run.rank_logs.path(rank)

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Write recorded spans as Chrome trace JSON (open it in Perfetto); return the path."""
        from hydrogen_magic.driver import chrome_trace

        return chrome_trace.write_chrome_trace(self.events(), path)

    @property
    def kept_timelines(self) -> list[Path]:
        """Timelines that libraries wrote themselves, JSON for Perfetto, in the order of recording.

        There is one for each time that recording was turned on, complete when that is over:
        ``…-1.json``, ``…-2.json``; of later attempts ``…-retry1-1.json``.
        """
        written = self.folder.glob("*-timeline-*.json")
        return sorted(written, key=lambda path: path.stat().st_mtime)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of every running rank, by ``faulthandler``.

        After the end: the last ones that were taken.
        """
        before = len(self.events())
        if self._running is not None:
            self.ask_stacks()
            alive = {rank.rank for rank in self.ranks if not rank.is_over}
            until_s = time.monotonic() + _STACKS_S
            while not alive <= self._stacks_since(before).keys() and time.monotonic() < until_s:
                time.sleep(_POLL_S)
        return self._stacks_since(before) or {r.rank: r.stacks for r in self.ranks if r.stacks}

    def _stacks_since(self, start: int) -> dict[int, str]:
        fresh = (e for e in self.events(start) if isinstance(e, RankStacks))
        return {event.rank: event.text for event in fresh}

    def ask_stacks(self) -> None:
        """Request :meth:`stacks` without waiting: they arrive as events."""
        if self._running is not None:
            self._running.ask_stacks()

    def record(self, on: bool = True) -> None:
        """Start or stop recording spans (forward, backward, data wait, …) on the ranks.

        Does not wait. ``--timeline`` records from the start. Raises HydrogenError if another process
        controls the gang (``--outlive``).
        """
        if self._running is not None:
            self._running.record(bool(on))

    def profile(self, steps: int = 5) -> None:
        """Run the torch profiler on every rank over its next ``steps`` optimizer steps.

        Does not wait: the merged trace of all ranks is in the gang's record when ``Profiling`` events
        say so, and its outermost spans are in the timeline. Raises ValueError for other than 1 to
        1000 steps, and HydrogenError if another process controls the gang (``--outlive``).
        """
        if not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"profile(steps=…) should be 1 to {MAX_STEPS}, got {steps!r}")
        if self._running is not None:
            self._running.profile(steps)

    def attend(self) -> None:
        """Announce that the caller answers what ranks request of the user, and takes the results."""
        self._run.is_attended = True
        self.received.are_awaited = True

    def answer_input(self, rank: int, number: int, text: str, error: str = "") -> None:
        """Answer a request of a rank: a line, or why there is none. Does not wait."""
        if self._running is not None:
            self._running.answer_input(rank, number, text, error)

    @property
    def _running(self) -> GangControl | None:
        """The gang's controller, None after its end."""
        return None if self.snapshot().is_terminal else self._control

    # ── end ──

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gang has ended and nothing of it is left; False if ``timeout`` seconds passed."""
        return self._run.ended.wait(timeout)

    def wait_for_tracker(self, timeout: float | None = None) -> bool:
        """Wait until its tracker (``--track``) has everything or has failed, which a notice reports.

        Return False if ``timeout`` seconds passed before.
        """
        return self._run.tracked.wait(timeout)

    def stop(self, kill: bool = False) -> None:
        """Ask the ranks to end and then force them; with ``kill`` at once. Does not wait.

        Raises HydrogenError if another process controls the gang (``--outlive``).
        """
        self.stop_for("user", kill)

    def stop_for(self, reason: str, kill: bool = False) -> None:
        """Stop it for a reason that :class:`~hydrogen_magic.core.events.StopRequested` names."""
        if self._control is not None:
            self._control.stop(reason, kill)

    def raise_for_state(self) -> None:
        """Raise the error of a failed, stopped or timed-out gang; otherwise return."""
        error = self._run.error()
        if error is not None:
            raise error

    # ── results ──

    @property
    def result(self) -> Any:
        """The value of rank 0, or of the first of ``--ranks``. Waits for the end.

        Raises the errors of :meth:`raise_for_state`, and ResultError if the value did not arrive.
        """
        return self._results_at_end().value(self.first_rank)

    @property
    def results(self) -> list[Any]:
        """Every rank's value, in rank order; a ResultError in place of one that did not arrive.

        Waits for the end; raises the errors of :meth:`raise_for_state`.
        """
        results = self._results_at_end()
        return [results.value_or_error(rank.rank) for rank in self.ranks]

    @property
    def out(self) -> Mapping[str, Any]:
        """The variables named by ``--out`` of rank 0, or of the first of ``--ranks``.

        A variable that did not arrive is missing; looking it up raises ResultError with the reason. Waits
        for the end; raises the errors of :meth:`raise_for_state`.
        """
        return self._results_at_end().of(self.first_rank).variables()

    @property
    def received(self) -> GangResults:
        """The results that have arrived so far."""
        return self._run.results

    def _results_at_end(self) -> GangResults:
        self.received.are_awaited = True
        try:
            self.wait()
        finally:  # the user may interrupt the wait, and leave the gang alone
            self.received.are_awaited = False
        self.raise_for_state()
        return self.received

    def __repr__(self) -> str:
        state = self.snapshot()
        # A saved notebook keeps what a cell displays.
        when = "" if state.is_terminal else time.strftime(" at %H:%M:%S")
        ranks = f"{counted(len(state.ranks), 'rank')} on {state.placement}"
        return f"<Gang {self.id}: {ranks}, {state.state}{when}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return IPython's display data: a static picture after the end; before, its view is displayed."""
        state, shown = self.snapshot(), {"text/plain": repr(self)}
        if state.is_terminal and self._picture is not None:
            shown["text/html"] = self._picture(state, self.events())
        return shown
