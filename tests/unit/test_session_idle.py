"""A session between two cells: when it ends, and when its ranks have to meet anew."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.placements.local import LocalPlacement
from hydrogen_magic.driver.session import RankSession
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.worker.session import entered_collectives
from hydrogen_magic.node.worker.session.entered_collectives import EnteredCollectives

UNUSED: Any = SimpleNamespace(session=None, originals=None)


def session_of(agents: Any, spec: JobSpec) -> RankSession:
    return RankSession(spec, Plan(()), agents, asyncio.get_running_loop(), UNUSED)


@pytest.mark.parametrize(
    ("next_cell", "ends"),
    [("none", ["its ranks"]), ("is launched", []), ("has a longer limit, and is over", [])],
)
def test_it_ends_unless_its_next_cell_is_launched(next_cell: str, ends: list[str]) -> None:
    """The kernel's thread launches a cell; the timer is due before the loop begins it."""
    found: list[str] = []

    async def end_session() -> None:
        found.append("its ranks")

    async def run_cells() -> None:
        agents = SimpleNamespace(
            is_retained=True, end_session=end_session, kill=lambda: found.append("its cell")
        )
        spec = JobSpec(np=1, session="lab", idle_s=0.0)
        session = session_of(agents, spec)
        session.next_cell(spec, UNUSED).finish()
        if next_cell != "none":
            is_over = next_cell.endswith("over")
            cell = session.next_cell(replace(spec, idle_s=1000.0 * is_over), UNUSED)
            if is_over:
                cell.begin("3f2a", lambda reason, kill: None)
                cell.finish()
        await asyncio.sleep(0.01)

    asyncio.run(run_cells())
    assert found == ends


def test_ranks_that_infer_keeps_are_ended_for_another_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their agents would start the ranks where the last ones were."""
    ends: list[str] = []
    kept: Any = SimpleNamespace(spec=JobSpec(placement="mine"), is_running=False, why_ended="")

    def end(why: str) -> None:
        kept.why_ended = why
        ends.append(why)

    kept.end = end
    monkeypatch.setattr(sessions, "_sessions", {sessions.UNNAMED: kept})
    new_agents = SimpleNamespace(has_sessions=False)
    monkeypatch.setattr(LocalPlacement, "open", lambda placement, spec: new_agents)
    feed: Any = SimpleNamespace(key="cell")
    assert launcher._kept_ranks(LocalPlacement(), JobSpec(), Plan(()), UNUSED, feed) is None
    assert ends == ["another gang has begun"]


def test_a_placement_without_sessions_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_sessions", {})
    agents = SimpleNamespace(has_sessions=False)
    monkeypatch.setattr(LocalPlacement, "open", lambda placement, spec: agents)
    with pytest.raises(PlacementError, match="`--on mine` does not support --session"):
        launcher._session_of(
            LocalPlacement(), JobSpec(placement="mine", session="lab"), Plan(()), UNUSED, None
        )


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
    assert epochs_after((entered, has_left, exit_codes)) == [int(is_new)]


def test_a_release_does_not_count_against_the_cells_after_it() -> None:
    released = (1, 0), True, (1, 1)
    assert epochs_after(released, ((1, 1), False, (1, 1))) == [1, 1]
    assert epochs_after(released, ((1, 0), False, (1, 1))) == [1, 2]


def epochs_after(*cells: tuple[tuple[int, int], bool, tuple[int, int]]) -> list[int]:
    """Return the epoch after each cell of two ranks.

    Each cell: how many collectives its ranks have entered, whether they left their groups, their exit codes.
    """

    async def run_cells() -> list[int]:
        spec = JobSpec(np=2, session="lab", idle_s=1000.0)
        session, epochs = session_of(SimpleNamespace(is_retained=True), spec), []
        cell = session.next_cell(spec, UNUSED)
        for entered, has_left, exit_codes in cells:
            for rank in range(2):
                unchanged: Any = ({}, {}, (), (), (), 1, None)
                cell.note(ev.NamesChanged(1.0, rank, *unchanged, entered[rank], has_left))
                cell.note(ev.RankExited(1.0, rank, exit_codes[rank]))
            cell.finish()
            cell = session.next_cell(spec, UNUSED)
            assert cell.cell is not None
            epochs.append(cell.cell.epoch)
        return epochs

    return asyncio.run(run_cells())


def test_a_rank_counts_the_collectives_of_its_cell_alone() -> None:
    numbers = iter([5, 7])  # of groups that earlier cells have used
    groups: Any = SimpleNamespace(n_entered=lambda waited_s: next(numbers))
    entered = EnteredCollectives(UNUSED, groups)
    assert entered.count() == 0, "it has not begun, and its groups may be gone"
    entered.begin()
    assert entered.count() == 2


def test_a_cell_may_end_while_its_collectives_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The main thread ends it as soon as it is released from a collective."""
    groups: Any = SimpleNamespace(are_released=True, n_entered=lambda waited_s: 3)
    times_s, reported = iter([0.0, 2.0]), list[ev.Event]()
    reporter: Any = SimpleNamespace(
        rank=0,
        now_s=lambda: next(times_s),
        collectives=SimpleNamespace(current=None),
        report=reported.append,
    )
    entered = EnteredCollectives(reporter, groups)
    entered.begin()
    monkeypatch.setattr(entered_collectives, "_place_of_main_thread", lambda: (1, 1))
    entered.poll()

    def end_meanwhile(waited_s: float) -> int:
        groups.n_entered = lambda waited_s: 4
        entered.end()
        return 4

    groups.n_entered = end_meanwhile
    entered.poll()
    assert reported == []
