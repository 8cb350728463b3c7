"""One attempt on other machines: tasks that hold places, and the agents that they attach to.

hosts acquired ──► tasks attach, each to its host's agent ──► plan: ranks by host ──► launch ──► cleaned up
                                                                                                   │
                  the hosts are released, agents stay warm  ◄── agents let the tasks return  ◄─────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.driver.placements import AgentLostError, Attempt, EventSink
from hydrogen_magic.driver.placements.agent_client import with_ports
from hydrogen_magic.driver.placements.launch_request import SessionAddress
from hydrogen_magic.driver.placements.remote import (
    agent_requests,
    forwarded_settings,
    rank_assignment,
)
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent, agent_pool
from hydrogen_magic.driver.placements.remote.closure_transfer import ClosureTransfer
from hydrogen_magic.driver.placements.remote.dataset_transfer import DatasetTransfer
from hydrogen_magic.driver.placements.remote.host_tasks import HostTasks
from hydrogen_magic.driver.placements.remote.provider import (
    HostLostError,
    HostProvider,
    HostsRevokedError,
)
from hydrogen_magic.errors import HydrogenError

_ENDS_BY_ITSELF = "its ranks end when its task or the agent notices this"
_WATCH_S = 0.25
"""How often the silence of agents is checked."""
_SILENCE_S = 15.0
"""After this time without a message of a host, its connection is reported as lost."""
_LOST_S = 45.0
"""After this time the host is given up; its agent gives up an unreachable kernel after 40 s."""
_LATE_S = 5.0
"""This process itself was suspended for so long: silence of others then means nothing."""
_LATE_REPORTS_S = 1.0
"""How much later than the provider's report of the tasks' end the agents' own reports may arrive, and the
other way round."""
_END_S = 5.0
"""How long hosts may take to end their ranks after their tasks have ended."""
_LOOK_S = 0.1
"""How often long operations check whether they are still needed."""
_BRING_S = 600.0
"""How long no part of a checkpoint or dataset may arrive anywhere: hosts may be busy with slow disks."""
_RELEASED_S = 60.0
"""How long the tasks of a gang without a failure may take to return: milliseconds once their agents release
them, seconds on a busy host. A task that the provider ends may count as failed there."""
_UNRELEASED_S = 1.5
"""The same after a failure, or where not all tasks have attached: lost ones may be restarted, and some wait
for ranks that never come."""
_UNRESPONSIVE_S = 0.2
"""The same where an agent does not respond after Stop or Kill, for the tasks of other agents. Its own tasks
learn of that only by their end, and then end the agent."""


class RemoteAttempt:
    """Runs one attempt: from the wait for its hosts to their release."""

    def __init__(self, attempt: Attempt, sink: EventSink, hosts: HostProvider) -> None:
        self.lost_hosts: dict[str, float] = {}
        """Hosts that stopped responding; see :attr:`HostProvider.lost_hosts`."""
        self.is_retained = False
        """Its hosts and ranks wait for the next cell of a session: see :meth:`run_cell`."""
        self.on_lost: Callable[[str], None] = lambda why: None
        """Called with the reason when hosts or ranks that wait have ended."""
        self._key = (attempt.gang, attempt.number)
        """Of the tasks."""
        self._begin(attempt, sink)
        self._hosts = hosts
        self._rendezvous = SessionAddress()
        self._tasks: asyncio.Future[None]
        """Done when the tasks on the hosts have ended."""
        self._attached: dict[int, rank_assignment.AttachedTask] = {}
        """By the task's number."""
        self._changed = asyncio.Event()
        self._running: list[RemoteAgent] = []
        self._cleanups: list[asyncio.Future[None]] = []
        """For each agent, a future that is done when nothing is left on its host."""
        self._lost: set[RemoteAgent] = set()
        self._is_queued = False
        """The provider has reported that it waits for hosts."""
        self._is_unwanted = False
        self._has_unresponsive = False
        """An agent is unresponsive."""
        self._has_failed = False
        """A rank has failed, so the reason of the attempt's end is known."""
        self._has_lost_tasks = False
        """An agent has reported that a task has ended before its rank."""
        self._releasing: asyncio.Future[None] | None = None

    def _begin(self, attempt: Attempt, sink: EventSink) -> None:
        self._attempt, self._job = attempt, attempt.job
        self._to_gang = sink
        self._sink = EventSink(self._emit, sink.deliver, sink.take_trace)

    def _emit(self, event: ev.Event) -> None:
        is_failure = isinstance(event, ev.RankFailed) and not event.in_flight
        self._has_failed |= is_failure or isinstance(event, ev.AttemptFailed)
        self._has_lost_tasks |= isinstance(event, ev.RankFailed) and event.error.type == "TaskLost"
        if isinstance(event, ev.Queued):
            self._is_queued = event.have < event.wanted
        self._to_gang.emit(event)

    def _notice(self, level: str, text: str) -> None:
        self._sink.emit(ev.Notice(self._job.now_s(), level, text))

    # ── from hosts to their release ──

    async def run(self) -> None:
        """Return when nothing of the ranks is left."""
        pool = agent_pool()
        invited = pool.invite(self._job.spec.np)
        pool.waiters[self._key] = self
        tasks = HostTasks(self._attempt, self._hosts.noun, pool, invited, self._attached.keys)
        self._tasks = _without_report(asyncio.ensure_future(self._use_hosts(tasks)))
        self._tasks.add_done_callback(self._on_tasks_done)
        try:
            await self._assemble()
            if not self._is_unwanted:
                await self._run_ranks()
        finally:
            pool.uninvite(invited)
            if not self.is_retained:
                self._leave()

    async def run_cell(self, attempt: Attempt, sink: EventSink) -> None:
        """Run a later cell of the session; return when all ranks have ended it."""
        self._begin(attempt, sink)
        self._is_unwanted = self._has_failed = False
        try:
            await self._run_ranks()
        except AgentLostError:
            self.is_retained = False
            raise
        finally:
            if not self.is_retained:
                self._leave()

    def end_session(self) -> None:
        """End the waiting ranks, and release the hosts."""
        if self.is_retained:
            self.is_retained = False
            self._leave()

    def _leave(self) -> None:
        """Let the tasks return, and with them what waits there for another cell."""
        agent_pool().waiters.pop(self._key, None)
        for task in self._attached.values():
            if self._job.session is not None:
                task.agent.on_session_lost = lambda why: None
                task.agent.send(msg.EndSession(self._job.session.key))
            task.agent.send(msg.ReleaseTasks(*self._key))
        self._releasing = asyncio.ensure_future(self._release())

    def _on_lost(self, why: str) -> None:
        if self.is_retained:
            self.on_lost(why)

    async def _use_hosts(self, tasks: HostTasks) -> None:
        # Tasks look for the record to see whether they share this disk.
        written = asyncio.to_thread(run_log.write_through, self._job.record_dir)
        await asyncio.gather(self._hosts.acquire(self._attempt, self._sink), written)
        await self._hosts.start_agents(tasks, self._sink)

    def _on_tasks_done(self, tasks: asyncio.Future[None]) -> None:
        self._changed.set()
        if not tasks.cancelled():
            self._on_lost(str(tasks.exception() or f"its tasks on {self._hosts.noun} ended"))

    async def _assemble(self) -> None:
        """Wait until all tasks have attached, or the gang is not wanted; raises if the tasks have ended."""
        wanted = self._job.spec.np
        while len(self._attached) < wanted and not (self._is_unwanted or self._tasks.done()):
            self._changed.clear()
            await self._changed.wait()
        if self._is_queued:
            self._sink.emit(ev.Queued(self._job.now_s(), wanted, wanted))
        if self._tasks.done() and not self._is_unwanted:
            raise self._why_tasks_ended()

    def _why_tasks_ended(self) -> BaseException:
        text = f"the tasks on {self._hosts.noun} ended before their ranks did"
        return self._tasks.exception() or HydrogenError(text)

    async def _release(self) -> None:
        """Wait for the end of the tasks, and release the hosts; at once when this kernel exits."""
        if self._has_unresponsive:
            timeout_s = _UNRESPONSIVE_S
        elif self._has_failed or self._lost or len(self._attached) < self._job.spec.np:
            timeout_s = _UNRELEASED_S if self._attached else 0.0
        else:
            timeout_s = _RELEASED_S
        try:
            await asyncio.wait([self._tasks], timeout=timeout_s)
        finally:
            self._tasks.cancel()
            await self._hosts.release()

    def on_attached(self, agent: RemoteAgent, task: msg.TaskHello) -> None:
        """A task has come."""
        self._attached[task.number] = rank_assignment.AttachedTask(agent, task)
        self._changed.set()

    def on_detached(self, agent: RemoteAgent, task: msg.TaskHello, why: str) -> None:
        """A task has exited while its rank was not running; the provider's own report follows."""
        known = self._attached.get(task.number)
        if known is not None and known.agent is agent:  # else another task has its number by now
            del self._attached[task.number]
        self._on_lost(why)

    # ── ranks ──

    async def _run_ranks(self) -> None:
        assignment = rank_assignment.plan(self._job.spec, self._attached, self._hosts.gives_gpus)
        for text in assignment.plan.notes:
            self._notice("warning", text)
        if not assignment.shares_disk:
            await self._bring_files(assignment)
            if self._is_unwanted:
                return
        assignment = await self._with_ports(assignment)
        if self._is_unwanted:
            return
        address = self._rendezvous.of(self._attempt, assignment.agents[0].held)
        requests = agent_requests.for_agents(self._attempt, assignment, address)
        self._running = list(requests)
        self.is_retained = False  # until here, the ranks of a session wait for the next cell
        transfer = ClosureTransfer(self._attempt, self._running, self._sink)
        watching = asyncio.ensure_future(self._watch(assignment))
        over: list[asyncio.Future[Any]] = []
        try:
            self._connect_feed(assignment)
            self._cleanups = [
                agent.launch(self._attempt, self._sink, request)
                for agent, request in requests.items()
            ]
            transfer.start()
            cleaned_up = asyncio.gather(*self._cleanups)
            over += [_without_report(cleaned_up), _without_report(watching)]
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            self._retain(assignment)
        finally:
            watching.cancel()
            transfer.stop()
            await self._let_go()
        problem = await asyncio.to_thread(forwarded_settings.leave_timeline, self._attempt)
        if problem:
            self._notice("warning", problem)
        for one in over:
            if one.done() and not one.cancelled():
                one.result()  # raises the error that ended it
        if self._has_lost_tasks:
            await self._raise_if_revoked()

    async def _let_go(self) -> None:
        """End the use of the agents by this attempt; drop files that have arrived in part."""
        key = self._attempt.gang, self._attempt.number
        await asyncio.gather(*(agent.channels.close(*key) for agent in self._running))
        for agent in self._running:
            agent.let_go(self._attempt)
        run_log.drop_incomplete(self._job.checkpoints)  # such as a checkpoint of a lost host
        self._running = []

    def _connect_feed(self, assignment: rank_assignment.RankAssignment) -> None:
        """Give every rank its channel, if the ranks are fed."""
        if self._job.feed is None:
            return
        fds = self._job.feed.open(self._job.spec.np)
        for agent in self._running:
            there = {rank: fds[rank] for rank in assignment.ranks_on(agent)}
            agent.channels.open(self._attempt.gang, self._attempt.number, there)

    async def _with_ports(
        self, assignment: rank_assignment.RankAssignment
    ) -> rank_assignment.RankAssignment:
        ranks_of = {agent: assignment.ranks_on(agent) for agent in assignment.agents}
        plan = await with_ports(assignment.plan, self._job.rendezvous, ranks_of)
        return replace(assignment, plan=plan)

    def _retain(self, assignment: rank_assignment.RankAssignment) -> None:
        """Keep the hosts if the ranks of all of them wait for the next cell of a session."""
        are_waiting = all(agent.is_retained for agent in self._running) and not self._lost
        if self._job.session is None or self._tasks.done() or not are_waiting:
            return
        self.is_retained = True
        for agent in assignment.agents:
            agent.on_session_lost = self._on_lost

    async def _raise_if_revoked(self) -> None:
        """Raise HostsRevokedError if that is why tasks were lost: agents may report that first."""
        await asyncio.wait([self._tasks], timeout=_LATE_REPORTS_S)
        if self._tasks.done() and isinstance(error := self._tasks.exception(), HostsRevokedError):
            raise error

    async def _bring_files(self, assignment: rank_assignment.RankAssignment) -> None:
        """Send the last checkpoint and the data of ``hm.dataset`` to hosts that do not see them here.

        The checkpoint goes to all hosts: they must agree on it.
        """
        is_retry = self._attempt.number > 0
        for agent in assignment.on_other_disks:
            agent.forget_deleted_datasets(in_use=self._job.datasets if is_retry else ())
        if is_retry:
            agents = assignment.agents
            checkpoints = [agent.bring_checkpoint(self._attempt) for agent in agents]
            await self._bring(asyncio.gather(*checkpoints), agents, "the checkpoint")
        idle = set(self._job.idle_ranks)
        agents = tuple(
            agent
            for agent in assignment.on_other_disks
            if not idle.issuperset(assignment.ranks_on(agent))
        )
        if self._job.datasets and agents and not self._is_unwanted:
            transfer = asyncio.ensure_future(
                DatasetTransfer(self._attempt, agents, self._sink).run()
            )
            await self._bring(transfer, agents, "the data of hm.dataset()")

    async def _bring(
        self, files: asyncio.Future[Any], agents: Sequence[RemoteAgent], what: str
    ) -> None:
        """Wait until ``files`` have been sent to the agents, while the gang is wanted and has its tasks."""
        bringing = _without_report(files)
        began_s = looked_s = time.monotonic()
        try:
            while not (bringing.done() or self._is_unwanted or self._tasks.done()):
                await asyncio.wait([bringing], timeout=_LOOK_S)
                looked_s = _looked_again(agents, looked_s)
                for agent in agents:
                    if looked_s - agent.last_message_s > _LOST_S:
                        self._avoid(agent)
                        self._lost.add(agent)
                        agent_pool().drop(agent)
                        raise AgentLostError(
                            f"the agent on host {agent.host} has not responded for {_LOST_S:.0f} s, while "
                            f"{what} was sent to it"
                        )
                moved_s = max(agent.outgoing.acknowledged_s for agent in agents)
                if looked_s - max(began_s, moved_s) > _BRING_S:
                    raise HydrogenError(
                        f"{what} did not reach all hosts: no part has arrived for {_BRING_S:.0f} s"
                    )
        finally:
            bringing.cancel()
            await asyncio.wait([bringing])
        if self._tasks.done():
            raise self._why_tasks_ended()
        if not self._is_unwanted:
            bringing.result()

    # ── monitoring ──

    async def _watch(self, assignment: rank_assignment.RankAssignment) -> None:
        """Monitor hosts and tasks until cancelled; raises when the tasks have ended before the ranks."""
        looked_s = time.monotonic()
        silent: set[RemoteAgent] = set()
        is_reported = False
        while True:
            looked_s = _looked_again(assignment.agents, looked_s)
            for agent in set(assignment.agents) - self._lost - self._done_agents():
                self._check_silence(agent, looked_s - agent.last_message_s, silent, assignment)
            if self._tasks.done() and not is_reported:
                is_reported = True
                await self._on_tasks_end(assignment)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), _WATCH_S)
            except asyncio.TimeoutError:
                continue

    def _done_agents(self) -> set[RemoteAgent]:
        """Return the agents whose ranks have ended: they may leave before the ranks of others end."""
        return {one for one, end in zip(self._running, self._cleanups, strict=True) if end.done()}

    def _check_silence(
        self,
        agent: RemoteAgent,
        silence_s: float,
        silent: set[RemoteAgent],
        assignment: rank_assignment.RankAssignment,
    ) -> None:
        if silence_s > _LOST_S or agent.is_unresponsive:
            self._has_unresponsive = self._has_unresponsive or agent.is_unresponsive
            why = (
                f"the agent on host {agent.host} has not responded for {silence_s:.0f} s"
                " (network failure, or the agent is stopped or has crashed)"
            )
            self._notice("warning", f"{why}; {_ENDS_BY_ITSELF}")
            self._avoid(agent)
            self._lose_host(agent, "HostLost", why, assignment)
        elif silence_s > _SILENCE_S and agent not in silent:
            silent.add(agent)
            text = f"no connection to host {agent.host} for {silence_s:.0f} s; waiting for it"
            self._notice("warning", text)
        elif silence_s < _SILENCE_S and agent in silent:
            silent.discard(agent)
            self._notice("info", f"host {agent.host} is connected again; nothing was lost")

    async def _on_tasks_end(self, assignment: rank_assignment.RankAssignment) -> None:
        """The tasks have ended before their ranks. Agents that are alive know the reason: wait for their
        reports.
        """
        error = self._why_tasks_ended()
        if isinstance(error, HostLostError) and (task := self._attached.get(error.problem.task)):
            self._lose_host(task.agent, "AgentLost", error.problem.text, assignment)
            return
        if not isinstance(error, HostsRevokedError):
            # Tasks that return without an error were released by agents whose ranks had ended.
            is_released = self._tasks.exception() is None
            timeout_s = _RELEASED_S if is_released else _LATE_REPORTS_S
            if not (await asyncio.wait(self._cleanups, timeout=timeout_s))[1]:
                return
        if not self._has_failed:
            self.kill()
            await asyncio.wait(self._cleanups, timeout=_END_S)
            raise error

    def _lose_host(
        self,
        agent: RemoteAgent,
        kind: str,
        why: str,
        assignment: rank_assignment.RankAssignment,
    ) -> None:
        """Report a host's ranks as ended, since its agent cannot do so."""
        self._lost.add(agent)
        first, *others = assignment.ranks_on(agent)
        now_s = self._job.now_s()
        report = ev.ErrorReport(kind, f"{why} (host {agent.host})")
        self._sink.emit(ev.RankFailed(now_s, first, report, "running"))
        for rank in (first, *others):
            lost = ev.RankExited(now_s, rank, None, "SIGKILL", True, "its host was lost", "")
            self._sink.emit(lost)
        agent.count_as_clean()
        agent_pool().drop(agent)

    def _avoid(self, agent: RemoteAgent) -> None:
        """Have the provider choose other hosts for the next attempt."""
        tasks = (task for task in self._attached.values() if task.agent is agent)
        names = {task.about.host for task in tasks} - {""}
        self.lost_hosts.update(dict.fromkeys(names, agent.last_message_s))

    # ── commands ──

    def stop(self) -> None:
        self._give_up_waiting()
        for agent in self._serving():
            agent.stop_ranks()

    def kill(self) -> None:
        self._give_up_waiting()
        for agent in self._serving():
            agent.kill_ranks()

    def _give_up_waiting(self) -> None:
        if not self._running:
            self._is_unwanted = True
            self._changed.set()

    def send(self, command: msg.AgentCommand) -> None:
        """Send a command to every agent whose ranks run."""
        for agent in self._serving():
            agent.send(command)

    def _serving(self) -> list[RemoteAgent]:
        """Return the agents that still run ranks of this attempt."""
        return [agent for agent in self._running if agent.job is self._attempt]


def _looked_again(agents: Sequence[RemoteAgent], looked_s: float) -> float:
    """Return the time now; if this process was suspended since ``looked_s``, agents were not silent."""
    now_s = time.monotonic()
    if now_s - looked_s > _LATE_S:
        for agent in agents:
            agent.last_message_s = now_s
    return now_s


_F = TypeVar("_F", bound="asyncio.Future[Any]")


def _without_report(future: _F) -> _F:
    """Return ``future``; asyncio does not report its error if nothing reads it.

    One error ends an attempt. Those that follow are consequences, and may come when it is over.
    """
    future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return future
