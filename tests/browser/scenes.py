"""Gangs as lists of events, to be looked at in the live view without starting any."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import replay
from tests import seconds
from tests.pictures import STEP_S, ended, launched, trained

__all__ = ["SCENES", "events_of"]

_N_STEPS = 200
_END_S = 2.0 + STEP_S * _N_STEPS
_NAMES = tuple(f"validation/{part}_of_the_objective_head" for part in ("mean", "std", "max", "min"))


def _training(np: int) -> list[ev.Event]:
    return trained(np, _N_STEPS)


def _straggling() -> list[ev.Event]:
    """Return 64 ranks of which one has done half of the steps."""
    behind = 41
    return [
        replace(event, count=event.count // 2)
        if isinstance(event, ev.Steps) and event.rank == behind
        else event
        for event in trained(64, _N_STEPS)
    ]


def _stopped() -> list[ev.Event]:
    exits = [ev.RankExited(_END_S + 1, rank, None, "SIGTERM", True) for rank in range(64)]
    return [*trained(64, _N_STEPS), *exits, ev.GangEnded(_END_S + 1, "STOPPED", "stopped by you")]


def _nan() -> list[ev.Event]:
    bad = (math.nan,) * 50
    steps = tuple(range(_N_STEPS, _N_STEPS + 50))
    return [*_training(2), ev.Metrics(_END_S, 1, steps, (_END_S,) * 50, {"loss": bad, "lr": bad})]


def _flood() -> list[ev.Event]:
    text = "".join(f"line {n} of ten thousand and two\n" for n in range(500))
    return [
        *_training(2),
        ev.Output(_END_S, 0, "stdout", "the first line\n"),
        ev.Output(_END_S, 0, "stdout", text, 300_000, 9_501),
    ]


def _crash() -> list[ev.Event]:
    frame = ev.Frame("<cell 7>", 4, "<module>", "loss = total / count")
    error = ev.ErrorReport("ZeroDivisionError", "division by zero", (frame,))
    return [
        *launched(2),
        ev.Output(2.0, 1, "stdout", "one line\n"),
        ev.RankFailed(3.0, 1, error, "running"),
        ev.RankExited(3.1, 1, 1),
        ev.RankExited(3.2, 0, None, "SIGTERM", True),
        ev.GangEnded(3.3, "FAILED", "rank 1 failed: ZeroDivisionError", 1),
    ]


def _profile() -> list[ev.Event]:
    starts = [_END_S - 0.05 + 0.01 * step for step in range(5)]
    ends = [start + 0.009 for start in starts]
    names = [f"step {step}" for step in range(5)]
    profiled = [
        seconds.spans(_END_S, rank, names, starts, ends, (0,) * 5, 0, ev.PROFILER)
        for rank in range(2)
    ]
    recording = ev.Profiling(_END_S - 0.1, "recording")
    return [*_training(2), recording, *profiled, ev.Profiling(_END_S, "", "/tmp/profile.json")]


def _inferring() -> list[ev.Event]:
    """Return two ranks that predict rows, and a notice that is longer than a line."""
    failed = ", ".join(f"row {row}: a pixel is darker than black" for row in range(8))
    bars = [
        ev.Progress(at_s, rank, -1, "rows", rows * at_s, None, "rows")
        for at_s in (2.0, 3.0)
        for rank, rows in enumerate((400_000.0, 80_000.0))
    ]
    return [
        *launched(2),
        *bars,
        ev.RowsDone(3.0, 1.0, 1_440_000, 5_000_000, 4, 8),
        ev.Notice(3.0, "warning", f"8 rows got no prediction: {failed}"),
    ]


def _many_metrics() -> list[ev.Event]:
    plain = tuple(f"train/part_{n}" for n in range(8))
    return trained(2, _N_STEPS, ("loss", *_NAMES, *plain), spans=False)


SCENES: Mapping[str, Callable[[], Sequence[ev.Event]]] = {
    "running": lambda: launched(16),
    "training-2": lambda: _training(2),
    "training-16": lambda: _training(16),
    "training-24": lambda: _training(24),
    "straggling-64": _straggling,
    "stopped-64": _stopped,
    "nan": _nan,
    "flood": _flood,
    "crash": _crash,
    "profile": _profile,
    "metrics": _many_metrics,
    "inferring": _inferring,
    "done": lambda: ended(_training(2)),
}


def events_of(name: str) -> tuple[Sequence[ev.Event], float]:
    """Return the events of a scene, and the time of the last one."""
    events = SCENES[name]()
    return events, replay(events).now_s
