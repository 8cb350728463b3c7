"""One gang on a Spark cluster: a barrier stage that reserves slots, and agents that its tasks attach to.

submit ──► tasks attach, each to its host's agent ──► plan: ranks by host ──► launch ──► swept
                                                                                            │
           the stage ends, its Python workers stay warm  ◄── agents let the tasks return ◄──┘
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import (
    KillRanks,
    ProfileSteps,
    RecordSpans,
    ReleaseTasks,
    ReportStacks,
    TaskHello,
)
from hydrogen_magic.driver.placements import Attempt, EventSink
from hydrogen_magic.driver.placements.spark import (
    barrier_job,
    forwarded_settings,
    launch_messages,
    rank_assignment,
)
from hydrogen_magic.driver.placements.spark.capacity_check import (
    ClusterCapacity,
    capacity,
    free_slots,
    slots_now,
)
from hydrogen_magic.driver.placements.spark.remote_agents import (
    RemoteAgent,
    RemoteAgentPool,
    agent_pool,
)
from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.errors import HydrogenError

__all__ = ["SparkAgentGroup"]

_QUEUED_S = 1.0
"""How often the number of free slots is reported to a gang that waits for slots."""
_ROOM_S = 0.5
"""How often to check for new executors."""
_UNSEEN_S = 5.0
"""How long a gang waits for slots of unknown number before that is reported."""
_UNSEEN = (
    "waiting for task slots of the cluster; the number of free slots is unknown, since Spark's "
    "UI is off or not reachable from here"
)
_ENDS_BY_ITSELF = "its ranks end when the Spark task or the agent notices this"
_SILENCE_S = 15.0
"""After this time without a message of a host, its connection is reported as lost."""
_LOST_S = 45.0
"""After this time the host is given up; its agent gives up an unreachable kernel after 40 s."""
_LATE_S = 5.0
"""This process itself was suspended for so long: silence of others then means nothing."""
_LATE_REPORTS_S = 1.0
"""How much later than Spark's report of a job's end the agents' own reports may arrive."""
_END_S = 5.0
"""How long hosts may take to end their ranks after their stage has ended."""
_LOOK_S = 0.1
"""How often long operations check whether they are still needed."""
_BRING_S = 600.0
"""How long it may take to send a checkpoint to all hosts: gigabytes over a slow line."""
_TASKS_NOTICE_S = 60.0
"""After this time a task has noticed that its agent does not respond, and has ended the agent's ranks. If
Spark killed the task, nothing could end the ranks."""
_JOB_END_S = 1.5
"""Tasks return within milliseconds when their agents release them; after this, Spark is asked to end
them."""


