"""Ranks that say what nobody should: it is refused at the border, or shown without harm."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import EventBatch, encode
from hydrogen_magic.driver.state.gang_state import replay
from hydrogen_magic.node.agent.server import AgentServer
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.reporting import reporter as reporters
from hydrogen_magic.node.worker.reporting.send_interval import TICK_S, SendInterval
from hydrogen_magic.views.text_table import gang_lines
from hydrogen_magic.views.widget.page_updates import PageUpdates
from hydrogen_magic.views.widget.static_html import static_html
from tests.gang_events import running


def through_json(event: ev.Event) -> ev.Event:
    """Return the event as it arrives in another process."""
    return ev.decode(json.loads(json.dumps(ev.encode(event))))


# ── at the border ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "event",
    [
        ev.Steps(1.0, 0, 10**400),
        ev.Steps(math.nan, 0, 1),
        ev.Steps(-math.inf, 0, 1),
        ev.Steps(1e308, 0, 1),
        ev.Progress(1.0, 0, 0, "bar", 10**400, None),
        ev.Progress(1.0, 0, 0, "bar", 1, 10**400),
        ev.Metrics(1.0, 0, (2**63,), (1.0,), {"loss": (1.0,)}),
        ev.Metrics(1.0, 0, (1,), (1.0,), {"loss": (10**400,)}),
        ev.Metrics(1.0, 0, (1, 2), (1.0, math.inf), {}),
        ev.Metrics(1.0, 0, (1, 2), (1.0, 2.0), {"loss": (1.0,)}),
        ev.Spans(1.0, 0, ("a", "b"), (1,), (2, 2), (0, 0)),
        ev.Spans(1.0, 0, ("a", "b"), (-(10**18), 1), (2, 2), (0, 0)),
        ev.Spans(1.0, 0, ("a", "b"), (0, 1), (2, 10**18), (0, 0)),
    ],
    ids=repr,
)
def test_numbers_that_no_gang_has_are_refused(event: ev.Event) -> None:
    with pytest.raises(ev.MessageError):
        through_json(event)


def test_values_may_be_anything_that_a_float_can_be() -> None:
    values = (math.inf, -math.inf, 1e308, -1e-320, None)
    event = ev.Metrics(1.0, 0, (-(2**63), 0, 1, 2, 2**63 - 1), (1.0,) * 5, {"loss": values})
    assert through_json(event) == event


# ── shown without harm ───────────────────────────────────────────────────────────────────────────

numbers = st.sampled_from(
    [0, 1, -1, 0.5, math.nan, math.inf, -math.inf, 1e308, -1.7e308, 1e-320, 2**53 + 1, 10**18]
)
integers = st.sampled_from([0, 1, -1, 10**18, 2**63 - 1, -(2**63)])
texts = st.sampled_from(
    ["", "\x1b[2J", "\ud800", "</script>", "x" * 9000, "\u202e\n\x00", "__proto__", "a\rb"]
)
times = st.sampled_from([0.0, -5.0, 1.0, 9e8])
moments = st.sampled_from([0, -5, 10**9, 10**18 - 1])
ranks = st.integers(0, 1)
columns = st.tuples(numbers, st.none() | numbers)
integer_pairs, moment_pairs = st.tuples(integers, integers), st.tuples(moments, moments)
values = st.dictionaries(texts, columns, max_size=2)
hostile = st.one_of(
    st.builds(ev.Metrics, times, ranks, integer_pairs, st.just((1.0, 1.0)), values, integers),
    st.builds(ev.Progress, times, ranks, integers, texts, numbers, st.none() | numbers, texts),
    st.builds(ev.Steps, times, ranks, integers),
    st.builds(
        ev.Spans,
        times,
        ranks,
        st.tuples(texts, texts),
        moment_pairs,
        moment_pairs,
        integer_pairs,
        integers,
        texts,
    ),
    st.builds(ev.CollectiveWait, times, ranks, texts, integers, times),
    st.builds(
        ev.RankHealth,
        times,
        ranks,
        integers,
        numbers,
        st.just("R"),
        st.none() | numbers,
        st.none() | integers,
    ),
    st.builds(ev.RankStacks, times, ranks, texts),
    st.builds(ev.RankPhase, times, ranks, texts | st.just("running"), texts),
    st.builds(ev.RankStarted, times, ranks, integers, texts, texts),
    st.builds(ev.Output, times, ranks, texts, texts, integers),
    st.builds(ev.Notice, times, texts, texts),
    st.builds(ev.RankExited, times, ranks, st.none() | integers, texts),
)


def as_sent(content: object) -> bytes:
    """Do what a Jupyter session does; it allows no NaN and no half of a character."""
    return json.dumps(content, allow_nan=False, ensure_ascii=False).encode()


@settings(max_examples=200)
@given(st.lists(hostile, min_size=1, max_size=6), st.sampled_from(["SUCCEEDED", "FAILED"]))
def test_what_passes_the_border_is_shown(said: list[ev.Event], end: str) -> None:
    events: list[ev.Event] = [
        *running(),
        *map(through_json, said),
    ]
    state, feed, last = replay(events), PageUpdates(), ev.GangEnded(5.0, end, "\ud800", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fresh, now_s in ((events, 2.0), ([last], 5.0)):
            state = replay([*events, last]) if now_s == 5.0 else state
            message = feed.update(state, fresh, now_s)
            assert message is not None
            as_sent(message.content)
            for part in feed.full("page"):
                as_sent(part.content)
            for metric in feed.curves.metrics():
                steps = {"from": -1e18, "until": 1e18, "buckets": 9}
                order = {"id": "1", "client": "page", "metric": metric, **steps}
                as_sent(feed.detail(order).content)
            assert gang_lines(state, now_s, 80)
        assert "3f2a" in static_html(state, [*events, last])


# ── on the rank ──────────────────────────────────────────────────────────────────────────────────


class Sent:
    """Takes what a reporter sends, through the JSON it would cross the socket as."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def __call__(self, batch: Sequence[ev.Event]) -> None:
        self.events += map(through_json, batch)


