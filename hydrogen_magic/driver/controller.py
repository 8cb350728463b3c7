"""Control of one gang from its plan to its last process: start, failure, stop, retry.

Runs on the hub's loop, like all other gangs of this kernel. Only events and the clock lead to actions, and
pure functions decide (:mod:`~hydrogen_magic.driver.state.gang_state`,
:mod:`~hydrogen_magic.driver.state.culprit`).
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable

from hydrogen_magic import plugins
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import file_limit
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.placements import AgentGroup, AgentLostError, Attempt, EventSink, Job
from hydrogen_magic.driver.profiling import GangProfiler
from hydrogen_magic.driver.start_watch import START_PHASES, StartWatch
from hydrogen_magic.driver.state.collective_waits import late_in_all
from hydrogen_magic.driver.state.culprit import (
    failed_independently,
    may_debug,
    verdict,
    waits_for_good,
)
from hydrogen_magic.driver.state.failure_report import headline
from hydrogen_magic.driver.state.formatting import late_text
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.transport.daemon_thread import in_daemon_thread

_FAILURE_EVENTS = (ev.RankFailed, ev.ExceptionHandled, ev.RankExited)
_SETTLE_S = 1.0
"""Others that wait too have reported it by then."""
_ASK_AGAIN_S = 0.25
"""How often it is decided whether a rank may be debugged that only its peers may have made fail."""
_STACKS_S = 0.15
"""Time to write stacks before a gang is ended because of a failed collective."""
_ATTENDED_S = 5.0
"""Much longer than it takes until a cell waits for the gang that it has launched."""
_NO_CELL = (
    "input() needs a cell that waits for its gang, and this one runs in the background: run it by "
    "%%distributed without --detach and --outlive, or pass the value as a variable"
)


class GangController:
    """Controls one gang. ``run`` is called on the loop, requests may come from any thread."""

    def __init__(
        self, run: GangRun, job: Job, agent_group: AgentGroup, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._run = run
        self._job = job
        self._agent_group = agent_group
        self._loop = loop
        self._profiling = GangProfiler(run, agent_group, job.record_dir, self._job.now_s)
        if job.feed is not None:
            stop = functools.partial(self.stop, "failure")
            job.feed.attach(run.emit, stop, job.now_s, self.cancel_rank, job.record_dir)
        self._timer: asyncio.TimerHandle | None = None
        self._settled = ""
        """The final state, once there is no further attempt."""
        self._culprit: int | None = None
        self._headline = ""
        """How the culprit failed, recorded when it was found; its later state may only be "stopped".

        Or why the gang's session has ended.
        """

    # ── from any thread ──

    def stop(self, reason: str, kill: bool = False) -> None:
        """Ask the gang to end; a second call with ``kill`` ends it at once. Later reasons are ignored."""
        self._loop.call_soon_threadsafe(self._stop, reason, kill)

    def answer_input(self, rank: int, number: int, text: str, error: str = "") -> None:
        """Answer a rank's request of this number: a line, or why there is none."""
        self._loop.call_soon_threadsafe(self._answer_input, rank, number, text, error)

    def cancel_rank(self, rank: int) -> None:
        """End a rank whose work other ranks have done: it counts as done."""
        self._loop.call_soon_threadsafe(self._cancel_rank, rank)

    def ask_stacks(self) -> None:
        """Request every rank's stacks as events."""
        self._loop.call_soon_threadsafe(self._agent_group.send, msg.ReportStacks())

    def record(self, on: bool) -> None:
        """Start or stop recording spans on the ranks."""
        self._loop.call_soon_threadsafe(self._record, on)

    def profile(self, steps: int) -> None:
        """Profile the next steps of every rank; events report the result."""
        self._loop.call_soon_threadsafe(self._profile, steps)

    # ── on the loop ──

    async def run(self) -> None:
        """Run attempts until one succeeds, the gang is stopped, or no retry is left."""
        error: BaseException | None = None
        limit = self._deadline()
        if self._job.session is not None:
            self._job.session.begin(self._run.id, self._stop)
        if self._job.spec.timeline is not None:
            self._run.emit(ev.Recording(self._job.now_s(), True))  # the ranks start with it
        try:
            for number in range(self._job.spec.retries + 1):
                if self._is_unwanted():
                    break  # before it began
                await self._attempt(number)
                if not self._may_try_again():
                    break
                self._notice("warning", f"{self._reason('FAILED')}: restarting all ranks")
        except HydrogenError as problem:
            error = problem
        except Exception as problem:
            # The agent died, or an internal error: the user must be informed.
            error = HydrogenError(f"{type(problem).__name__}: {file_limit.explained(problem)}")
            error.__cause__ = problem
        finally:
            if limit is not None:
                limit.cancel()
            self._settled = "FAILED" if error and not self._is_unwanted() else self._outcome()
            self._finish_cell()
            await self._agent_group.release()
            close = functools.partial(self._job.close, self._settled, self._run.state.stop_reason)
            await _in_thread(close) if self._job.feed is not None else close()
            await self._profiling.close(is_wanted=self._settled == "SUCCEEDED")
            await self._save_results(self._settled == "SUCCEEDED")
            if self._settled == "SUCCEEDED":
                await self._keep_until_taken()
            self._finish(error)

    async def _save_results(self, has_succeeded: bool) -> None:
        """Keep results that the notebook may not get. Never raises: the gang has to end."""
        results = self._run.results
        if not results.are_worth_saving(has_succeeded):
            return
        save = functools.partial(results.save, has_succeeded, self._run.state.attempt + 1)
        try:
            kept = await asyncio.to_thread(save)
        except Exception as error:  # no thread can be started while the interpreter exits
            kept = f"results could not be saved: {error}"
        if kept:
            self._notice("info" if has_succeeded else "warning", kept)

    async def _keep_until_taken(self) -> None:
        """Keep what replaces the results until the notebook has taken them, and delete other checkpoints."""
        results, checkpoints = self._run.results, self._job.checkpoints
        has_saved = checkpoints.is_dir()
        if has_saved and not results.are_complete:
            load = f"hydrogen_magic.checkpoint.load({str(checkpoints)!r})"
            text = f"not all results arrived, so the last checkpoint is kept: load it with {load}"
            self._notice("warning", text)
        if has_saved or not results.are_awaited:
            await _in_thread(self._keep)

    def _keep(self) -> None:
        if problem := self._run.results.keep(self._job.checkpoints):
            self._notice("warning", problem)

    def _deadline(self) -> asyncio.TimerHandle | None:
        timeout_s = self._job.spec.timeout_s
        if timeout_s is None:
            return None
        return self._loop.call_later(
            max(0.0, timeout_s - self._job.now_s()), self._stop, "timeout", False
        )

    async def _attempt(self, number: int) -> None:
        self._culprit = None
        self._run.emit(ev.AttemptStarted(self._job.now_s(), number))
        for rank in self._job.idle_ranks:
            self._run.emit(ev.RankPhase(self._job.now_s(), rank, "idle"))
        attempt = Attempt(self._run.id, number, self._job, lambda: self._run.state.is_recording)
        sink = EventSink(self._on_event, self._run.deliver, self._profiling.on_trace)
        start = StartWatch(self._run, self._job, self._on_event)
        watching = asyncio.ensure_future(start.watch())
        try:
            await self._agent_group.launch(attempt, sink)
        except AgentLostError as error:
            self._on_agent_lost(error)
        finally:
            watching.cancel()
            self._cancel_timer()
            if self._job.feed is not None:
                await _in_thread(self._job.feed.close)
        if self._outcome() == "SUCCEEDED":
            self._require_results(number)
        state = self._run.state
        if self._culprit is None and state.fault is None and not self._is_unwanted():
            found = verdict(state, math.inf)
            if found is not None and found.culprit is not None:
                self._name_culprit(state, found.culprit)

    def _require_results(self, attempt: int) -> None:
        """Fail an attempt whose ranks have succeeded if the results were lost with their host."""
        if self._job.feed is not None:
            self._job.feed.require_end()
            return
        rank = self._run.state.ranks[self._job.spec.first_rank]
        if self._run.results.have_ended(attempt):
            return
        why = f": {rank.failure.error.message}" if rank.failure is not None else ""
        text = f"all ranks finished, but the result of rank {rank.rank} was lost on its way{why}"
        self._run.emit(ev.AttemptFailed(self._job.now_s(), ev.ErrorReport("ResultLost", text)))
        self._culprit = None  # the rank itself has not failed

    def _finish_cell(self) -> None:
        if self._job.session is not None and (text := self._job.session.finish()):
            self._headline = self._headline or text
            self._notice("warning", text)

    def _on_agent_lost(self, error: AgentLostError) -> None:
        """Report the end of all ranks, which their agents can report no longer."""
        now_s = self._job.now_s()
        left = [rank.rank for rank in self._run.state.ranks if not rank.is_over]
        if not left:
            self._notice("warning", f"{error}; all ranks had ended before")
            return
        self._run.emit(ev.AttemptFailed(now_s, ev.ErrorReport("AgentLostError", str(error))))
        for rank in left:
            self._run.emit(ev.RankExited(now_s, rank, None, "SIGKILL", True, "its agent has ended"))

    def _on_event(self, event: ev.Event) -> None:
        if self._profiling.on_event(event):
            return
        if isinstance(event, ev.RecordAwaited):
            self._answer(event.rank, event.number)
            return
        self._run.emit(event)
        if isinstance(event, ev.InputRequested):
            delay_s = 0.0 if self._job.spec.detach else _ATTENDED_S
            self._loop.call_later(delay_s, self._refuse_input, event)
        if isinstance(event, ev.DebuggerRequested):
            self._grant_debugger(event.rank)
        if self._job.session is not None:
            self._job.session.note(event)
        if isinstance(event, ev.AttemptFailed):
            self._stop("failure", False)
        elif isinstance(event, _FAILURE_EVENTS):
            self._look_for_culprit()
        if _may_show_absence(event) and waits_for_good(self._run.state) is not None:
            delay_s = 0.0 if isinstance(event, ev.CollectivesEntered) else _SETTLE_S
            self._loop.call_later(delay_s, self._look_for_absent)
        if isinstance(event, ev.RankPhase) and event.phase == "running":
            self._release_closure()

    def _release_closure(self) -> None:
        """Free the captured data when no rank will load it any more."""
        is_here = plugins.placement(self._job.spec.placement).on_this_machine
        # Hosts on which all ranks are idle are sent the closure, too, maybe later than the others.
        unloaded = START_PHASES if is_here else (*START_PHASES, "idle")
        is_loaded = all(rank.phase not in unloaded for rank in self._run.state.ranks)
        if is_loaded and self._is_last_attempt():
            self._job.closure.release()

    def _look_for_culprit(self) -> None:
        """End the gang as soon as the culprit is known."""
        if self._culprit is not None:
            return  # and the timer is that of the stop
        self._cancel_timer()
        state = self._run.state
        found = verdict(state, self._job.now_s())
        if found is None or state.stop_reason:
            return
        if found.culprit is None:
            delay = max(0.0, found.wait_until_s - self._job.now_s())
            self._timer = self._loop.call_later(delay, self._look_for_culprit)
            return
        self._name_culprit(state, found.culprit)
        if failed_independently(state.ranks[found.culprit]):
            self._stop("failure", False)
            return
        # Where the ranks wait, or what blocks one of them.
        self._agent_group.send(msg.ReportStacks())
        self._timer = self._loop.call_later(_STACKS_S, self._stop, "failure", False)

    def _look_for_absent(self) -> None:
        """Release the ranks that wait for one that has ended its cell."""
        state = self._run.state
        culprit = waits_for_good(state)
        is_failing = self._culprit is not None or verdict(state, self._job.now_s()) is not None
        if culprit is not None and not state.stop_reason and not is_failing:
            self._name_culprit(state, culprit)
            self._agent_group.send(msg.ReportStacks())
            self._loop.call_later(_STACKS_S, self._stop, "failure", False)

    def _name_culprit(self, state: GangState, culprit: int) -> None:
        self._culprit = culprit
        self._headline = headline(state, culprit)

    def _stop(self, reason: str, kill: bool) -> None:
        state = self._run.state
        is_stopping = state.stop_reason not in ("", "failure") and (state.killed or not kill)
        is_known = state.stop_reason == "failure" == reason
        if state.is_terminal or is_stopping or is_known:
            return
        if self._settled or (self._are_done() and not kill):
            if reason == "user":
                self._notice("info", "all ranks had ended before Stop, which changes nothing")
            return
        self._run.emit(ev.StopRequested(self._job.now_s(), reason, kill))
        self._agent_group.kill() if kill else self._agent_group.stop()

    def _answer_input(self, rank: int, number: int, text: str, error: str) -> None:
        request = self._run.state.ranks[rank].input_request
        if request is not None and request.number == number:
            self._answer(rank, number, text, error)
            self._run.emit(ev.InputAnswered(self._job.now_s(), rank, number))

    def _answer(self, rank: int, number: int, text: str = "", error: str = "") -> None:
        self._agent_group.send(msg.AnswerInput(self._run.id, rank, number, text, error))

    def _grant_debugger(self, rank: int) -> None:
        """Let a rank open the debugger as soon as it may; a stop of the gang ends its wait, too."""
        state = self._run.state
        request = state.ranks[rank].debugger_request
        if request is None or state.stop_reason or state.ranks[rank].is_over:
            return
        if may_debug(state, state.ranks[rank], self._job.now_s()):
            self._answer(rank, request.number)
            self._run.emit(ev.InputAnswered(self._job.now_s(), rank, request.number))
        else:
            self._loop.call_later(_ASK_AGAIN_S, self._grant_debugger, rank)

    def _refuse_input(self, request: ev.InputRequested) -> None:
        """Answer a request of a gang that no cell waits for."""
        if not self._run.is_attended:
            self._answer_input(request.rank, request.number, "", _NO_CELL)

    def _cancel_rank(self, rank: int) -> None:
        if not self._run.state.ranks[rank].is_over:
            self._run.emit(ev.RankResult(self._job.now_s(), rank, 0))
            self._agent_group.send(msg.KillRanks(self._run.id, rank))

    def _record(self, on: bool) -> None:
        state = self._run.state
        if not state.is_terminal and state.is_recording != on:
            self._agent_group.send(msg.RecordSpans(self._run.id, on))
            self._run.emit(ev.Recording(self._job.now_s(), on))

    def _profile(self, steps: int) -> None:
        if not self._run.state.is_terminal:
            self._profiling.start(steps)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ── the end ──

    def _is_unwanted(self) -> bool:
        """Whether the end was requested for a reason other than a failed rank."""
        return self._run.state.stop_reason not in ("", "failure")

    def _is_last_attempt(self) -> bool:
        return self._run.state.attempt == self._job.spec.retries

    def _may_try_again(self) -> bool:
        """Return whether this attempt has failed and a retry is left, and no end was requested.

        An attempt that raises HydrogenError never comes here: the gang ends, whatever retries are left.
        AgentLostError does: :meth:`_on_agent_lost` makes it a failure of the attempt. Which of the two the
        loss of a host is, its placement decides (``remote/provider.py``, ``spark/barrier_job.py``).
        """
        is_over = self._is_last_attempt() or self._is_unwanted()
        return not is_over and self._outcome() == "FAILED"

    def _outcome(self) -> str:
        if self._is_unwanted() and self._culprit is None:
            return "STOPPED"
        return "SUCCEEDED" if self._are_done() else "FAILED"

    def _are_done(self) -> bool:
        state = self._run.state
        return state.fault is None and all(rank.phase in ("done", "idle") for rank in state.ranks)

    def _reason(self, outcome: str) -> str:
        state = self._run.state
        if outcome == "SUCCEEDED":
            n_done = sum(rank.phase == "done" for rank in state.ranks)  # others were idle
            return f"{counted(n_done, 'rank')} finished"
        if outcome == "STOPPED":
            return self._stop_text()
        if self._culprit is None and state.fault:
            return _first_line(state.fault.message)
        return self._headline or "the gang failed"

    def _stop_text(self) -> str:
        state, timeout_s = self._run.state, self._job.spec.timeout_s or 0
        before = state.before_stop
        if state.stop_reason == "timeout" and before is not None and before.queued is not None:
            have, wanted = before.queued
            why = "; ".join(
                filter(None, [f"{have} of {counted(wanted, 'slot')}", before.waits_for])
            )
            return ev.QUEUED_TIMEOUT.format(timeout=timeout_s, why=why)
        _, text = ev.STOP_REASONS[state.stop_reason]
        return text.format(timeout=timeout_s)

    def _finish(self, error: BaseException | None) -> None:
        outcome = self._settled
        waits = {rank.rank: rank.waits for rank in self._run.state.ranks}
        late = None if outcome == "FAILED" else late_in_all(waits)
        if late is not None:
            self._notice("info", late_text(late))
        if error is not None and outcome != "STOPPED":
            reason = _first_line(str(error))  # the error itself has the rest
            self._run.emit(ev.GangEnded(self._job.now_s(), "FAILED", reason))
        else:
            culprit = self._culprit if outcome == "FAILED" else None
            self._run.emit(ev.GangEnded(self._job.now_s(), outcome, self._reason(outcome), culprit))
        self._run.finish(error if outcome != "STOPPED" else None)

    def _notice(self, level: str, text: str) -> None:
        self._run.emit(ev.Notice(self._job.now_s(), level, text))


async def _in_thread(work: Callable[[], None]) -> None:
    """Do ``work`` that may wait for a disk; the loop serves other gangs meanwhile."""
    try:
        done = in_daemon_thread(work, "hydrogen_magic gang")
    except RuntimeError:  # no thread can be started while the interpreter exits
        work()
    else:
        await done


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _may_show_absence(event: ev.Event) -> bool:
    """Return whether ranks may be found, after this event, to wait for one that has ended its cell.

    There are thousands of events in a large gang, and each search looks at all ranks.
    """
    if isinstance(event, ev.CollectiveWait):
        return bool(event.name and event.n_joins)
    has_run = isinstance(event, ev.RankPhase) and event.phase == "finishing"
    return has_run or isinstance(event, (ev.CollectivesEntered, ev.RankExited))
