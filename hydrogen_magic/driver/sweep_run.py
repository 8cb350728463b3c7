"""One run of a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.sweep_values import label_of
from hydrogen_magic.errors import GangStoppedError, HydrogenError, ResultError

Launch = Callable[[], Gang]


class SweepRun:
    """One combination of a sweep: it waits for its turn, then it is a gang."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.label = label_of(values)
        self.gang: Gang | None = None
        self._refused: BaseException | None = None
        """Why it never became a gang."""

    def start(self, launch: Launch) -> None:
        """Become a gang; one that cannot be launched ends this run only."""
        try:
            self.gang = launch()
        except BaseException as error:
            self.refuse(error)
            if not isinstance(error, HydrogenError):
                raise

    def refuse(self, reason: BaseException) -> None:
        """Never become a gang."""
        self._refused = reason

    @property
    def state(self) -> str:
        """``QUEUED``, then the state of a gang."""
        if self.gang is not None:
            return self.gang.state
        if self._refused is None:
            return "QUEUED"
        return "STOPPED" if isinstance(self._refused, GangStoppedError) else "FAILED"

    @property
    def error(self) -> BaseException | None:
        """Why it has no result, None for a run that succeeded or has not ended."""
        if self.gang is None:
            return self._refused
        try:
            self.gang.raise_for_state()
        except BaseException as error:  # of a rank inside the kernel it is the user's own
            return error
        lost = self.gang.received.of(0).errors if self.gang.wait(0) else {}
        return ResultError("\n".join(lost.values())) if lost else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it has ended; waits for a gang."""
        return self._refused is not None if self.gang is None else self.gang.wait(timeout_s)

    def events(self, start: int = 0) -> Sequence[ev.Event]:
        """Return the events of its gang, from the ``start``-th on."""
        if self.gang is not None:
            return self.gang.events(start)
        if self._refused is None:
            return []
        ended: list[ev.Event] = [ev.GangEnded(0.0, self.state, str(self._refused))]
        return ended[start:]

    def row(self) -> dict[str, Any]:
        """Return what :attr:`Sweep.results` has of it."""
        gang, error = self.gang, self.error
        state = gang.snapshot() if gang is not None else None
        is_complete = state is not None and state.state == "SUCCEEDED" and error is None
        return {
            "params": dict(self.values),
            "gang": gang.id if gang is not None else None,
            "state": self.state,
            "duration_s": state.length_s(time.time()) if state is not None else None,
            "metrics": dict(state.last_metrics) if state is not None else {},
            "result": gang.result if gang is not None and is_complete else None,
            "out": dict(gang.out) if gang is not None and is_complete else {},
            "error": None if error is None else str(error),
        }
