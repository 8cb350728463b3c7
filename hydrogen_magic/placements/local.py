"""Ranks as processes on this machine, beside an agent that stays warm between cells."""

from __future__ import annotations

import os
from typing import Any

from hydrogen_magic import processes
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.placements import Attempt, Sink, agents, devices
from hydrogen_magic.spec import LOOPBACK, JobSpec, Plan, Slot
from hydrogen_magic.worker import checkpoint

__all__ = ["LocalCrew", "LocalPlacement"]


class LocalPlacement:
    """See :class:`hydrogen_magic.placements.Placement`."""

    def plan(self, spec: JobSpec) -> Plan:
        if not hasattr(os, "pidfd_open"):
            raise PlacementError(
                "`--on local` needs Linux 5.3 or newer, whose kernel can tell when a process ends; "
                "`--on inline --np 1` works everywhere"
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

    def open(self, spec: JobSpec) -> LocalCrew:
        return LocalCrew()


def _threads(plan: Plan) -> dict[str, str]:
    """One thread per rank unless the user chose, as torchrun has it: ranks share the cores."""
    if len(plan.slots) == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": "1"}


class LocalCrew:
    """See :class:`hydrogen_magic.placements.Crew`."""

    def __init__(self) -> None:
        self._agent: agents.Agent | None = None
        self._cancelled = False
        self._is_recording: bool | None = None
        """What was ordered; None: what the job says."""

    async def launch(self, attempt: Attempt, sink: Sink) -> None:
        job = attempt.job
        digest = agents.fingerprint({**os.environ, **dict(job.spec.env)})
        if self._agent is None or not self._agent.alive:
            self._agent = agents.pool().take(agents.hub(), digest, job.preload)
        agent = self._agent
        await agent.ready()
        if self._cancelled or job.closure_fd is None:
            return
        message = _launch_message(attempt, agent, digest)
        if self._is_recording is not None:
            message["record"] = self._is_recording
        agent.sink, agent.attempt = sink, (attempt.gang, attempt.number)
        try:
            agent.launch(message, job.closure_fd)
            await agent.swept()
        finally:
            agent.sink = agent.attempt = None

    def stop(self) -> None:
        self._tell("stop")

    def kill(self) -> None:
        self._tell("kill")

    def _tell(self, action: str) -> None:
        if self._agent is not None and self._agent.attempt is not None:
            self._agent.send(action)
        else:
            self._cancelled = True  # not launched yet

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
            await agents.pool().give_back(self._agent)
            self._agent = None


def _launch_message(attempt: Attempt, agent: agents.Agent, digest: str) -> dict[str, Any]:
    job = attempt.job
    plan, spec = job.plan, job.spec
    meeting = job.rendezvous.prepare(
        plan, *agent.held, gang=attempt.gang, attempt=attempt.number, retries=spec.retries
    )
    checkpoints = checkpoint.environment(job.checkpoints, is_shared=True)
    slots = [
        {
            "rank": slot.rank,
            "device": devices.device_name(slot),
            "gpu": slot.gpu,
            "env": {
                **devices.environment(plan, slot), **_threads(plan), **checkpoints, **meet,
                **dict(spec.env),
            },
        }
        for slot, meet in zip(plan.slots, meeting.environments, strict=True)
    ]  # fmt: skip
    service = meeting.service
    marks = {**agent.marks, processes.COOKIE: attempt.gang}
    return {
        "gang": attempt.gang, "attempt": attempt.number, "slots": slots,
        "preload": list(job.preload),
        "service": service and {"function": service.function, "options": dict(service.options)},
        "env": {**os.environ, **dict(spec.env), **marks}, "cwd": agents.directory(),
        "sys_path": agents.import_path(), "fingerprint": digest,
        "clock_zero_s": job.clock_zero_s, "grace_s": spec.grace_s,
        "record_dir": str(job.record_dir), "record": spec.timeline is not None,
    }  # fmt: skip
