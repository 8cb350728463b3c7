"""Horovod's timeline followed, drawn and kept; from files as Horovod writes them, without Horovod."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import RecordPart, TimelineFile
from hydrogen_magic.driver.state.collective_waits import late_in_all
from hydrogen_magic.driver.state.gang_state import replay
from hydrogen_magic.driver.state.stragglers import stragglers
from hydrogen_magic.frameworks.horovod.node import timeline_follower
from hydrogen_magic.frameworks.horovod.node.timeline_file import cut
from hydrogen_magic.frameworks.horovod.node.timeline_follower import Timelines
from hydrogen_magic.frameworks.horovod.node.timeline_spans import Span, SpanBuilder
from hydrogen_magic.node.agent.log_shipping import LogShipper
from hydrogen_magic.node.agent.timeline_following import ShippedFile
from hydrogen_magic.views.text_table import warnings
from tests import seconds
from tests.horovod_timeline_files import ORIGIN_US, Written


def training(n_steps: int = 3, tensors: Sequence[str] = ("w", "a", "b")) -> Written:
    """Return steps of 10 ms over these tensors, the first step not cached yet, rank 1 late there."""
    written = Written()
    written.step(0, tensors, [(0, 0), (2, 500), (1, 5500)])
    for step in range(1, n_steps):
        written.marker(10_000 * step - 10)
        written.step(10_000 * step, tensors)
    return written


def spans_of(data: bytes) -> list[Span]:
    weaver = SpanBuilder()
    weaver.take(cut(data).events)
    return weaver.drain()


# ── events and spans ─────────────────────────────────────────────────────────────────────────────


def test_spans_tell_negotiation_from_reduction_and_who_came_last() -> None:
    found = spans_of(training(2).data)
    assert sorted(found, key=lambda span: (span[3], span[1])) == [
        ("negotiate allreduce", 0, 5500, 0),
        ("allreduce", 5500, 7500, 0),
        ("negotiate allreduce", 10_000, 11_000, 0),
        ("allreduce", 11_000, 13_000, 0),
        ("waiting for rank 1", 500, 5500, 1),
        ("memcpy in fusion buffer", 5500, 6500, 1),
        ("gloo allreduce", 6500, 7500, 1),
        ("memcpy in fusion buffer", 11_000, 12_000, 1),
        ("gloo allreduce", 12_000, 13_000, 1),
    ]


def test_a_file_cut_anywhere_gives_the_same_spans() -> None:
    """With the bracket that is there for a moment, or without."""
    data = training(2, ("w", "a")).data
    whole = spans_of(data)
    for until, bracket in itertools.product(range(len(data)), (b"", b"]")):
        weaver = SpanBuilder()
        first = cut(data[:until] + bracket)
        assert first.n_bytes <= until
        weaver.take(first.events)
        weaver.take(cut(data[first.n_bytes :]).events)
        assert weaver.drain() == whole, until


def test_outer_spans_of_what_overlaps_lie_side_by_side() -> None:
    """Whatever is open at once; what has no beginning or no end harms nobody."""
    chance = random.Random(5)
    written, now_us = Written(), 0
    for _ in range(3000):
        now_us += chance.randrange(200)
        tensor, phase = f"t{chance.randrange(40)}", chance.choice("BBEEX")
        name = chance.choice(["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "NEGOTIATE_BROADCAST"])
        written.event(phase, str(chance.randrange(4)) if phase == "X" else name, now_us, tensor)
    spans = spans_of(written.data)
    assert {depth for *_, depth in spans} == {0, 1}
    outer = sorted(span[1:3] for span in spans if span[3] == 0)
    assert all(start <= end for start, end in outer)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(outer))


# ── following ────────────────────────────────────────────────────────────────────────────────────


class Followed:
    """A timeline that an agent follows; the gang was launched one second before the timeline's origin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self.told: list[ev.Event] = []
        zero_s = time.monotonic()
        self.timelines = Timelines(zero_s, self.told.append)
        wall_ahead_s = ORIGIN_US / 1e6 - 1.0 - zero_s
        self.timelines.turn_to(0, TimelineFile(str(path), True, wall_ahead_s))

    def poll(self) -> None:
        self.timelines._next_s = 0.0  # at once, not only now and then
        self.timelines.poll()

    def spans(self) -> Iterator[tuple[str, float, float, int]]:
        for event in self.told:
            assert isinstance(event, ev.Spans), event
            assert (event.rank, event.track) == (0, "coordinator")
            for name, start_s, end_s, depth in seconds.rows_of(event):
                yield name, round(start_s, 6), round(end_s, 6), depth


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    """One whose polls take as long as they need, on a machine that is busy with others."""
    monkeypatch.setattr(timeline_follower, "_BUDGET_S", math.inf)
    return Followed(tmp_path / "horovod-timeline-1.json")


