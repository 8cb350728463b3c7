"""A gang that runs nothing, for tests of what shows and steers gangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.gang_state import GangState, replay


class FakeGang(Gang):
    """A gang that takes note of what it is told."""

    def __init__(self, folder: Path, *, ended: bool = False) -> None:
        self.id = "3f2a"
        self.told: list[Any] = []
        self._folder = folder
        self._events: list[ev.Event] = [
            ev.GangLaunched(0.0, self.id, "--np 2", 2, "local", "torch", 1.0, "b:1:1", {}),
            ev.AttemptStarted(0.0, 0),
            ev.Metrics(1.0, 0, (1, 2), (1.0, 2.0), {"loss": (0.5, float("nan"))}),
            ev.Spans(1.0, 0, ("step",), (100,), (200,), (0,)),
        ]
        if ended:
            self._events.append(ev.GangEnded(2.0, "SUCCEEDED", "2 ranks finished"))

    def events(self, start: int = 0) -> list[ev.Event]:
        return self._events[start:]

    def snapshot(self) -> GangState:
        return replay(self._events)

    def stop(self, kill: bool = False) -> None:
        self.told.append("kill" if kill else "stop")

    def ask_stacks(self) -> None:
        self.told.append("stacks")

    def record(self, on: bool = True) -> None:
        self.told.append(("record", on))

    def profile(self, steps: int = 5) -> None:
        self.told.append(("profile", steps))

    def log_path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"
