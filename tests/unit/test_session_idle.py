"""A session between two cells: its idle end, and when its ranks have to meet anew."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
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


UNUSED: Any = SimpleNamespace(session=None, originals=None)


def session_of(agents: Any, spec: JobSpec) -> RankSession:
    return RankSession(spec, Plan(()), agents, asyncio.get_running_loop(), UNUSED)


def test_the_time_without_a_cell_begins_anew_with_each_cell() -> None:
    ends: list[str] = []

    async def end_session() -> None:
        ends.append("its ranks")

    async def run_cells() -> None:
        agents = SimpleNamespace(is_retained=True, end_session=end_session)
        spec = JobSpec(np=1, session="lab", idle_s=0.0)
        session = session_of(agents, spec)
        session.next_cell(spec, UNUSED).finish()
        cell = session.next_cell(replace(spec, idle_s=1000.0), UNUSED)
        cell.begin(lambda reason, kill: None)
        cell.finish()
        await asyncio.sleep(0.01)

    asyncio.run(run_cells())
    assert ends == []


@pytest.mark.parametrize(
    ("entered", "has_left", "exit_codes", "is_new"),
    [
        ((2, 2), False, (0, 0), False),
        ((2, 2), False, (1, 1), False),  # they agree on the next collective
        ((2, 1), False, (0, 1), True),
        ((2, 1), False, (0, 0), False),  # in groups of some ranks
        ((2, 2), True, (0, 1), True),
    ],
)
def test_ranks_that_may_disagree_on_the_next_collective_meet_anew(
    entered: tuple[int, int], has_left: bool, exit_codes: tuple[int, int], is_new: bool
) -> None:
    async def epoch_after() -> int:
        spec = JobSpec(np=2, session="lab", idle_s=1000.0)
        session = session_of(SimpleNamespace(is_retained=True), spec)
        cell = session.next_cell(spec, UNUSED)
        for rank in range(2):
            unchanged: Any = ({}, {}, (), (), (), 1, None)
            cell.note(ev.NamesChanged(1.0, rank, *unchanged, entered[rank], has_left))
            cell.note(ev.RankExited(1.0, rank, exit_codes[rank]))
        cell.finish()
        following = session.next_cell(spec, UNUSED).cell
        assert following is not None
        return following.epoch

    assert asyncio.run(epoch_after()) == int(is_new)