def test_spans_are_on_the_gangs_clock(followed: Followed) -> None:
    followed.path.write_bytes(training().data + b"]")
    followed.poll()
    _, start_s, end_s, depth = next(s for s in followed.spans() if s[0] == "gloo allreduce")
    assert [start_s, end_s] == pytest.approx([1.0065, 1.0075]) and depth == 1
    followed.timelines.finish()


def test_a_negotiation_is_seen_while_it_goes_on(followed: Followed) -> None:
    written = Written()
    written.event("B", "NEGOTIATE_ALLREDUCE", 0, "w")
    followed.path.write_bytes(written.data + b"]")
    # The timeline began a second after the gang, the gang just now: move that back.
    followed.timelines._zero_s -= 4.0
    before_s = followed.timelines._now_s()
    followed.poll()
    after_s = followed.timelines._now_s()
    ((name, start_s, end_s, _),) = followed.spans()
    assert (name, start_s) == ("negotiate allreduce", pytest.approx(1.0))
    assert before_s - 0.001 <= end_s <= after_s + 0.001
    followed.timelines.finish()


def test_a_steps_last_reduction_is_seen_before_the_next_step(followed: Followed) -> None:
    """Its last event is in the file only when the next one is written, a step later."""
    data = training().data
    followed.timelines._zero_s -= 4.0
    followed.path.write_bytes(data[: data.rindex(b',{"ph": "E"')])
    followed.poll()
    before = list(followed.spans())
    assert ("allreduce", 1.021, 1.023, 0) in before
    followed.path.write_bytes(data)
    followed.poll()
    assert list(followed.spans()) == before
    followed.timelines.finish()


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b"]",
        b",",
        b',{"ph": "B", "na',
        b',{"name": "process_name", "p',
        b',{"name": "process_name", "ph": "M", "pid": 4, "args": {"name": "c"}},\n{"ph": "B"',
    ],
)
def test_a_killed_rank_leaves_valid_json(followed: Followed, left: bytes) -> None:
    data = training().data
    followed.path.write_bytes(data + left)
    followed.timelines.finish()
    kept = json.loads(followed.path.read_bytes())
    assert len(kept) == data.count(b'"ph": ')
    assert [e["name"] for e in kept if e["ph"] == "X"] == ["0", "2", "1"] * 3


def test_nothing_recorded_leaves_no_file(followed: Followed) -> None:
    followed.poll()
    followed.timelines.finish()
    assert not followed.path.exists()


def test_what_comes_too_fast_is_seen_later(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_follower, "_BUDGET_S", 0.0)
    data = training(3_000).data
    followed.path.write_bytes(data + b"]")
    following = followed.timelines._following
    assert following is not None
    followed.poll()
    assert 0 < following._read < len(data), "a look takes milliseconds, whatever there is"
    while following._read < len(data):
        followed.poll()
    followed.timelines.finish()
    assert sum(span[0] == "allreduce" for span in followed.spans()) == 3_000
    assert followed.path.read_bytes() == data + b"]"


