"""A run of ``%%infer`` in the user's hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydrogen_magic.driver.gang import Gang


class InferenceRun:
    """What ``%%infer --detach`` returns."""

    def __init__(
        self,
        gang: Gang | None,
        value: Callable[[], Any],
        finished: Callable[[], Any] = lambda: None,
    ) -> None:
        """``finished`` returns the finished rows after a stop, None if there are none."""
        self.gang = gang
        """The ranks that predict; None for a lazy Spark DataFrame."""
        self._value = value
        self._finished = finished
        self._partial: Any = None

    @property
    def result(self) -> Any:
        """The frame with its predictions, of the kind that was passed.

        Waits for the end. After a stop by the user it has only the finished rows, and a notice of the gang
        says which ones are missing. Raises InferError if the data, ``predict`` or its predictions are
        invalid, and what :meth:`Gang.raise_for_state` raises.
        """
        if self.gang is not None:
            self.gang.wait()
            state = self.gang.snapshot()
            if self._partial is None and (state.state, state.stop_reason) == ("STOPPED", "user"):
                self._partial = self._finished()
            if self._partial is not None:
                return self._partial
            self.gang.raise_for_state()
        return self._value()

    def __repr__(self) -> str:
        return f"<InferenceRun of {self.gang!r}>"
