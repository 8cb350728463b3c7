"""Hosts of ``simulated_cluster.py``, many in one process: agents without ranks that speak the real protocol.

Read from stdin, on one line: the instructions for tasks, the numbers of hosts, and how their ranks behave.
At the end of stdin, the process that started this one has ended, and this one ends too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent.host_closure import HostClosure
from hydrogen_magic.node.agent.host_task import agent_secret
from hydrogen_magic.node.worker.reporting.send_interval import SendInterval
from hydrogen_magic.transport.channel import AgentLink

_BEAT_S, _BATCH_S, _SHIP_S = 2.0, 0.05, 0.2
"""As in ``remote_link``, ``server`` and ``log_shipping``."""
_LINE = "step {step}: loss {loss:.4f}, 1234 samples/s\n"


@dataclass
class FakeRank:
    """What one rank of a training sends."""

    number: int
    interval: SendInterval
    points_per_s: float
    lines_per_s: float
    step: int = 0
    lines: int = 0
    began_s: float = field(default_factory=time.monotonic)
    health_s: float = field(default_factory=lambda: time.monotonic() + random.random())
    log: bytes = b""
    logged: int = 0

    def events(self, at_s: float) -> Iterator[ev.Event]:
        """Yield what is due now; ``at_s``: the gang's time."""
        elapsed_s = time.monotonic() - self.began_s
        if self.interval.is_due(is_urgent=False):
            yield from self._training(at_s, int(elapsed_s * self.points_per_s))
        if int(elapsed_s * self.lines_per_s) > self.lines:
            self.lines += 1
            text = _LINE.format(step=self.step, loss=random.random())
            self.log += text.encode()
            yield ev.Output(at_s, self.number, "stdout", text)
        if time.monotonic() > self.health_s:
            self.health_s += 1.0
            yield ev.RankHealth(at_s, self.number, 2**31 + self.step, 99.0, "R", 90.0, 2**33)

    def _training(self, at_s: float, until: int) -> Iterator[ev.Event]:
        steps = tuple(range(self.step, until))
        if steps:
            self.step = until
            values = {name: tuple(random.random() for _ in steps) for name in ("loss", "accuracy")}
            yield ev.Metrics(at_s, self.number, steps, (at_s,) * len(steps), values)
            yield ev.Steps(at_s, self.number, until)
            yield ev.Progress(at_s, self.number, 0, "train", float(until), 1e6)


