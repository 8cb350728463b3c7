"""Ranks as processes on this machine, started by an agent that stays warm between cells."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import LOOPBACK, JobSpec, Plan, Slot
from hydrogen_magic.driver.placements import (
    Attempt,
    ClosureFile,
    EventSink,
    Job,
    devices,
    local_agents,
)
from hydrogen_magic.errors import HydrogenError, PlacementError
from hydrogen_magic.node.worker import checkpoint

__all__ = ["LocalAgentGroup", "LocalPlacement"]

_PING_S = 1.0
_LATE_S = 4.0
"""After this process was stopped or busy for this long, the agent's answers still have to be read."""
_SILENCE_S = 15.0
"""An agent that is silent for this long is reported."""
_START_S = 3.0
"""How long a starting agent may take when the gang is to be stopped."""


class LocalPlacement:
    """See :class:`hydrogen_magic.driver.placements.Placement`."""

    def plan(self, spec: JobSpec) -> Plan:
        if not hasattr(os, "pidfd_open"):
            raise PlacementError(
                "`--on local` needs Linux 5.3 or newer (its pidfd_open system call); `--on "
                "inline --np 1` works everywhere"
            )
        given = dict(spec.env).get("CUDA_VISIBLE_DEVICES")
        environ = os.environ if given is None else {**os.environ, "CUDA_VISIBLE_DEVICES": given}
        gpus, notes = devices.assign(spec, devices.visible_gpus(environ))
        host = os.uname().nodename
        slots = tuple(
            Slot(rank, rank, 0, spec.np, spec.np, 1, host, gpus[rank], interface=LOOPBACK)
            for rank in range(spec.np)
        )
        return Plan(slots, notes)

    def open(self, spec: JobSpec) -> LocalAgentGroup:
        return LocalAgentGroup()


def _threads(plan: Plan, is_fed: bool) -> dict[str, str]:
    """One thread per rank unless the user chose a number, as with torchrun: ranks share the cores.

    Ranks that receive data may use all of their share of the cores.
    """
    if len(plan.slots) == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    share = len(os.sched_getaffinity(0)) // len(plan.slots) if is_fed else 1
    return {"OMP_NUM_THREADS": str(max(1, share))}


class LocalAgentGroup:
    """See :class:`hydrogen_magic.driver.placements.AgentGroup`."""

    def __init__(self) -> None:
        self._agent: local_agents.LocalAgent | None = None
        self._cancelled = asyncio.Event()
        self._is_recording: bool | None = None
        """Requested recording state; None: as in the job."""

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        job = attempt.job
        digest = local_agents.fingerprint({**os.environ, **dict(job.spec.env)})
        agent = await self._responding_agent(digest, job.preload)
        if self._cancelled.is_set():
            return
        message = _launch_message(attempt, agent, digest)
        if self._is_recording is not None:
            message["record"] = self._is_recording
        agent.sink, agent.attempt = sink, (attempt.gang, attempt.number)
        watching = asyncio.ensure_future(_watch(agent, attempt, sink))
        try:
            _launch(agent, message, job)
            await agent.swept()
        except HydrogenError:  # the agent has exited
            _end_all(attempt, sink)
            raise
        finally:
            watching.cancel()
            agent.sink = agent.attempt = None

    async def _responding_agent(
        self, digest: str, preload: Sequence[str]
    ) -> local_agents.LocalAgent:
        """Return an agent that responds. A warm one may have been stopped since its last gang."""
        pool, hub = local_agents.pool(), local_agents.hub()
        if self._agent is None or not self._agent.alive:
            self._agent = pool.take(hub, digest, preload)
        if self._agent.is_ready and not await self._agent.responds():
            self._agent.kill()
            self._agent = pool.take(hub, digest, preload)
        await self._started(self._agent)
        return self._agent

    async def _started(self, agent: local_agents.LocalAgent) -> None:
        """Wait for the agent's hello; only for a moment when the gang is to be stopped."""
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
        self._tell("stop")

    def kill(self) -> None:
        self._tell("kill")

    def dismiss(self, rank: int) -> None:
        if self._agent is not None and self._agent.attempt is not None:
            self._agent.send("kill", rank=rank)

    def _tell(self, action: str) -> None:
        if self._agent is not None and self._agent.attempt is not None:
            self._agent.command(action)
        else:
            self._cancelled.set()  # not launched yet

    def ask_stacks(self) -> None:
        if self._agent is not None and self._agent.attempt is not None:
            self._agent.send("stacks")

    def record(self, on: bool) -> None:
        self._is_recording = on
        if self._agent is not None and self._agent.attempt is not None:
            self._agent.send("record", on=on)

    def profile(self, number: int, steps: int) -> None:
        if self._agent is not None and self._agent.attempt is not None:
            self._agent.send("profile", number=number, steps=steps)

    async def release(self) -> None:
        if self._agent is not None:
            await local_agents.pool().give_back(self._agent)
            self._agent = None


