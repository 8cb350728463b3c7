"""View: what following a gang costs the kernel, what is sent to the page, and how old points are.

    python benchmarks/view.py

Cost, without ranks and a page: events as ranks send them are made up beforehand and given to the feed of
the live view ten times a second of their own time, as fast as it takes them. Share: the seconds that took,
of the seconds the events last: the part of one core that the live view uses. State: the same for the gang's
state, which every view needs. Bytes: messages with their JSON, on average and in the second that had most of
them. Longest: the processor time of one message.

Age, with ranks on this machine: from ``hm.log`` on a rank to the update that gives the point to a view in
the kernel. ``benchmarks/page.py`` measures the age of values that the page shows.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from _common import chosen
from _results import Table, parse_arguments, report

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.attending import show
from hydrogen_magic.driver.calls import launch
from hydrogen_magic.driver.state.gang_state import GangState, fold
from hydrogen_magic.views import ATTENDED_S
from hydrogen_magic.views.widget.page_updates import PageMessage, PageUpdates

MESSAGES_PER_S = 10
EVENTS_PER_S = 20
"""Batches that a rank sends of whatever it has, each second."""

Batch = list[ev.Event]
Case = Callable[[int], Iterator[Batch]]
"""Yields the events of every tenth of a second; called with the seconds to last."""


@dataclass
class Found:
    """What a case costs."""

    share: float
    fold_share: float
    """The same for putting the gang's state together, which any view needs."""
    most_bytes_per_s: int
    bytes_per_s: float
    n_messages: int
    longest_s: float
    """The longest that one message took."""


def begun(np: int) -> Batch:
    """Return how a gang comes to run."""
    batch: Batch = [
        ev.GangLaunched(0.0, "cafe", f"--np {np}", np, "local", "torch", 1.7e9, "", {}),
        ev.AttemptStarted(0.0, 0),
    ]
    for rank in range(np):
        batch.append(ev.RankStarted(0.01, rank, 1000 + rank, "worker-1", f"cuda:{rank}"))
        batch.append(ev.RankPhase(0.02, rank, "running"))
    return batch


def times(seconds: int) -> Iterator[float]:
    yield from (tick / MESSAGES_PER_S for tick in range(1, seconds * MESSAGES_PER_S + 1))


