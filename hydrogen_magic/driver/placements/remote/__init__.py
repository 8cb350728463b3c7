"""Ranks on other machines: the machinery that every placement with hosts elsewhere shares::

    kernel ── HostProvider.start_agents ──► one task per rank ──► finds or starts its host's agent
       ▲                                                                       │
       └─────────── channel: TCP, encrypted, agents connect ◄──────────────────┘

A task holds the place of its rank and waits; the agent forks the ranks, as on the notebook's own machine.
There is one agent per host, which stays warm between cells.
"""

from hydrogen_magic.driver.placements import AgentLostError
from hydrogen_magic.driver.placements.remote.agent_group import RemoteAgentGroup
from hydrogen_magic.driver.placements.remote.host_tasks import HostTasks, problem_of
from hydrogen_magic.driver.placements.remote.provider import (
    HostLostError,
    HostProvider,
    HostsRevokedError,
    task_error,
)
from hydrogen_magic.driver.placements.remote.rank_assignment import unassigned

__all__ = [
    "AgentLostError",
    "HostLostError",
    "HostProvider",
    "HostTasks",
    "HostsRevokedError",
    "RemoteAgentGroup",
    "problem_of",
    "task_error",
    "unassigned",
]
