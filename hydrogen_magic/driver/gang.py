"""A gang as the user's object: its state, its results, and its end."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hydrogen_magic.core import run_log
from hydrogen_magic.core.events import Event, Output, RankStacks
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.driver.profile_merge import MAX_STEPS
from hydrogen_magic.driver.state import failure_report
from hydrogen_magic.driver.state.gang_results import GangResults
from hydrogen_magic.driver.state.gang_state import GangState, RankState, fold
from hydrogen_magic.driver.state.output_lines import final_lines
from hydrogen_magic.errors import (
    GangStoppedError,
    GangTimeoutError,
    HydrogenError,
    RankFailedError,
    RendezvousError,
)
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.serialization.result_stream import ResultPart, label

if TYPE_CHECKING:
    import pandas

__all__ = ["Control", "Gang"]

_LAST_LINES = 10
"""How much of the culprit's output an error shows."""
_TAIL_BYTES = 1 << 16
"""Size of the end of a log that is searched for those lines."""
_SHOWN_CHARS = 8 << 20
"""Live output kept in memory; the ranks' log files have all of it."""
_STACKS_S = 3.0
"""How long to wait for ranks' stacks: ``faulthandler`` writes them within milliseconds."""


Picture = Callable[[GangState, Sequence[Event]], str]
"""Draws a gang that has ended as HTML."""


class Control(Protocol):
    """Controls the gang; its methods can be called from any thread."""

    def stop(self, reason: str, kill: bool = False) -> None: ...
    def ask_stacks(self) -> None: ...
    def record(self, on: bool) -> None: ...
    def profile(self, steps: int) -> None: ...


