"""Ranks as processes on this machine, started by an agent that stays warm between cells."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import LOOPBACK, JobSpec, Plan, Slot
from hydrogen_magic.driver.placements import (
    AgentGroup,
    AgentLostError,
    Attempt,
    EventSink,
    Job,
    Placement,
    devices,
    launch_request,
    local_agents,
)
from hydrogen_magic.driver.placements.agent_client import with_ports
from hydrogen_magic.driver.placements.local_agent import LocalAgent
from hydrogen_magic.driver.placements.surroundings import (
    Surroundings,
    forkserver_fingerprint,
    shadowed_modules,
)
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.worker.checkpoints import checkpoint
from hydrogen_magic.transport import framing

_PING_S = 0.5
_LATE_S = 4.0
"""After this process was stopped or busy for this long, the agent's answers still have to be read."""
_SILENCE_S = 15.0
"""An agent that is silent for this long is reported."""
_START_S = 3.0
"""How long a starting agent may take when the gang is to be stopped."""


class LocalPlacement(Placement):
    """One process for each rank on this machine."""

    ends_with_kernel = ""

    def plan(self, spec: JobSpec) -> Plan:
        if fault := processes.pidfd_fault():
            raise PlacementError(
                f"`--on local` needs Linux 5.3 or newer, here is {fault}; `--on inline --np 1` works "
                "without it"
            )
        gpus, notes = devices.assign(spec, _environ(spec))
        host = os.uname().nodename
        slots = tuple(
            Slot(rank, rank, 0, spec.np, spec.np, 1, host, gpus[rank], interface=LOOPBACK)
            for rank in range(spec.np)
        )
        return Plan(slots, notes)

    def plan_beside(self, spec: JobSpec, gpus_in_use: Callable[[], Sequence[str]]) -> Plan:
        """Return :meth:`plan` with the GPUs that the fewest ranks of other gangs use."""
        gpus = _visible_gpus(spec)
        if spec.gpu is not False and len(gpus) > spec.np:
            gpus = _free_first(gpus, spec.np, gpus_in_use())
        # Fewer, unless the user has named them, are not shared.
        visible = [("CUDA_VISIBLE_DEVICES", ",".join(gpus))] if len(gpus) >= spec.np else []
        return self.plan(replace(spec, env=(*spec.env, *visible)))

    def n_at_once(self, spec: JobSpec, most: int) -> int:
        """Return how many there are GPUs for, or a core for each rank."""
        gpus, np = _visible_gpus(spec), spec.np
        if spec.gpu is not False and len(gpus) >= np:
            return min(most, len(gpus) // np)
        return max(1, min(most, processes.usable_cores() // np))

    def open(self, spec: JobSpec) -> LocalAgentGroup:
        return LocalAgentGroup(spec.n_at_once)


def _free_first(gpus: Sequence[str], n: int, in_use: Sequence[str]) -> tuple[str, ...]:
    """Return the ``n`` GPUs that are used least, in their order, and then the others."""
    uses = Counter(devices.uuids(in_use))
    n_uses = {gpu: uses[uuid] for gpu, uuid in zip(gpus, devices.uuids(gpus), strict=True)}
    chosen = sorted(gpus, key=n_uses.__getitem__)[:n]
    return tuple(sorted(gpus, key=lambda gpu: gpu not in chosen))


def _visible_gpus(spec: JobSpec) -> tuple[str, ...]:
    """Return the GPUs for gangs at the same time; none if they cannot be listed, which plan() reports."""
    try:
        return devices.visible_gpus(_environ(spec))
    except PlacementError:
        return ()


def _environ(spec: JobSpec) -> Mapping[str, str]:
    """Return this process's environment, with GPUs that ``--env`` names."""
    given = dict(spec.env).get("CUDA_VISIBLE_DEVICES")
    return os.environ if given is None else {**os.environ, "CUDA_VISIBLE_DEVICES": given}


def _threads(job: Job) -> dict[str, str]:
    """One thread per rank unless the user chose a number, as with torchrun: ranks share the cores.

    Ranks that receive data, and gangs of one rank, may use all of their share of the cores.
    """
    n_ranks, n_gangs = len(job.plan.slots), job.spec.n_at_once
    if n_ranks * n_gangs == 1 or "OMP_NUM_THREADS" in job.surroundings.env:
        return {}
    takes_share = job.feed is not None or n_ranks == 1
    share = processes.usable_cores() // (n_ranks * n_gangs) if takes_share else 1
    return {"OMP_NUM_THREADS": str(max(1, share))}


_Needs = tuple[Surroundings, Mapping[str, str], Sequence[str]]
"""What an agent is started with: the last two are its forkserver's environment and imports."""


class LocalAgentGroup(AgentGroup):
    """The agent of this machine that runs the ranks."""

    has_sessions = True
    is_retained = False  # an attribute in the place of the property

    def __init__(self, n_at_once: int = 1) -> None:
        """``n_at_once``: of :class:`~hydrogen_magic.core.job.JobSpec`."""
        self._n_at_once = n_at_once
        self.on_lost = lambda why: None
        self._agent: LocalAgent | None = None
        self._rendezvous = launch_request.SessionAddress()
        self._key = ""
        """Under which the agent keeps the ranks."""
        self._has_cells = False
        """The ranks are those of a session, not of ``%%infer``."""
        self._digest = ""
        """Fingerprint of the forkserver that has forked the ranks."""
        self._needs: _Needs | None = None
        """Those of the last attempt."""
        self._cancelled = asyncio.Event()

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        self._cancelled.clear()  # a stop of the attempt before
        agent = await self._launched(attempt, sink)
        if agent is None:
            return
        watching = asyncio.ensure_future(_watch(agent, attempt, sink))
        try:
            self.is_retained = False
            await agent.cleaned_up()
            self.is_retained = agent.is_retained and attempt.job.session is not None
        finally:
            watching.cancel()
            agent.let_go()

    async def _launched(self, attempt: Attempt, sink: EventSink) -> LocalAgent | None:
        """Return the agent that runs the attempt, None once the gang is to be stopped.

        A warm one may have been stopped since its last gang. It does not respond and is replaced, unless it
        has the ranks of the session.
        """
        job = attempt.job
        self._has_cells = job.session_cell is not None
        self._needs = job.surroundings, job.env, job.preload
        if not (self._has_cells and self.is_retained):
            self._digest = forkserver_fingerprint(job.env, job.surroundings.sys_path)
        handed: list[int] = []
        try:
            while True:
                agent = self._take_agent(self._needs)
                is_warm = agent.is_ready
                await self._started(agent)
                located = None if self._cancelled.is_set() else await _located(attempt, agent)
                if self._cancelled.is_set():
                    return None
                if located is not None:
                    handed = handed or _handed(job)
                    address = self._rendezvous.of(located, agent.held)
                    request = _launch_request(located, agent, address, self._digest)
                    self._key = request.worker_key
                    agent.launch(request, handed, sink)
                    is_needed = self._has_cells and self.is_retained
                    if not is_warm or is_needed or await agent.responds():
                        return agent
                agent.let_go()
                agent.on_session_lost = lambda why: None
                agent.kill()
        finally:
            framing.close_all(handed)

    def _take_agent(self, needs: _Needs) -> LocalAgent:
        if self._agent is None or not self._agent.is_usable:
            self._agent = local_agents.pool().take(local_agents.hub(), *needs)
            self._agent.on_session_lost = self._on_lost
        return self._agent

    def _on_lost(self, why: str) -> None:
        self.is_retained = False
        self.on_lost(why)

    async def _started(self, agent: LocalAgent) -> None:
        """Wait for the agent's hello; only for a moment when the gang is to be stopped."""
        if agent.is_ready and agent.alive:
            return
        ready = asyncio.ensure_future(agent.ready())
        cancelled = asyncio.ensure_future(self._cancelled.wait())
        await asyncio.wait([ready, cancelled], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([ready], timeout=_START_S if cancelled.done() else None)
        cancelled.cancel()
        if ready.done():
            ready.result()
        else:
            ready.cancel()
            agent.kill()

    def stop(self) -> None:
        self._cancelled.set()  # it may not be launched yet
        if (agent := self._launched_agent()) is not None:
            agent.stop_ranks()

    def kill(self) -> None:
        self._cancelled.set()
        if (agent := self._launched_agent()) is not None:
            agent.kill_ranks()

    def send(self, command: msg.AgentCommand) -> None:
        if (agent := self._launched_agent()) is not None:
            agent.send(command)

    def _launched_agent(self) -> LocalAgent | None:
        """Return the agent that runs the ranks, None before the launch and after the end."""
        is_launched = self._agent is not None and self._agent.attempt is not None
        return self._agent if is_launched else None

    async def release(self) -> None:
        if self._agent is not None and not self.is_retained:
            agent, self._agent = self._agent, None
            agent.on_session_lost = lambda why: None
            await local_agents.pool().give_back(agent, self._n_at_once)
        elif self._agent is not None and self._needs is not None and self._has_cells:
            local_agents.pool().get_ready(self._agent.hub, *self._needs)

    async def end_session(self) -> None:
        if self._agent is not None and self.is_retained:
            self.is_retained = False
            self._agent.send(msg.EndSession(self._key))
        await self.release()


async def _watch(agent: LocalAgent, attempt: Attempt, sink: EventSink) -> None:
    """Report an agent that does not respond, and end it when the gang is to be stopped."""
    is_silent = False
    looked_s = time.monotonic()
    while True:
        await asyncio.sleep(_PING_S)
        agent.send(msg.Ping())
        late_s = time.monotonic() - looked_s
        agent.last_message_s += late_s if late_s > _LATE_S else 0.0
        looked_s = time.monotonic()
        silence_s = looked_s - agent.last_message_s
        what = f"the agent process (pid {agent.process.pid})"
        if agent.is_unresponsive:
            agent.why_killed = f"did not respond for {silence_s:.0f} s and was killed"
            text = f"{what} {agent.why_killed}, together with all processes of the gang"
            sink.emit(ev.Notice(attempt.job.now_s(), "warning", text))
            agent.kill()
            return
        if is_silent != (silence_s > _SILENCE_S):
            is_silent = not is_silent
            text = f"{what} {_silence(agent, silence_s) if is_silent else 'responds again'}"
            sink.emit(ev.Notice(attempt.job.now_s(), "warning" if is_silent else "info", text))


def _silence(agent: LocalAgent, silence_s: float) -> str:
    text = f"has not responded for {silence_s:.0f} s"
    states = [process.state for process in processes.processes([agent.process.pid])]
    if states == ["T"]:
        text += f"; it is stopped (SIGSTOP): kill -CONT {agent.process.pid} resumes it"
    return f"{text}; stopping the gang ends it"


def _worker_key(job: Job, digest: str) -> str:
    """Return the key under which ranks of ``%%infer`` are kept for an equal gang, empty if they are not."""
    if job.feed is None or job.session is None or job.session_cell is not None:
        return ""
    places = [(slot.rank, devices.device_name(job.plan, slot), slot.gpu) for slot in job.plan.slots]
    depends_on = [
        job.feed.key,
        places,
        digest,
        job.env,
        job.surroundings.directory,
        job.surroundings.sys_path,
    ]
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _handed(job: Job) -> list[int]:
    """Return what an agent needs beside the launch message: the closure, a channel for each fed rank."""
    channels = job.feed.open(len(job.plan.slots)) if job.feed is not None else []
    return [job.closure.dup(), *channels]


async def _located(attempt: Attempt, agent: LocalAgent) -> Attempt | None:
    """Return the attempt with ports for its ranks, if they need them; None if the agent does not respond."""
    job = attempt.job
    try:
        plan = await with_ports(job.plan, job.rendezvous, {agent: range(job.spec.np)})
    except AgentLostError:
        return None
    return replace(attempt, job=replace(job, plan=plan))


def _launch_request(
    attempt: Attempt, agent: LocalAgent, address: tuple[str, int], digest: str
) -> msg.LaunchRequest:
    job = attempt.job
    plan, around = job.plan, job.surroundings
    rendezvous = launch_request.rendezvous_info(attempt, plan, address)
    checkpoints = checkpoint.environment(job.checkpoints, is_shared=True)
    host = launch_request.HostLaunch(
        slots=plan.slots,
        env={**job.env, **agent.marks},
        preload=(*shadowed_modules(around.sys_path), *job.preload),
        fingerprint=digest,
        user_env=dict(job.spec.env),
        rank_env={**_threads(job), **checkpoints},
        sys_path=around.sys_path,
        record_dir=str(job.record_dir),
        worker_key=_worker_key(job, digest),
    )
    return launch_request.build(attempt, plan, rendezvous, host)
