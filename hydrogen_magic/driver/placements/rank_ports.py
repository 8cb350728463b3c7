"""Ports for ranks that listen themselves: see :attr:`Rendezvous.needs_rank_ports`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hydrogen_magic.core.job import Plan
from hydrogen_magic.driver.placements.agent_client import AgentClient
from hydrogen_magic.driver.rendezvous import Rendezvous

_Agent = TypeVar("_Agent", bound=AgentClient)


async def with_ports(
    plan: Plan, rendezvous: Rendezvous, ranks_of: Mapping[_Agent, Sequence[int]]
) -> Plan:
    """Return the plan with ports that the ranks' agents hold, if the rendezvous needs them.

    Raises the same errors as :meth:`AgentClient.hold_ports`.
    """
    if not rendezvous.needs_rank_ports:
        return plan
    holding = (agent.hold_ports(len(ranks)) for agent, ranks in ranks_of.items())
    held = await asyncio.gather(*holding)
    port_of = {
        rank: port
        for ranks, ports in zip(ranks_of.values(), held, strict=True)
        for rank, port in zip(ranks, ports, strict=True)
    }
    return replace(plan, slots=tuple(replace(s, port=port_of[s.rank]) for s in plan.slots))
