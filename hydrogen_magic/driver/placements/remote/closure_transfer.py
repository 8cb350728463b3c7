"""The way of an attempt's closure to its agents.

A small closure is sent to each. A large one leaves the kernel once: the agents form a binary tree, and pass
the bytes on while they arrive, so that all have it in little more than twice the time of one. An agent that
cannot reach its parent, or loses it, is sent the rest from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import Attempt, EventSink
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.transport.background_tasks import BackgroundTasks

_PASSED_ON_BYTES = 8 << 20
"""From this size on, agents pass a closure on: a smaller one takes a fraction of a second on each line."""
_SERVE_S = 5.0
"""How long an agent may take to listen for others."""
_REPORT_S = 0.5


class ClosureTransfer:
    """One transfer, to those of ``agents`` that do not have the closure from an earlier attempt."""

    def __init__(self, attempt: Attempt, agents: Sequence[RemoteAgent], sink: EventSink) -> None:
        self._attempt = attempt
        self._sink = sink
        self._agents = [agent for agent in agents if agent.closure_of != attempt.gang]
        self._served: dict[RemoteAgent, asyncio.Future[msg.ClosureServed]] = {}
        self._arrived = dict.fromkeys(self._agents, 0)
        self._tasks = BackgroundTasks()
        self._reported_s = time.monotonic()
        self._has_reported = False

    def start(self) -> None:
        """Start sending."""
        for agent in self._agents:
            agent.closure_of = ""  # it drops the one of another gang
            agent.on_closure_report = self.take
        if self._attempt.job.closure.size < _PASSED_ON_BYTES:
            for agent in self._agents:
                self._tasks.start(agent.send_closure(self._attempt))
            return
        for number, agent in enumerate(self._agents):
            if clients := self._agents[2 * number + 1 : 2 * number + 3]:
                self._served[agent] = asyncio.get_running_loop().create_future()
                keys = tuple(client.keys.key for client in clients)
                agent.send(msg.ServeClosure(self._attempt.gang, keys))
        for number, agent in enumerate(self._agents):
            parent = self._agents[(number - 1) // 2] if number else None
            self._tasks.start(self._bring(agent, parent))

    def stop(self) -> None:
        """Send no more."""
        self._tasks.cancel()
        for agent in self._agents:
            if agent.on_closure_report == self.take:
                agent.on_closure_report = None

    async def _bring(self, agent: RemoteAgent, parent: RemoteAgent | None) -> None:
        """Have ``agent`` fetch the closure from ``parent``; send it from here without one."""
        found = None
        if parent is not None:
            await asyncio.wait([self._served[parent]], timeout=_SERVE_S)
            found = self._served[parent].result() if self._served[parent].done() else None
        if found is not None and found.endpoint:
            agent.send(msg.FetchClosure(self._attempt.gang, found.endpoint, found.server_key))
        else:
            await agent.send_closure(self._attempt)

    def take(self, agent: RemoteAgent, report: msg.AgentReport) -> None:
        """Take an agent's report about the closure."""
        match report:
            case msg.ClosureServed() if agent in self._served and not self._served[agent].done():
                self._served[agent].set_result(report)
            case msg.SendClosure():
                self._tasks.start(agent.send_closure(self._attempt, report.offset))
            case msg.ClosureArriving():
                self._on_progress(agent, report)

    def _on_progress(self, agent: RemoteAgent, report: msg.ClosureArriving) -> None:
        self._arrived[agent] = report.arrived
        if report.arrived == report.size:
            agent.closure_of = self._attempt.gang
        now_s, is_complete = time.monotonic(), report.arrived == report.size
        if now_s - self._reported_s > _REPORT_S or (self._has_reported and is_complete):
            self._reported_s, self._has_reported = now_s, True
            self._emit(report.size)

    def _emit(self, size: int) -> None:
        arrived = self._arrived.values()
        n_complete = sum(each == size for each in arrived)
        at_s, total = self._attempt.job.now_s(), size * len(arrived)
        self._sink.emit(ev.ClosureSent(at_s, sum(arrived), total, n_complete, len(arrived)))