class Gang:
    """All ranks of one run.

    Created by :func:`hydrogen_magic.launch` and by the magics. Thread-safe.
    """

    def __init__(
        self,
        gang_id: str,
        gang_record: run_log.Record,
        mask: Mask | None = None,
        picture: Picture | None = None,
    ) -> None:
        self.id = gang_id
        self._picture = picture
        self._mask = mask or Mask()
        self._record = gang_record
        self._events: list[Event] = []
        self._state = GangState(gang=gang_id)
        self._outputs: deque[int] = deque()
        """Indices of output events that are still kept, oldest first."""
        self._output_chars = 0
        self.received = GangResults()
        """Results of the ranks; after a failure or a stop they are in the run log instead."""
        self._saved_results = ""
        """Location of results that the notebook did not get."""
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._emitting = threading.RLock()
        """Reentrant: a record that can no longer be written reports this by an event."""
        self._error: BaseException | None = None
        self._control: Control | None = None

    # ── state ──

    @property
    def state(self) -> str:
        """``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
        return self._state.state

    @property
    def ranks(self) -> tuple[RankState, ...]:
        """The current state of every rank."""
        return self._state.ranks

    def snapshot(self) -> GangState:
        """Return the current state of the gang: a frozen value."""
        return self._state

    def events(self, start: int = 0) -> list[Event]:
        """Return the events so far, oldest first, from the ``start``-th event on."""
        return self._events[start:]

    @property
    def metrics(self) -> pandas.DataFrame:
        """Logged values of the ranks: columns ``attempt rank step time_s`` and one per metric."""
        from hydrogen_magic.driver import metrics

        return metrics.frame(self._events)

    @property
    def logs(self) -> Mapping[int, str]:
        """All output of each rank to stdout and stderr, in the order of its arrival."""
        return {rank.rank: self._log(rank.rank) for rank in self.ranks}

    @property
    def folder(self) -> Path:
        """The directory of its run log."""
        return self._record.path

    def log_path(self, rank: int) -> Path:
        """Return the file with all output of the rank; it does not exist before the first output."""
        return self._record.path / f"rank-{rank}.log"

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Write recorded spans as Chrome trace JSON (open it in Perfetto); return the path."""
        from hydrogen_magic.driver import chrome_trace

        return Path(chrome_trace.write_chrome_trace(self._events, path))

    @property
    def kept_timelines(self) -> list[Path]:
        """Timelines that libraries wrote themselves, JSON for Perfetto, in the order of recording."""
        from hydrogen_magic.driver import chrome_trace

        return chrome_trace.library_timelines(self._record.path)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of all threads of every running rank, by ``faulthandler``."""
        before = len(self._events)
        if self._running is not None:
            self.ask_stacks()
            alive = {rank.rank for rank in self.ranks if not rank.is_over}
            with self._changed:
                self._changed.wait_for(
                    lambda: alive <= self._stacks_since(before).keys(), _STACKS_S
                )
        return self._stacks_since(before) or {r.rank: r.stacks for r in self.ranks if r.stacks}

    def ask_stacks(self) -> None:
        """Request :meth:`stacks` without waiting: they arrive as events."""
        if self._running is not None:
            self._running.ask_stacks()

    def record(self, on: bool = True) -> None:
        """Start or stop recording spans (forward, backward, data wait, …) on the ranks.

        Does not wait. ``--timeline`` records from the start.
        """
        if self._running is not None:
            self._running.record(bool(on))

    def profile(self, steps: int = 5) -> None:
        """Run the torch profiler on every rank over its next ``steps`` optimizer steps.

        Does not wait: the merged trace of all ranks is in the gang's record when ``Profiling`` events
        say so, and its outermost spans are in the timeline. Raises ValueError for other than 1 to
        1000 steps.
        """
        if not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"profile(steps=…) should be 1 to {MAX_STEPS}, got {steps!r}")
        if self._running is not None:
            self._running.profile(steps)

    @property
    def _running(self) -> Control | None:
        """The gang's controller, None after its end."""
        return None if self._state.is_terminal else self._control

    # ── end ──

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the gang has ended and nothing of it is left; False if ``timeout`` seconds passed."""
        return self._ended.wait(timeout)

    def stop(self, kill: bool = False) -> None:
        """Ask the ranks to end and then force them; with ``kill`` at once. Does not wait."""
        if self._control is not None:
            self._control.stop("user", kill)

    def raise_for_state(self) -> None:
        """Raise the error of a failed, stopped or timed-out gang; otherwise return."""
        state = self._state
        if self._error is not None:
            raise self._error
        if state.state == "FAILED":
            if state.culprit is None:
                is_rendezvous = state.fault and state.fault.type == RendezvousError.__name__
                reason = state.fault.message if state.fault else state.reason
                raise (RendezvousError if is_rendezvous else HydrogenError)(reason)
            report = failure_report.report(
                state, self._last_lines(state.culprit), self._saved_results
            )
            raise RankFailedError(state.reason, rank=state.culprit, report=report)
        if state.state == "STOPPED":
            kind = GangTimeoutError if state.stop_reason == "timeout" else GangStoppedError
            raise kind(state.reason)

    # ── results ──

    @property
    def result(self) -> Any:
        """Rank 0's value. Waits for the end.

        Raises the errors of :meth:`raise_for_state`, and ResultError if the value did not arrive.
        """
        self.wait()
        self.raise_for_state()
        return self.received.value(0)

    @property
    def results(self) -> list[Any]:
        """Every rank's value, in rank order; a ResultError in place of one that did not arrive.

        Waits for the end; raises the errors of :meth:`raise_for_state`.
        """
        self.wait()
        self.raise_for_state()
        return [self.received.value_or_error(rank.rank) for rank in self.ranks]

    @property
    def out(self) -> Mapping[str, Any]:
        """Rank 0's variables named by ``--out``.

        A variable that did not arrive is missing; looking it up raises ResultError with the reason. Waits
        for the end; raises the errors of :meth:`raise_for_state`.
        """
        self.wait()
        self.raise_for_state()
        return self.received.of(0).variables()

    def __repr__(self) -> str:
        state = self._state
        return f"<Gang {self.id}: {len(state.ranks)} ranks on {state.placement}, {state.state}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return IPython's display data: a static picture after the end; before, its view is displayed."""
        shown = {"text/plain": repr(self)}
        if self._state.is_terminal and self._picture is not None:
            shown["text/html"] = self._picture(self._state, self._events)
        return shown

    # ── for the controller ──

    def attach(self, control: Control) -> None:
        """Set the gang's controller."""
        self._control = control

    def emit(self, event: Event) -> None:
        """Add ``event``, with masked secrets, to the state, to the list, and to the record on disk."""
        event = self._mask.event(event)
        with self._emitting:  # the dispatcher has its own thread
            self._state = fold(self._state, event)
            self._events.append(event)
            self._record.append(event)
            if isinstance(event, Output):
                self._thin_output(len(event.text))
        with self._changed:
            self._changed.notify_all()

    def masked(self, text: str) -> str:
        """Return ``text`` without secrets."""
        return self._mask.text(text)

    def deliver(self, rank: int, part: ResultPart, section: Payload) -> None:
        """Store a part of a rank's results; it is unpickled on demand."""
        part = replace(part, error=self._mask.text(part.error))
        self.received.add(rank, self._state.attempt, part, section)

    def has_results_to_save(self, has_succeeded: bool) -> bool:
        """Whether :meth:`save_results` has something to do."""
        return not self._saved_results and self.received.of(0).is_worth_saving(has_succeeded)

    def save_results(self, has_succeeded: bool) -> str:
        """Save rank 0's results in the run log if the notebook may not get all of them.

        That is the case after a failure or a stop, and for incomplete results. Returns a sentence about it,
        empty if there is nothing to save.
        """
        if not self.has_results_to_save(has_succeeded):
            return self._saved_results
        names = ", ".join(map(label, self.received.of(0).names))
        is_whole = not has_succeeded and self._state.ranks[0].result_bytes is not None
        which = "the results of rank 0" if is_whole else "partial results"
        try:
            self.received.save(0, self._record.path)
        except OSError as error:
            where = f"kept in this kernel's memory only ({error})"
        else:
            where = "saved in the run log"
            if not has_succeeded:
                self.received.clear()
        load = f"hydrogen_magic.load_results({self.id!r})"
        self._saved_results = f"{which} ({names}) are {where}; load them with {load}"
        return self._saved_results

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing of the gang is left; wake up waiting threads."""
        self._error = error
        self._record.close()
        self._ended.set()

    # ── internals ──

    def _thin_output(self, chars: int) -> None:
        """Drop the oldest live output if there is too much: a rank may print for days."""
        self._outputs.append(len(self._events) - 1)
        self._output_chars += chars
        while self._output_chars > _SHOWN_CHARS:
            index = self._outputs.popleft()
            old = self._events[index]
            assert isinstance(old, Output)
            self._output_chars -= len(old.text)
            skipped = old.skipped_bytes + len(old.text.encode("utf-8", "replace"))
            lines = old.skipped_lines + old.text.count("\n")
            self._events[index] = replace(old, text="", skipped_bytes=skipped, skipped_lines=lines)

    def _last_lines(self, rank: int) -> list[str]:
        path = self.log_path(rank)
        if not path.exists() or path.stat().st_size == 0:
            return final_lines(self._shown(rank))[-_LAST_LINES:]
        with path.open("rb") as file:  # a log may be gigabytes long
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return final_lines(file.read().decode("utf-8", "replace"))[-_LAST_LINES:]

    def _log(self, rank: int) -> str:
        path = self.log_path(rank)
        if path.exists():
            return path.read_bytes().decode("utf-8", "replace")
        return self._shown(rank)

    def _shown(self, rank: int) -> str:
        shown = (e for e in self._events if isinstance(e, Output) and e.rank == rank)
        return "".join(event.text for event in shown)

    def _stacks_since(self, start: int) -> dict[int, str]:
        fresh = (e for e in self._events[start:] if isinstance(e, RankStacks))
        return {event.rank: event.text for event in fresh}