class FakeHost:
    """An agent, its tasks and its ranks."""

    def __init__(self, boot: dict[str, Any], host: int, n_ranks: int, behaviour: Any) -> None:
        self._boot = boot
        self._host = host
        self._tasks = range(host * n_ranks, (host + 1) * n_ranks)
        self._behaviour = behaviour
        self._request: msg.LaunchRequest | None = None
        self._ranks: list[FakeRank] = []
        self._clock_zero_s = 0.0
        self._over = asyncio.Event()
        """The ranks were asked to end."""
        self._left = asyncio.Event()
        """The tasks may return."""

    async def run(self) -> None:
        """Serve until the tasks are released."""
        self._secret = agent_secret(self._boot["key_seed"], self._tasks[0])
        self._link = AgentLink(self._boot["endpoints"][0], self._boot["server_key"], self._secret)
        self._closure = HostClosure(self._boot["gang"], self._send)
        held = msg.Address(f"127.1.{self._host // 250}.{self._host % 250 + 1}", 1)
        self._send(msg.Hello(f"host-{self._host}", held, "eth0"))
        work = [asyncio.ensure_future(each) for each in (self._beat(), self._receive())]
        await self._left.wait()
        for each in work:
            each.cancel()
        self._closure.close()
        self._link.close()

    def _send(self, report: msg.AgentReport, data: memoryview | None = None) -> None:
        self._link.send(report, data)

    async def _beat(self) -> None:
        while True:
            self._send(msg.Heartbeat(time.monotonic()))
            await asyncio.sleep(_BEAT_S)

    async def _receive(self) -> None:
        attached = False
        while True:
            message, data = await self._link.receive()
            command = msg.decode(message, msg.AgentCommand)
            if isinstance(command, msg.ClockReading) and not attached:
                attached = True
                for number in self._tasks:
                    self._send(msg.TaskAttached(self._hello(number)))
            self._take(command, data)

    def _hello(self, number: int) -> msg.TaskHello:
        boot, machine = self._boot, f"{self._boot['token']}-{self._host}"
        return msg.TaskHello(boot["gang"], boot["attempt"], number, machine, False, None, {})

    def _take(self, command: msg.AgentCommand, data: memoryview | None) -> None:
        match command:
            case msg.LaunchRequest():
                self._request = command
                self._clock_zero_s = command.clock_zero_s  # kernel and hosts have one clock here
                self._ranks_work = asyncio.ensure_future(self._run_ranks(command))
            case msg.FilePart():
                self._send(msg.PartTaken())
                self._closure.take(command, memoryview(b"") if data is None else data)
            case msg.ServeClosure():
                self._closure.serve(command, "127.0.0.1", None)
            case msg.FetchClosure():
                self._closure.fetch(command, self._secret)
            case msg.StopRanks() | msg.KillRanks():
                self._over.set()
            case msg.ReleaseTasks() | msg.Quit():
                self._left.set()

    async def _run_ranks(self, request: msg.LaunchRequest) -> None:
        numbers = [rank.rank for rank in request.ranks]
        self._report(ev.RankPhase(self._now_s(), n, "starting") for n in numbers)
        host = f"host-{self._host}"
        self._report(ev.RankStarted(self._now_s(), n, 1000 + n, host, "cuda:0") for n in numbers)
        while not self._closure.file.is_complete:
            await self._closure.file.changed()
        self._report(ev.RankPhase(self._now_s(), n, "loading") for n in numbers)
        self._report(ev.RankPhase(self._now_s(), n, "running") for n in numbers)
        world = int(request.ranks[0].env["WORLD_SIZE"])
        self._ranks = [FakeRank(n, SendInterval(n, world), *self._behaviour) for n in numbers]
        await self._train()
        now_s = self._now_s()
        for n in numbers:  # each at once, as the agent does
            self._report([ev.RankExited(now_s, n, None, "SIGINT", True)])
        self._send(msg.CleanedUp(request.gang, request.attempt, msg.Address("127.0.0.1", 1)))

    async def _train(self) -> None:
        shipped_s = time.monotonic()
        while not self._over.is_set():
            self._report(e for rank in self._ranks for e in rank.events(self._now_s()))
            if time.monotonic() - shipped_s > _SHIP_S:
                shipped_s += _SHIP_S
                self._ship_logs()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), _BATCH_S)
        self._ship_logs()

    def _ship_logs(self) -> None:
        assert self._request is not None
        for rank in self._ranks:
            if rank.log:
                part = msg.RecordPart(self._request.gang, f"rank-{rank.number}.log", rank.logged)
                self._send(part, memoryview(rank.log))
                rank.logged, rank.log = rank.logged + len(rank.log), b""

    def _report(self, events: Any) -> None:
        assert self._request is not None
        batch = tuple(ev.encode(event) for event in events)
        if batch:
            self._send(msg.EventBatch(self._request.gang, self._request.attempt, batch))

    def _now_s(self) -> float:
        return time.monotonic() - self._clock_zero_s


async def main() -> None:
    asked = json.loads(sys.stdin.readline())
    asyncio.get_running_loop().add_reader(sys.stdin, os._exit, 0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # every host has sockets of its own
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    hosts = [
        FakeHost(asked["boot"], host, asked["ranks_per_host"], asked["behaviour"])
        for host in asked["hosts"]
    ]
    await asyncio.gather(*(host.run() for host in hosts))


if __name__ == "__main__":
    asyncio.run(main())
