"""Runs of gangs as lists of events, to draw finished pictures of."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import replay
from hydrogen_magic.driver.state.output_lines import OutputLine
from hydrogen_magic.driver.state.span_tracks import SpanTracks
from hydrogen_magic.views.curves import Curves
from hydrogen_magic.views.static_svg import html
from tests import seconds

CELLS = {"<cell 7>": "Cell In[7]"}
STEP_S = 0.01


def launched(np: int, device: str = "cpu") -> list[ev.Event]:
    head = ev.GangLaunched(0.0, "3f2a", f"--np {np}", np, "local", "torch", 1.0, "b:1:1", CELLS)
    events: list[ev.Event] = [head, ev.AttemptStarted(0.0, 0)]
    for rank in range(np):
        events += [
            ev.RankStarted(0.1, rank, 100 + rank, "here", device),
            ev.RankPhase(0.1, rank, "starting", "importing torch"),
            ev.RankPhase(0.9 + 0.05 * (rank % 8), rank, "loading"),
            ev.RankPhase(1.4 + 0.05 * (rank % 8), rank, "running"),
        ]
    return events


def trained(
    np: int, n_steps: int, metrics: Sequence[str] = ("loss", "lr"), spans: bool = True
) -> list[ev.Event]:
    """Return the events of ranks that train for so many steps, up to their last one."""
    events = launched(np)
    for rank in range(np):
        source = random.Random(rank)
        at_s = 2.0 + STEP_S * n_steps
        times_s = tuple(2.0 + STEP_S * step for step in range(n_steps))
        values = {name: _values(name, n_steps, source) for name in metrics}
        events.append(ev.Metrics(at_s, rank, tuple(range(n_steps)), times_s, values))
        events += [ev.Progress(at_s, rank, 1, "epoch", n_steps, n_steps), *_steps(rank, n_steps)]
        events.append(ev.RankHealth(at_s, rank, 1_230_000_000 + rank * 10**7, 99.0, "R"))
        if spans:
            events.append(_spans(rank, n_steps, source))
    return events


def _values(name: str, n_steps: int, source: random.Random) -> tuple[float, ...]:
    if name == "lr":
        return tuple(
            1e-3 * 0.5 * (1 + math.cos(math.pi * k / n_steps)) + 1e-8 for k in range(n_steps)
        )
    if name == "accuracy":
        return tuple(
            0.9 - 0.8 * math.exp(-3 * k / n_steps) + source.gauss(0, 0.02) for k in range(n_steps)
        )
    if name == "grad_norm":
        return tuple(math.exp(source.gauss(1 - k / n_steps, 0.3)) for k in range(n_steps))
    return tuple(
        0.2 + 2.1 * math.exp(-4 * k / n_steps) + source.gauss(0, 0.05) for k in range(n_steps)
    )


def _steps(rank: int, n_steps: int) -> list[ev.Event]:
    middle_s, end_s = 2.0 + STEP_S * n_steps / 2, 2.0 + STEP_S * n_steps
    return [ev.Steps(middle_s, rank, n_steps // 2), ev.Steps(end_s, rank, n_steps)]


def _spans(rank: int, n_steps: int, source: random.Random) -> ev.Spans:
    names, starts, ends = [], [], []
    for step in range(n_steps):
        start = 2.0 + STEP_S * step
        for name, share in (
            ("data", 0.12 + 0.1 * (rank == 2)),
            ("forward", 0.28),
            ("backward", 0.4),
        ):
            length = STEP_S * share * source.uniform(0.9, 1.1)
            names.append(name)
            starts.append(start)
            start += length
            ends.append(start)
        if step % 500 == 499:
            names.append("checkpoint")
            starts.append(start)
            ends.append(start + STEP_S * 0.1)
    return seconds.spans(ends[-1], rank, names, starts, ends, (0,) * len(names))


def ended(events: Sequence[ev.Event], state: str = "SUCCEEDED") -> list[ev.Event]:
    """Return ``events`` and the end of every rank that has none."""
    known = replay(events)
    at_s = known.now_s
    last: list[ev.Event] = []
    for rank in known.ranks:
        if not rank.is_over:
            last += [
                ev.RankResult(at_s + 0.1, rank.rank, 10),
                ev.RankExited(at_s + 0.2, rank.rank, 0),
            ]
    return [*events, *last, ev.GangEnded(at_s + 0.3, state, "")]


def drawn(events: Sequence[ev.Event], lines: Sequence[OutputLine] = (), report: str = "") -> str:
    """Return the finished picture of a run."""
    curves, tracks = Curves(), SpanTracks()
    curves.feed(events)
    tracks.feed(events)
    return html(replay(events), curves, tracks, lines, report)
