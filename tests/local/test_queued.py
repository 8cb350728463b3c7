"""A gang that waits for room: told as it is, and no rank is late meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.messages import AgentCommand
from hydrogen_magic.driver import start_watch
from hydrogen_magic.driver.placements import AgentGroup, Attempt, EventSink
from hydrogen_magic.driver.placements.local import LocalPlacement
from hydrogen_magic.driver.state.gang_state import GangState, replay
from hydrogen_magic.errors import GangTimeoutError
from hydrogen_magic.views.text_table import gang_lines, headline
from hydrogen_magic.views.widget import rank_rows
from hydrogen_magic.views.widget.page_updates import PageUpdates
from tests import plain_ranks
from tests.gangs import PATIENCE_S, notices_of

START_TIMEOUT_S = 1.0
PART_S = 0.1


def waiting(*events: ev.Event) -> GangState:
    begun: list[ev.Event] = [
        ev.GangLaunched(0.0, "cafe", "", 4, "local", "torch", 1.0, "", {}),
        ev.AttemptStarted(0.0, 0),
        ev.Queued(1.0, 0, 4),
        ev.Queued(2.0, 2, 4),
    ]
    return replay([*begun, *events])


def test_views_say_how_many_slots_there_are() -> None:
    state = waiting()
    assert state.state == "PENDING" and state.queued == (2, 4)
    assert headline(state, 12.0) == "gang cafe · 4 ranks · queued, 2 of 4 slots · 12 s"
    gang = rank_rows.gang_row(state, 12.0)
    assert gang["state"] == "queued" and gang["queued"] == [2, 4]


def test_views_say_what_it_waits_for() -> None:
    reason = "1 of 2 executors so far; job 3 (hydrogen_magic gang f00d, 2 ranks) holds 2 slots"
    state = waiting(ev.Queued(3.0, 1, 4, reason))
    assert gang_lines(state, 12.0, 200)[-1] == f"! waiting for slots: {reason}"
    assert rank_rows.gang_row(state, 12.0)["warnings"] == [f"waiting for slots: {reason}"]
    over = waiting(ev.Queued(3.0, 1, 4, reason), ev.Queued(4.0, 4, 4))
    assert rank_rows.gang_row(over, 12.0)["warnings"] == []


@pytest.mark.parametrize(
    ("event", "word"),
    [
        (ev.Queued(3.0, 4, 4), "starting"),
        (ev.AttemptStarted(3.0, 1), "starting"),
        (ev.GangEnded(3.0, "STOPPED", "stopped by you"), "stopped"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_waits_no_longer(event: ev.Event, word: str) -> None:
    state = waiting(event)
    assert state.queued is None
    gang = rank_rows.gang_row(state, 4.0)
    assert gang["state"] == word and gang["queued"] is None
    assert "queued" not in headline(state, 4.0)


def test_stopping_is_said_rather_than_waiting() -> None:
    state = waiting(ev.StopRequested(3.0, "user"))
    assert "stopping (you asked)" in headline(state, 4.0)
    assert rank_rows.gang_row(state, 4.0)["state"] == "stopping"


def test_pages_hear_of_every_slot_at_once() -> None:
    feed, state = PageUpdates(), waiting()
    feed.update(state, [], 2.0)
    event = ev.Queued(2.01, 3, 4)
    message = feed.update(waiting(event), [event], 2.01)
    assert message is not None and message.content["gang"]["queued"] == [3, 4]


def test_views_say_how_much_of_the_closure_has_arrived() -> None:
    before = [ev.Queued(3.0, 4, 4), ev.ClosureSent(4.0, 3_100_000_000, 100_000_000_000, 12, 100)]
    state = waiting(*before)
    text = "sending the closure: 3.1 GB of 100 GB, complete on 12 of 100 hosts"
    assert headline(state, 12.0) == f"gang cafe · 4 ranks · {text} · 12 s"
    gang = rank_rows.gang_row(state, 12.0)
    assert gang["state"] == "starting" and gang["sending"] == text
    all_of_it = waiting(*before, ev.ClosureSent(5.0, 10**11, 10**11, 100, 100))
    assert rank_rows.gang_row(all_of_it, 12.0)["sending"] == ""


# ── the time that ranks have to start ────────────────────────────────────────────────────────────


class WaitingAgentGroup(AgentGroup):
    """Waits for room until :attr:`has_room`; its ranks never start."""

    has_sessions = True

    def __init__(self) -> None:
        self.has_room = threading.Event()
        self.closure_parts = 0
        """Parts of the closure that arrive; the last one is missing."""
        self.data_s = 0.0
        """Time that data takes to reach the hosts before the closure does."""
        self._over = asyncio.Event()

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        zero_s = attempt.job.clock_zero_s
        sink.emit(ev.Queued(time.monotonic() - zero_s, 1, 2, "etl holds 1 slot"))
        await asyncio.to_thread(self.has_room.wait, PATIENCE_S)
        sink.emit(ev.Queued(time.monotonic() - zero_s, 2, 2))
        if self.data_s:
            sink.emit(ev.ClosureSent(time.monotonic() - zero_s, 1 << 40, 1 << 40, 1, 2, ev.DATA))
            await asyncio.sleep(self.data_s)
            sink.emit(ev.ClosureSent(time.monotonic() - zero_s, 1 << 40, 1 << 40, 2, 2, ev.DATA))
        for part in range(1, self.closure_parts + 1):
            sink.emit(ev.ClosureSent(time.monotonic() - zero_s, part, self.closure_parts + 1, 0, 2))
            await asyncio.sleep(PART_S)
        await asyncio.wait_for(self._over.wait(), PATIENCE_S)

    def stop(self) -> None:
        self.has_room.set()
        self._over.set()

    def kill(self) -> None:
        self.stop()

    def send(self, command: AgentCommand) -> None:
        raise AssertionError("there is no rank yet")

    async def release(self) -> None:
        self._over.set()


@pytest.fixture
def agent_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[WaitingAgentGroup]:
    made = WaitingAgentGroup()

    def opened(placement: LocalPlacement, spec: JobSpec) -> AgentGroup:
        return made

    monkeypatch.setattr(LocalPlacement, "open", opened)
    monkeypatch.setattr(start_watch, "_CHECK_S", 0.01)
    yield made
    made.has_room.set()


def test_ranks_are_late_only_from_when_there_is_room(agent_group: WaitingAgentGroup) -> None:
    gang = hm.launch(plain_ranks.environment, np=2, start_timeout=START_TIMEOUT_S)
    assert not gang.wait(1.5 * START_TIMEOUT_S), "it waits for room, for as long as it takes"
    assert gang.snapshot().queued == (1, 2)
    agent_group.has_room.set()
    assert gang.wait(PATIENCE_S)
    ended = next(e for e in gang.events() if isinstance(e, ev.Queued) and e.have == e.wanted)
    late = [event for event in gang.events() if isinstance(event, ev.RankFailed)]
    assert [event.error.type for event in late] == ["StartTimeout"] * 2
    assert all(event.at_s - ended.at_s > START_TIMEOUT_S / 2 for event in late), (
        "not from the launch"
    )
    assert gang.state == "FAILED"


@pytest.mark.parametrize("data_s", [0.0, 1.5 * START_TIMEOUT_S])
def test_ranks_are_late_only_from_when_the_closure_stands_still(
    agent_group: WaitingAgentGroup, data_s: float
) -> None:
    """Also when data that ranks read has reached their hosts first, more of it than of the closure."""
    agent_group.data_s = data_s
    agent_group.has_room.set()
    agent_group.closure_parts = int(1.5 * START_TIMEOUT_S / PART_S)
    gang = hm.launch(plain_ranks.environment, np=2, start_timeout=START_TIMEOUT_S)
    assert gang.wait(PATIENCE_S)
    sent = [e for e in gang.events() if isinstance(e, ev.ClosureSent) and e.what != ev.DATA]
    late = [event for event in gang.events() if isinstance(event, ev.RankFailed)]
    assert len(sent) == agent_group.closure_parts
    assert [event.error.type for event in late] == ["StartTimeout"] * 2
    assert all(event.at_s > sent[-1].at_s for event in late)


def test_a_gang_that_waits_for_room_can_be_stopped(agent_group: WaitingAgentGroup) -> None:
    gang = hm.launch(plain_ranks.environment, np=2)
    assert not gang.wait(0.05)
    gang.stop()
    assert gang.wait(PATIENCE_S) and gang.state == "STOPPED"


def test_a_timeout_while_it_waits_for_room_is_one_of_the_wait(
    agent_group: WaitingAgentGroup,
) -> None:
    """Its session has had no rank."""
    gang = hm.launch(plain_ranks.environment, np=2, session="never begun", timeout=0.1)
    assert gang.wait(PATIENCE_S)
    with pytest.raises(GangTimeoutError, match=r"waited for slots .* 0\.1 s: 1 of 2 slots; etl"):
        gang.raise_for_state()
    assert notices_of(gang) == "session 'never begun' has ended: no rank has started"
