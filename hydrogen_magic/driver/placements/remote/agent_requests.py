"""The launch requests of an attempt on other machines, one for each agent."""

from __future__ import annotations

from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import Attempt, launch_request
from hydrogen_magic.driver.placements.remote import forwarded_settings, host_tasks
from hydrogen_magic.driver.placements.remote.agents import RemoteAgent
from hydrogen_magic.driver.placements.remote.rank_assignment import RankAssignment


def for_agents(
    attempt: Attempt, assignment: RankAssignment, address: tuple[str, int]
) -> dict[RemoteAgent, msg.LaunchRequest]:
    """Return each agent's request, with its own ranks; the first agent also serves the rendezvous.

    Agents without a rank that takes part have none.
    """
    plan, idle = assignment.plan, set(attempt.job.idle_ranks)
    rendezvous = launch_request.rendezvous_info(attempt, plan, address)
    return {
        agent: launch_request.build(
            attempt, plan, rendezvous, _host_launch(attempt, assignment, agent)
        )
        for agent in assignment.agents
        if not idle.issuperset(assignment.ranks_on(agent))
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
        preload=job.preload,
        fingerprint=host_tasks.fingerprint(job),
        # The agent puts another path in its place.
        user_env={name: value for name, value in job.spec.env if name != timeline_variable},
        tasks={rank: assignment.tasks[rank] for rank in ranks},
        checkpoint_dir=str(job.checkpoints) if assignment.shares_disk else None,
    )