class SparkAgentGroup:
    """See :class:`hydrogen_magic.driver.placements.AgentGroup`."""

    def __init__(self, session: Session, capacity: ClusterCapacity) -> None:
        self._session = session
        self._capacity = capacity
        self._places: dict[int, rank_assignment.BarrierTask] = {}
        """By partition."""
        self._changed = asyncio.Event()
        self._job: barrier_job.BarrierJob | None = None
        self._running: list[RemoteAgent] = []
        self._sweeps: list[asyncio.Future[None]] = []
        """For each agent, a task that is done when nothing is left on its host."""
        self._is_unwanted = False
        self._is_recording: bool | None = None
        """Requested recording state; None: as in the job."""
        self._lost: set[RemoteAgent] = set()
        self._has_unresponsive = False
        """An agent of this attempt is unresponsive."""
        self._has_failed = False
        """A rank of this attempt has failed, so the reason of its end is known."""
        self._cancelling: set[asyncio.Task[None]] = set()

    # ── an attempt ──

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        ships = agent_pool()
        key = (attempt.gang, attempt.number)
        self._places, self._lost, self._running, self._sweeps = {}, set(), [], []
        self._has_failed = self._is_unwanted = self._has_unresponsive = False
        ships.waiters[key] = self
        invited = ships.invite(attempt.job.spec.np)
        try:
            job = await self._assemble(ships, invited, attempt, sink)
            if not self._is_unwanted:
                await self._run_attempt(job, attempt, self._listening(sink))
        finally:
            del ships.waiters[key]
            ships.uninvite(invited)
            self._release_tasks(attempt)

    async def _assemble(
        self, ships: RemoteAgentPool, invited: list[RemoteAgent], attempt: Attempt, sink: EventSink
    ) -> barrier_job.BarrierJob:
        """Submit the stage and wait for its tasks; through a relay if they cannot reach this machine."""
        job = await self._gather(ships, invited, attempt, sink)
        problem = barrier_job.problem_of(job.error)
        is_unreachable = problem is not None and problem.kind == "unreachable"
        if is_unreachable and self._session.is_connect:
            where = await ships.use_relay(self._session)
            text = f"executors cannot reach this machine; they connect through a relay at {where}"
            sink.emit(ev.Notice(attempt.job.now_s(), "info", text))
            job = await self._gather(ships, invited, attempt, sink)
        if job.is_over and not self._is_unwanted:
            raise barrier_job.as_error(job.error, self._session)
        return job

    async def _gather(
        self, ships: RemoteAgentPool, invited: list[RemoteAgent], attempt: Attempt, sink: EventSink
    ) -> barrier_job.BarrierJob:
        """Wait until all tasks have attached, or their stage has ended; report waiting for slots."""
        wanted = attempt.job.spec.np
        queued = await self._wait_for_room(attempt, sink)
        unseen_since_s = time.monotonic() if queued is None else math.inf
        job = barrier_job.submit(self._session, self._capacity, ships, invited, attempt)
        self._job, job.on_end = job, self._changed.set
        while len(self._places) < wanted and not self._is_unwanted and not job.is_over:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), _QUEUED_S)
            except asyncio.TimeoutError:
                if queued and not self._places:
                    await self._tell_queue(free_slots, attempt, sink)
                elif not self._places and time.monotonic() - unseen_since_s > _UNSEEN_S:
                    unseen_since_s = math.inf
                    sink.emit(ev.Notice(attempt.job.now_s(), "info", _UNSEEN))
        if queued:
            sink.emit(ev.Queued(attempt.job.now_s(), wanted, wanted))
        return job

    async def _wait_for_room(self, attempt: Attempt, sink: EventSink) -> bool | None:
        """Wait until the cluster is large enough for the gang; return whether other jobs hold its slots.

        None if unknown. Spark itself would check only every fifteen seconds whether a stage fits. If it
        fits, Spark starts its tasks as soon as enough slots are free.
        """
        wanted = attempt.job.spec.np
        is_first = attempt.number == 0
        while not (is_first and self._capacity.slots is not None) and not self._is_unwanted:
            slots = await self._tell_queue(slots_now, attempt, sink)
            if slots is None or slots >= wanted:
                break
            if is_first:  # executors were still starting; refused when no more are expected
                self._capacity = await asyncio.to_thread(capacity, self._session, attempt.job.spec)
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _ROOM_S)
        free = await asyncio.to_thread(free_slots, self._session, self._capacity)
        if free is not None and free < wanted:
            sink.emit(ev.Queued(attempt.job.now_s(), free, wanted))
        return None if free is None else free < wanted

    async def _tell_queue(
        self,
        look: Callable[[Session, ClusterCapacity], int | None],
        attempt: Attempt,
        sink: EventSink,
    ) -> int | None:
        """Report how many slots there are for the gang, as returned by ``look``; return the number."""
        wanted = attempt.job.spec.np
        slots = await asyncio.to_thread(look, self._session, self._capacity)
        if slots is not None and not self._places:
            sink.emit(ev.Queued(attempt.job.now_s(), min(slots, wanted), wanted))
        return slots

    def on_attached(self, agent: RemoteAgent, task: TaskHello) -> None:
        """A task has come."""
        self._places[task.partition] = rank_assignment.BarrierTask(agent, task)
        self._changed.set()

    def on_detached(self, task: TaskHello) -> None:
        """A task has exited before its rank was started; Spark's own report follows."""
        self._places.pop(task.partition, None)

    async def _run_attempt(
        self, job: barrier_job.BarrierJob, attempt: Attempt, sink: EventSink
    ) -> None:
        assignment = rank_assignment.plan(attempt.job.spec, self._places, self._capacity.gpus)
        for text in assignment.plan.notes:
            sink.emit(ev.Notice(attempt.job.now_s(), "warning", text))
        if attempt.number > 0 and not assignment.shares_disk:
            await self._bring_checkpoint(job, assignment, attempt)
            if self._is_unwanted:
                return
        messages = launch_messages.messages(attempt, assignment, self._is_recording)
        self._running = list(messages)
        sweeps = [agent.launch(attempt, sink, message) for agent, message in messages.items()]
        self._sweeps = sweeps
        sending = [asyncio.ensure_future(agent.send_closure(attempt)) for agent in messages]
        if self._is_unwanted:  # while the lines above were under way
            self.stop()
        watching = asyncio.ensure_future(self._watch(job, assignment, attempt, sink))
        try:
            over: list[asyncio.Future[Any]] = [asyncio.gather(*sweeps), watching]
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*sending, watching):
                task.cancel()
            for agent in messages:
                agent.let_go()
            self._running = []
        problem = await asyncio.to_thread(forwarded_settings.leave_timeline, attempt)
        if problem:
            sink.emit(ev.Notice(attempt.job.now_s(), "warning", problem))
        for one in over:
            if one.done() and not one.cancelled():
                one.result()  # raises the error that ended it

    async def _bring_checkpoint(
        self,
        job: barrier_job.BarrierJob,
        assignment: rank_assignment.RankAssignment,
        attempt: Attempt,
    ) -> None:
        """Send the last checkpoint to all hosts, as long as the gang is wanted and has its slots."""
        bringing = asyncio.gather(*(agent.bring_checkpoint(attempt) for agent in assignment.agents))
        deadline_s = time.monotonic() + _BRING_S
        try:
            while not (bringing.done() or self._is_unwanted or job.is_over):
                await asyncio.wait([bringing], timeout=_LOOK_S)
                if time.monotonic() > deadline_s:
                    raise HydrogenError(f"no host received the checkpoint within {_BRING_S:.0f} s")
        finally:
            bringing.cancel()
            await asyncio.wait([bringing])
        if job.is_over:
            raise barrier_job.as_error(job.error, self._session)
        if not bringing.cancelled():
            bringing.result()

    # ── monitoring ──

    async def _watch(
        self,
        job: barrier_job.BarrierJob,
        assignment: rank_assignment.RankAssignment,
        attempt: Attempt,
        sink: EventSink,
    ) -> None:
        """Monitor hosts and job until cancelled; raise when Spark has ended the job."""
        looked_s = time.monotonic()
        silent: set[RemoteAgent] = set()
        told = False
        while True:
            now_s = time.monotonic()
            if now_s - looked_s > _LATE_S:
                for agent in assignment.agents:
                    agent.last_message_s = now_s
            looked_s = now_s
            for agent in set(assignment.agents) - self._lost:
                self._check_silence(
                    agent, now_s - agent.last_message_s, silent, assignment, attempt, sink
                )
            if job.is_over and not told:
                told = True
                await self._on_job_end(job, assignment, attempt, sink)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 1.0)
            except asyncio.TimeoutError:
                continue

    def _check_silence(
        self, agent: RemoteAgent, silence_s: float, silent: set[RemoteAgent],
        assignment: rank_assignment.RankAssignment, attempt: Attempt, sink: EventSink,
    ) -> None:  # fmt: skip
        if silence_s > _LOST_S or agent.is_unresponsive:
            self._has_unresponsive = self._has_unresponsive or agent.is_unresponsive
            why = (
                f"the agent on host {agent.host} has not responded for {silence_s:.0f} s"
                " (network failure, or the agent is stopped or has crashed)"
            )
            sink.emit(ev.Notice(attempt.job.now_s(), "warning", f"{why}; {_ENDS_BY_ITSELF}"))
            self._lose_host(agent, "HostLost", why, assignment, attempt, sink)
        elif silence_s > _SILENCE_S and agent not in silent:
            silent.add(agent)
            text = f"no connection to host {agent.host} for {silence_s:.0f} s; waiting for it"
            sink.emit(ev.Notice(attempt.job.now_s(), "warning", text))
        elif silence_s < _SILENCE_S and agent in silent:
            silent.discard(agent)
            text = f"host {agent.host} is connected again; nothing was lost"
            sink.emit(ev.Notice(attempt.job.now_s(), "info", text))

    async def _on_job_end(
        self,
        job: barrier_job.BarrierJob,
        assignment: rank_assignment.RankAssignment,
        attempt: Attempt,
        sink: EventSink,
    ) -> None:
        """The stage has ended before its ranks. Agents that are alive know the reason: wait for their
        reports.
        """
        error = job.error
        problem = barrier_job.problem_of(error)
        ended = [a for a in assignment.agents if problem and a.host == problem.host]
        if problem and problem.kind == "agent_ended":
            for agent in ended:
                self._lose_host(agent, "AgentLost", problem.text, assignment, attempt, sink)
            return
        if error is None or error.kind not in ("cancelled", "stopped"):
            await asyncio.sleep(_LATE_REPORTS_S)
        if not self._has_failed:
            self.kill()
            await asyncio.wait(self._sweeps, timeout=_END_S)
            raise barrier_job.as_error(error, self._session)

    def _listening(self, sink: EventSink) -> EventSink:
        def emit(event: ev.Event) -> None:
            self._has_failed = self._has_failed or isinstance(
                event, (ev.RankFailed, ev.AttemptFailed)
            )
            sink.emit(event)

        return EventSink(emit, sink.deliver, sink.take_trace)

    def _lose_host(
        self,
        agent: RemoteAgent,
        kind: str,
        why: str,
        assignment: rank_assignment.RankAssignment,
        attempt: Attempt,
        sink: EventSink,
    ) -> None:
        """Report a host's ranks as ended, since its agent cannot do so."""
        self._lost.add(agent)
        first, *others = assignment.ranks_on(agent)
        now_s = attempt.job.now_s()
        report = ev.ErrorReport(kind, f"{why} (host {agent.host})")
        sink.emit(ev.RankFailed(now_s, first, report, "running"))
        for rank in (first, *others):
            sink.emit(ev.RankExited(now_s, rank, None, "SIGKILL", True, "its host was lost", ""))
        agent.count_as_swept()
        agent_pool().drop(agent)

    # ── commands ──

    def stop(self) -> None:
        self._give_up_waiting()
        for agent in self._running:
            agent.stop_ranks()

    def kill(self) -> None:
        self._give_up_waiting()
        for agent in self._running:
            agent.kill_ranks()

    def _give_up_waiting(self) -> None:
        if not self._running:
            self._is_unwanted = True
            self._changed.set()

    def cancel_rank(self, rank: int) -> None:
        for agent in self._running:
            agent.send(KillRanks(agent.gang, rank))

    def ask_stacks(self) -> None:
        for agent in self._running:
            agent.send(ReportStacks())

    def record(self, on: bool) -> None:
        self._is_recording = on
        for agent in self._running:
            agent.send(RecordSpans(agent.gang, on))

    def profile(self, number: int, steps: int) -> None:
        for agent in self._running:
            agent.send(ProfileSteps(agent.gang, number, steps))

    async def release(self) -> None:
        """Agents stay warm by themselves, and the last stage is ended in the background."""

    def _release_tasks(self, attempt: Attempt) -> None:
        """Make the tasks return, by their agents or else by Spark."""
        for place in self._places.values():
            place.agent.send(ReleaseTasks(attempt.gang, attempt.number))
        job, self._job = self._job, None
        if job is not None:
            join_timeout_s = _TASKS_NOTICE_S if self._has_unresponsive else _JOB_END_S
            cancelling = asyncio.ensure_future(
                job.wait_then_cancel(join_timeout_s if self._places else 0)
            )
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelling.discard)
