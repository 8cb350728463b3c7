"""The ranks of one attempt on a host."""

from __future__ import annotations

import asyncio

from hydrogen_magic.node.agent.rank_set import RankSet


def test_interrupting_no_ranks_takes_no_grace() -> None:
    """A Stop may come before the first rank of a session's cell has started."""
    asyncio.run(asyncio.wait_for(RankSet().interrupt(grace_s=1000.0), 20.0))