def reporter(sent: Sent) -> reporters.Reporter:
    made = reporters.Reporter(0, time.monotonic(), sent)
    reporters.install(made)
    return made


def test_steps_have_64_bits() -> None:
    sent = Sent()
    rank = reporter(sent)
    for step in (2**63, -(2**63) - 1, 10**5000):
        with pytest.raises(TypeError, match="64 bits"):
            api.log(step=step, loss=1.0)
    api.log(step=2**63 - 1, loss=1.0)
    rank.close()
    assert [event.steps for event in sent.events if isinstance(event, ev.Metrics)] == [(2**63 - 1,)]


@pytest.mark.parametrize("total", [10**400, math.inf, math.nan, -1, 0])
def test_bars_end_wherever_the_user_says(total: float) -> None:
    sent = Sent()
    rank = reporter(sent)
    assert list(api.track(range(2), total=total)) == [0, 1]
    rank.close()
    assert [event.n for event in sent.events if isinstance(event, ev.Progress)][-1:] == [2.0]


def test_a_range_without_a_length_can_be_tracked() -> None:
    assert next(iter(api.track(range(10**19)))) == 0


def test_endless_names_travel_short() -> None:
    sent = Sent()
    rank = reporter(sent)
    with api.span("n" * 100_000):
        list(api.track(range(1), desc="d" * 100_000))
    rank.close()
    assert len(json.dumps([ev.encode(event) for event in sent.events])) < 2000


def test_calls_with_a_name_of_their_own_each_make_no_table_of_nothing() -> None:
    sent = Sent()
    rank = reporter(sent)
    for number in range(3000):
        api.log(**{f"loss of {number}": 1.0})
    rank.close()
    batches = [event for event in sent.events if isinstance(event, ev.Metrics)]
    assert sum(len(event.steps) for event in batches) == 3000
    assert sum(len(event.steps) * len(event.values) for event in batches) < 40 * 3000
    started: list[ev.Event] = [ev.GangLaunched(0.0, "cafe", "", 1, "", "", 1.0, "", {})]
    assert len(replay([*started, *batches]).ranks[0].last_metrics) == 1000


# ── the way to the kernel ────────────────────────────────────────────────────────────────────────


def test_what_is_too_large_for_one_message_goes_in_several() -> None:
    """ZeroMQ drops larger ones, and a rank's result would be lost with what it logged."""
    sent: list[EventBatch] = []

    def send(message: EventBatch) -> None:
        if len(json.dumps(encode(message))) > 1000:
            raise ValueError("1000 bytes at most")
        sent.append(message)

    agent = SimpleNamespace(_send=send)
    agent._send_events = partial(AgentServer._send_events, agent)
    now = SimpleNamespace(now_s=lambda: 1.0)
    agent_group: Any = SimpleNamespace(gang="cafe", attempt=0, reporter=now)
    steps = [ev.encode(ev.Steps(1.0, 0, number)) for number in range(100)]
    huge = ev.encode(ev.Output(1.0, 0, "stdout", "x" * 5000))
    agent._send_events(agent_group, [*steps[:50], huge, *steps[50:]])
    events = [event for message in sent for event in message.events]
    assert [event for event in events if event[0] == "Steps"] == steps
    (notice,) = {event[1]["text"] for event in events if event[0] == "Notice"}
    assert notice.startswith("an event of type Output was dropped: it is too large")


# ── many ranks ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("world_size", "age_s", "interval_s"),
    [
        (1, 0.0, 0.1),
        (128, 0.0, 0.1),
        (256, 0.0, 0.2),
        (1024, 0.0, 0.8),
        (100_000, 0.0, 1.0),
        (1, 3600.0, 0.5),
        (256, 3600.0, 0.5),
        (1024, 3600.0, 0.8),
    ],
)
def test_the_more_ranks_and_the_longer_they_run_the_rarer_each_sends(
    world_size: int, age_s: float, interval_s: float
) -> None:
    now_s = 100.0
    pace = SendInterval(7, world_size, clock=lambda: now_s)
    points_per_s = pace.max_points / pace.interval_s
    now_s += age_s
    assert pace.interval_s == pytest.approx(interval_s, rel=0.01)
    assert pace.max_points / pace.interval_s == pytest.approx(points_per_s, rel=0.01, abs=10)
    n_ticks, n_sent = 1000, 0
    for _ in range(n_ticks):
        now_s += TICK_S
        n_sent += pace.is_due(is_urgent=False)
    assert n_sent == pytest.approx(n_ticks * TICK_S / interval_s, rel=0.05, abs=2)


def test_what_is_urgent_goes_at_once_and_ranks_take_turns() -> None:
    now_s = 0.0
    paces = [SendInterval(rank, 1024, clock=lambda: now_s) for rank in range(64)]
    assert paces[1].is_due(is_urgent=True) and not paces[1].is_due(is_urgent=False)
    due = []
    for _ in range(round(0.8 / TICK_S) + 1):
        due.append(sum(pace.is_due(is_urgent=False) for pace in paces))
        now_s += TICK_S
    assert sum(due) >= 64 and max(due) <= 8