@pytest.mark.parametrize("left", [b"]", b',{"ph": "B", "na'])
def test_a_record_is_whole_though_the_view_is_not(
    left: bytes, followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_follower, "_FINISH_S", 0.0)
    data = training(1_000).data
    followed.path.write_bytes(data + left)
    followed.timelines.finish()
    assert followed.path.read_bytes() == data + b"]"
    assert followed.timelines.kept[0].settled == len(data)
    assert 0 < sum(span[0] == "allreduce" for span in followed.spans()) < 1_000


def test_a_file_that_cannot_be_read_is_told_and_harms_nobody(tmp_path: Path) -> None:
    told: list[ev.Event] = []
    timelines = Timelines(time.monotonic(), told.append)
    timelines.turn_to(0, TimelineFile(str(tmp_path), False, 0.0))
    timelines.poll()
    timelines.finish()
    (notice,) = told
    assert isinstance(notice, ev.Notice) and "can no longer be read" in notice.text


def test_a_timeline_is_shipped_as_it_settles(tmp_path: Path) -> None:
    """Each part is whole objects, so that the kernel's copy can be closed at any time."""
    followed = Followed(tmp_path / "horovod-timeline-1.json")
    data, copy = training(40).data, bytearray()

    async def send(label: RecordPart, part: bytes) -> None:
        assert label == RecordPart("cafe", "horovod-timeline-1.json", len(copy), "]")
        copy.extend(part)
        json.loads(bytes(copy) + b"]")

    async def ship() -> None:
        logs = LogShipper("cafe", tmp_path / "none", followed.timelines.kept, send)
        logs.begin()
        for start, until in itertools.pairwise((0, 700, 5000, len(data))):
            with followed.path.open("ab") as file:
                file.write(data[start:until])
            followed.poll()
            await asyncio.sleep(0.25)  # it ships five times a second
        followed.timelines.finish()
        await logs.finish()

    asyncio.run(ship())
    assert bytes(copy) + b"]" == followed.path.read_bytes()
    assert isinstance(followed.timelines.kept[0], ShippedFile)


# ── whom ranks wait for ──────────────────────────────────────────────────────────────────────────


def waits(slow: dict[int, float], n_steps: int = 50, np: int = 4) -> list[ev.Event]:
    """Return what ranks tell that take 0.1 s a step, and ``slow[rank]`` more."""
    events: list[ev.Event] = [
        ev.GangLaunched(0.0, "g", "", np, "local", "horovod", 0.0, "me", {}),
        *(ev.RankPhase(0.0, rank, "running") for rank in range(np)),
    ]
    now_s = 0.0
    for _ in range(n_steps):
        end_s = now_s + 0.11 + max(slow.values(), default=0.0)
        for rank in range(np):
            ready_s = now_s + 0.1 + slow.get(rank, 0.0)
            spans = (("hvd.synchronize",), (ready_s,), (end_s,), (0,))
            events.append(seconds.spans(end_s, rank, *spans, 0, ev.COLLECTIVES))
        now_s = end_s
    return events


@pytest.mark.parametrize("late", [[1], [0, 3]])
def test_who_is_waited_for_is_named(late: list[int]) -> None:
    state = replay(waits(dict.fromkeys(late, 0.05)))
    assert set(stragglers(state, state.now_s)) == set(late)
    (warned,) = warnings(state, state.now_s)
    who = {1: "rank 1", 2: "ranks 0 and 3"}[len(late)]
    assert re.fullmatch(f"ranks waited for {who} in collectives: 3[12] % of the time", warned.text)
    in_all = late_in_all({rank.rank: rank.waits for rank in state.ranks})
    assert in_all is not None and in_all.ranks == tuple(late)


def test_ranks_that_keep_step_wait_for_nobody() -> None:
    assert warnings(replay(waits({})), 6.0) == []
    state = replay(waits({1: 0.005}))
    assert set(stragglers(state, state.now_s)) == set()


def test_what_was_long_ago_is_forgotten() -> None:
    state = replay(waits({1: 0.05}))
    assert set(stragglers(state, state.now_s + 100)) == set()
