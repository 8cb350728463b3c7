"""The launch messages for the agents of a gang."""

from __future__ import annotations

from typing import Any

from hydrogen_magic.core.job import HOROVOD_TIMELINE
from hydrogen_magic.core.processes import COOKIE
from hydrogen_magic.driver.placements import Attempt, devices, local_agents
from hydrogen_magic.driver.placements.spark import barrier_job, forwarded_settings, rank_assignment
from hydrogen_magic.driver.placements.spark.remote_agents import RemoteAgent

__all__ = ["messages"]


def messages(
    attempt: Attempt, assignment: rank_assignment.RankAssignment, is_recording: bool | None
) -> dict[RemoteAgent, dict[str, Any]]:
    """Return each agent's launch message: its own slots; the first also has the rendezvous service."""
    job, spec = attempt.job, attempt.job.spec
    meeting = job.rendezvous.prepare(
        assignment.plan,
        *assignment.agents[0].held,
        spec=spec,
        gang=attempt.gang,
        attempt=attempt.number,
    )
    env = forwarded_settings.environment(job)
    # The agent replaces it by another path.
    given = {name: value for name, value in spec.env if name != HOROVOD_TIMELINE}
    told: dict[RemoteAgent, dict[str, Any]] = {}
    service = meeting.service and {
        "function": meeting.service.function, "options": dict(meeting.service.options),
    }  # fmt: skip
    for agent in assignment.agents:
        ranks = assignment.ranks_on(agent)
        told[agent] = {
            "gang": attempt.gang, "attempt": attempt.number, "preload": list(job.preload),
            "slots": [
                {
                    "rank": slot.rank, "partition": assignment.partitions[slot.rank],
                    "device": devices.device_name(slot), "gpu": slot.gpu,
                    "env": {
                        **devices.environment(assignment.plan, slot), **meeting.environments[slot.rank],
                        **given,
                    },
                }
                for slot in map(assignment.plan.slots.__getitem__, ranks)
            ],
            "service": service if 0 in ranks else None, "secrets": list(job.secrets),
            "env": {**env, COOKIE: attempt.gang}, "cwd": local_agents.directory(),
            "fingerprint": barrier_job.fingerprint(job), "clock_zero_s": job.clock_zero_s,
            "grace_s": spec.grace_s,
            "record": spec.timeline is not None if is_recording is None else is_recording,
            "checkpoints": str(job.checkpoints) if assignment.shares_disk else None,
        }  # fmt: skip
    return told
