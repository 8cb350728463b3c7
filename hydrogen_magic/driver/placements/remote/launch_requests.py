"""The launch requests of an attempt on other machines, one for each agent."""

from __future__ import annotations

from hydrogen_magic.core.messages import LaunchRequest
from hydrogen_magic.driver.placements import Attempt, launch_request, local_agents
from hydrogen_magic.driver.placements.remote import forwarded_settings, host_tasks
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.driver.placements.remote.rank_assignment import RankAssignment


def for_agents(
    attempt: Attempt, assignment: RankAssignment, is_recording: bool | None
) -> dict[RemoteAgent, LaunchRequest]:
    """Return each agent's request, with its own ranks; the first agent also serves the rendezvous."""
    job, plan = attempt.job, assignment.plan
    rendezvous = job.rendezvous.prepare(
        plan,
        *assignment.agents[0].held,
        spec=job.spec,
        gang=attempt.gang,
        attempt=attempt.number,
    )
    return {
        agent: launch_request.build(
            attempt, plan, rendezvous, _host_launch(attempt, assignment, agent), is_recording
        )
        for agent in assignment.agents
    }


def _host_launch(
    attempt: Attempt, assignment: RankAssignment, agent: RemoteAgent
) -> launch_request.HostLaunch:
    job, ranks = attempt.job, assignment.ranks_on(agent)
    timeline = job.rendezvous.timeline
    timeline_variable = timeline.variable if timeline is not None else ""
    return launch_request.HostLaunch(
        slots=[assignment.plan.slots[rank] for rank in ranks],
        env=forwarded_settings.environment(job),
        cwd=local_agents.directory(),
        preload=job.preload,
        fingerprint=host_tasks.fingerprint(job),
        # The agent puts another path in its place.
        user_env={name: value for name, value in job.spec.env if name != timeline_variable},
        tasks={rank: assignment.tasks[rank] for rank in ranks},
        checkpoint_dir=str(job.checkpoints) if assignment.shares_disk else None,
    )
