"""The events of a gang in memory: packed without a difference, in a fraction of the memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hydrogen_magic.core import event_history
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.event_history import EventHistory

N = 5000
"""Events: four packed blocks, and recent ones."""


def metrics(n: int) -> ev.Metrics:
    return ev.Metrics(n / 10, n % 2, (n,), (n / 10,), {"loss": (1 / (n + 1),), "lr": (None,)})


def output(n: int) -> ev.Output:
    return ev.Output(n / 10, n % 2, "stdout", f"step {n}: äß\nnext\n")


def history(events: Sequence[ev.Event]) -> EventHistory:
    found = EventHistory()
    for event in events:
        found.append(event)
    return found


def test_every_part_is_that_of_a_list() -> None:
    chance = random.Random(1)
    events = [chance.choice([metrics, output])(n) for n in range(N)]
    found = history(events)
    assert list(found) == events and len(found) == N and found[-1] == events[-1]
    for _ in range(30):
        first, until = chance.randrange(-N - 9, N + 9), chance.randrange(-N - 9, N + 9)
        part, expected = found[first:until], events[first:until]
        assert len(part) == len(expected) and list(part) == expected
        assert list(part[3:]) == expected[3:] and list(part[:-4]) == expected[:-4]
        assert list(reversed(part)) == expected[::-1]
        if expected:
            assert part[-1] == expected[-1] and part[0] == expected[0]
        place = chance.randrange(-N, N)
        assert found[place] == events[place]
    assert list(reversed(found)) == events[::-1]
    with pytest.raises(IndexError):
        found[N]
    with pytest.raises(ValueError, match=r"list\(events\) has any"):
        found[::-1]


def test_a_part_stays_what_it_was_while_events_are_added() -> None:
    found = history(map(metrics, range(N)))
    old, new = found[:3000], found[N - 10 :]
    for n in range(N, 2 * N):
        found.append(metrics(n))
    assert list(old) == [metrics(n) for n in range(3000)]
    assert list(new) == [metrics(n) for n in range(N - 10, N)]


def test_another_thread_may_read() -> None:
    found = EventHistory()

    def read() -> None:
        seen = 0
        while seen < 4 * N:
            length = len(found)
            assert not length or found[length - 1] == metrics(length - 1)
            assert not length or found[-1].at_s >= metrics(length - 1).at_s
            fresh = found[seen:]
            assert list(fresh) == [metrics(n) for n in range(seen, seen + len(fresh))]
            seen += len(fresh)

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        for n in range(4 * N):
            found.append(metrics(n))
        reading.result()


@pytest.mark.parametrize(
    ("event", "limit"),
    [
        pytest.param(metrics, 2.5e6, id="metrics"),  # 11 MB as objects
        pytest.param(output, 3.5e6, id="output"),  # 7 MB if only characters count
    ],
)
def test_the_events_of_a_long_run_take_little_memory(
    monkeypatch: pytest.MonkeyPatch, event: Callable[[int], ev.Event], limit: float
) -> None:
    monkeypatch.setattr(event_history, "_SHOWN_CHARS", 1 << 20)
    found = EventHistory()
    tracemalloc.start()
    try:
        for n in range(4 * N):
            found.append(event(n))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < limit, held_bytes


@pytest.mark.parametrize("n_shown", [N // 2, 10, 0])
def test_the_oldest_output_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, n_shown: int
) -> None:
    size = len(output(0).text) + event_history._OF_EVENT
    events = [replace(output(n), text=output(0).text) for n in range(N)]
    monkeypatch.setattr(event_history, "_SHOWN_CHARS", n_shown * size)
    found = list(history(events))
    assert found[N - n_shown :] == events[N - n_shown :]
    n_bytes, n_lines = len(output(0).text.encode()), 2
    for event, before in zip(found[: N - n_shown], events, strict=False):
        assert event == replace(before, text="", skipped_bytes=n_bytes, skipped_lines=n_lines)


def test_a_display_without_content_remains() -> None:
    shown = ev.Display(1.0, 0, 1, "show", {"text/plain": "x" * (9 << 20)})
    assert list(history([shown, metrics(1)])) == [replace(shown, data={}), metrics(1)]