def points(np: int, n_metrics: int, per_s: int) -> Case:
    """Return ranks that log ``n_metrics`` values at each of ``per_s`` steps a second."""
    names = [f"metric_{number}" for number in range(n_metrics)]

    def case(seconds: int) -> Iterator[Batch]:
        yield begun(np)
        n = per_s // EVENTS_PER_S
        step = 0
        for now_s in times(seconds):
            batch: Batch = []
            for part in range(EVENTS_PER_S // MESSAGES_PER_S):
                steps = tuple(range(step, step + n))
                step += n
                at_s = now_s - 0.05 * part
                for rank in range(np):
                    values = {name: tuple(random.random() for _ in steps) for name in names}
                    batch.append(ev.Metrics(at_s, rank, steps, (at_s,) * n, values))
                    batch.append(ev.Steps(at_s, rank, step))
                    batch.append(ev.Progress(at_s, rank, 0, "train", float(step), 1e6))
            yield batch + health(np, now_s)

    return case


def spans(np: int, per_s: int) -> Case:
    """Return ranks that record ``per_s`` spans a second."""
    names = ("forward", "backward", "optimizer", "data wait", "all_reduce")

    def case(seconds: int) -> Iterator[Batch]:
        yield begun(np)
        n = per_s // EVENTS_PER_S
        for now_s in times(seconds):
            batch: Batch = []
            for part in range(EVENTS_PER_S // MESSAGES_PER_S):
                first_ns = round(1e9 * (now_s - 0.05 * (part + 1)))
                starts = tuple(first_ns + 50_000_000 * i // n for i in range(n))
                ends = tuple(start + 40_000_000 // n for start in starts)
                labels = tuple(itertools.islice(itertools.cycle(names), n))
                depths = tuple(i % 2 for i in range(n))
                batch += [ev.Spans(now_s, r, labels, starts, ends, depths) for r in range(np)]
            yield batch + health(np, now_s)

    return case


def many(np: int) -> Case:
    """Return ranks that say once a second how far they are, and how they are."""

    def case(seconds: int) -> Iterator[Batch]:
        yield begun(np)
        for tick, now_s in enumerate(times(seconds)):
            turn = range(tick % MESSAGES_PER_S, np, MESSAGES_PER_S)
            yield [
                *(ev.Progress(now_s, r, 0, "train", now_s * (9 + r % 3), 1000.0) for r in turn),
                *(ev.RankHealth(now_s, r, 10**9 + tick * r, 99.0, "R") for r in turn),
            ]

    return case


def idle(np: int) -> Case:
    """Return ranks of which only the operating system has something to say."""

    def case(seconds: int) -> Iterator[Batch]:
        yield begun(np)
        for now_s in times(seconds):
            yield health(np, now_s)

    return case


def health(np: int, now_s: float) -> Batch:
    is_due = round(now_s * MESSAGES_PER_S) % MESSAGES_PER_S == 0
    rss = 2**30 + int(now_s * 4096)
    if not is_due:
        return []
    return [ev.RankHealth(now_s, rank, rss, 99.0, "R", 80.0, rss) for rank in range(np)]


def measured(case: Case, seconds: int) -> Found:
    """Run one case through a feed."""
    feed, state = PageUpdates(), GangState()
    spent_s = fold_s = longest_s = 0.0
    by_second = [0] * seconds
    n_messages = 0
    for tick, batch in enumerate(list(case(seconds))):
        now_s = tick / MESSAGES_PER_S
        began_s = time.process_time()
        for event in batch:
            state = fold(state, event)
        folded_s = time.process_time()
        message = feed.update(replace(state), batch, now_s)
        done_s = time.process_time()
        fold_s += folded_s - began_s
        spent_s += done_s - folded_s
        longest_s = max(longest_s, done_s - folded_s)
        if message is not None:
            n_messages += 1
            by_second[max(0, tick - 1) // MESSAGES_PER_S] += size(message)
    total = sum(by_second)
    return Found(
        spent_s / seconds, fold_s / seconds, max(by_second), total / seconds, n_messages, longest_s
    )


def size(message: PageMessage) -> int:
    """Return the bytes of a message as it is sent, its envelope (about 600 bytes) left out."""
    text = json.dumps(message.content, ensure_ascii=False, allow_nan=False)
    return len(text.encode()) + sum(map(len, message.buffers))


# ── age ──────────────────────────────────────────────────────────────────────────────────────────


def log_times(seconds: float, per_s: int) -> None:
    """What every rank runs: log the present time at ``per_s`` steps a second."""
    import hydrogen_magic as hm

    start_s, step = time.monotonic(), 0
    while (elapsed_s := time.monotonic() - start_s) < seconds:
        while step < elapsed_s * per_s:
            hm.log(step, logged_s=time.monotonic())
            step += 1
        time.sleep(0.005)


class AgeView:
    """A view that records the age of every point at the update that brings it."""

    interval_s = ATTENDED_S

    def __init__(self) -> None:
        self.ages_s: list[float] = []

    def update(self, state: GangState, fresh: Sequence[ev.Event]) -> None:
        now_s = time.monotonic()
        for event in fresh:
            if isinstance(event, ev.Metrics):
                self.ages_s += [now_s - time_s for time_s in event.values["logged_s"] if time_s]

    def withdraw_input(self) -> None: ...

    def close(self, state: GangState) -> None: ...


def ages_s(np: int, per_s: int, seconds: int) -> list[float]:
    """Return the ages of the points of one gang."""
    view = AgeView()
    gang = launch(log_times, seconds, per_s, np=np)
    show(gang, view)
    gang.raise_for_state()
    return view.ages_s


CASES: dict[str, Case] = {
    "8 ranks, 4 metrics, 1,000 points/s each": points(8, 4, 1000),
    "8 ranks, 50,000 spans each in 10 s": spans(8, 5000),
    "1,024 ranks, progress and health": many(1024),
    "4 ranks, idle": idle(4),
}
LOGGING = {"2 ranks, 10 points/s each": (2, 10), "8 ranks, 1,000 points/s each": (8, 1000)}
"""Names of gangs -> ranks, and points that each of them logs in a second."""
AGE_GOAL_S = 1.0


def main() -> None:
    run = parse_arguments(
        __doc__.splitlines()[0],
        packages=(),
        more=lambda parser: parser.add_argument(
            "--seconds", type=int, default=10, help="that the events last"
        ),
    )
    names = chosen([*CASES, *LOGGING], run.only)
    report(run, costs([name for name in names if name in CASES], run.seconds))
    report(run, ages([name for name in names if name in LOGGING], run.seconds))


def costs(names: Sequence[str], seconds: int) -> Table:
    columns = {"": "", "share": "%", "state": "%", "sent": "kB/s", "most": "kB/s", "longest": "ms"}
    rows: list[list[Any]] = []
    for name in names:
        found = measured(CASES[name], seconds)
        shares = [100 * found.share, 100 * found.fold_share]
        sent = [found.bytes_per_s / 1e3, found.most_bytes_per_s / 1e3]
        rows.append([name, *shares, *sent, 1e3 * found.longest_s])
    return Table("view_cost", "cost", columns, rows)


def ages(names: Sequence[str], seconds: int) -> Table:
    columns = {"": "", "points": "", "median": "ms", "oldest": "ms"}
    rows: list[list[Any]] = []
    for name in names:
        found = ages_s(*LOGGING[name], seconds)
        rows.append([name, len(found), 1e3 * statistics.median(found), 1e3 * max(found)])
    return Table("view_age", f"age of points (goal: {AGE_GOAL_S:.0f} s)", columns, rows)


if __name__ == "__main__":
    main()