async def _watch(agent: local_agents.LocalAgent, attempt: Attempt, sink: EventSink) -> None:
    """Report an agent that does not respond, and end it when the gang is to be stopped."""
    is_silent = False
    looked_s = time.monotonic()
    while True:
        agent.send("ping")
        await asyncio.sleep(_PING_S)
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


def _silence(agent: local_agents.LocalAgent, silence_s: float) -> str:
    text = f"has not responded for {silence_s:.0f} s"
    states = [process.state for process in processes.processes([agent.process.pid])]
    if states == ["T"]:
        text += f"; it is stopped (SIGSTOP): kill -CONT {agent.process.pid} resumes it"
    return f"{text}; stopping the gang ends it"


def _end_all(attempt: Attempt, sink: EventSink) -> None:
    """Report the end of all ranks in place of the agent, which can no longer do so."""
    for slot in attempt.job.plan.slots:
        now_s = attempt.job.now_s()
        sink.emit(ev.RankExited(now_s, slot.rank, None, "SIGKILL", True, "its agent has exited"))


def _fed(attempt: Attempt, slots: Sequence[Mapping[str, Any]], digest: str) -> dict[str, Any]:
    """Return the part of a launch for ranks that receive data: channels, and the key of reusable ones."""
    feed, spec = attempt.job.feed, attempt.job.spec
    if feed is None:
        return {"infer": None, "stay": ""}
    places = [(slot["rank"], slot["device"], slot["gpu"]) for slot in slots]
    what = [feed.key, places, digest, {**os.environ, **dict(spec.env)}, local_agents.directory(),
            local_agents.import_path()]  # fmt: skip
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return {"infer": {"options": dict(feed.options)}, "stay": key if feed.key else ""}


def _launch(agent: local_agents.LocalAgent, message: dict[str, Any], job: Job) -> None:
    assert isinstance(job.closure, ClosureFile)
    channels = job.feed.open(len(job.plan.slots)) if job.feed is not None else []
    closure = job.closure.dup()
    try:
        agent.launch(message, closure, channels)
    finally:
        for fd in (closure, *channels):
            os.close(fd)


def _launch_message(
    attempt: Attempt, agent: local_agents.LocalAgent, digest: str
) -> dict[str, Any]:
    job = attempt.job
    plan, spec = job.plan, job.spec
    meeting = job.rendezvous.prepare(
        plan, *agent.held, spec=spec, gang=attempt.gang, attempt=attempt.number
    )
    checkpoints = checkpoint.environment(job.checkpoints, is_shared=True)
    slots = [
        {
            "rank": slot.rank,
            "device": devices.device_name(slot),
            "gpu": slot.gpu,
            "env": {
                **devices.environment(plan, slot), **_threads(plan, job.feed is not None),
                **checkpoints, **meet,
                **dict(spec.env),
            },
        }
        for slot, meet in zip(plan.slots, meeting.environments, strict=True)
    ]  # fmt: skip
    service = meeting.service
    marks = {**agent.marks, processes.COOKIE: attempt.gang}
    return {
        "gang": attempt.gang, "attempt": attempt.number, "slots": slots,
        "secrets": list(job.secrets),
        "preload": [*local_agents.shadowed_modules(), *job.preload],
        "service": service and {"function": service.function, "options": dict(service.options)},
        "env": {**os.environ, **dict(spec.env), **marks}, "cwd": local_agents.directory(),
        "sys_path": local_agents.import_path(), "fingerprint": digest,
        "clock_zero_s": job.clock_zero_s, "grace_s": spec.grace_s,
        "record_dir": str(job.record_dir), "record": spec.timeline is not None,
        **_fed(attempt, slots, digest),
    }  # fmt: skip
