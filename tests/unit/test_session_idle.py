"""The idle end of a session."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver.session import RankSession


@pytest.mark.parametrize("has_next_cell", [True, False])
def test_it_ends_unless_its_next_cell_is_launched(has_next_cell: bool) -> None:
    """The kernel's thread launches a cell; the timer is due before the loop begins it."""
    ends: list[str] = []

    async def end_session() -> None:
        ends.append("its ranks")

    async def run_cells() -> None:
        agents: Any = SimpleNamespace(
            is_retained=True, end_session=end_session, kill=lambda: ends.append("its cell")
        )
        spec = JobSpec(np=1, session="lab", idle_s=0.0)
        captured: Any = SimpleNamespace(session=None, originals=None)
        loop = asyncio.get_running_loop()
        session = RankSession(spec, Plan(()), agents, loop, captured)
        session.next_cell(spec, captured).finish()
        if has_next_cell:
            session.next_cell(spec, captured)
        await asyncio.sleep(0.01)

    asyncio.run(run_cells())
    assert ends == ([] if has_next_cell else ["its ranks"])
