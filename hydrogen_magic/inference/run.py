"""A run of ``%%infer`` in the user's hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydrogen_magic.driver.gang import Gang

__all__ = ["InferenceRun"]


class InferenceRun:
    """What ``%%infer --detach`` returns."""

    def __init__(self, gang: Gang | None, value: Callable[[], Any]) -> None:
        self.gang = gang
        """The ranks that predict; None for a lazy Spark DataFrame."""
        self._value = value

    @property
    def result(self) -> Any:
        """The frame with its predictions, of the kind that was passed.

        Waits for the end. Raises InferError if the data, ``predict`` or its predictions are invalid, and
        what :meth:`Gang.raise_for_state` raises.
        """
        if self.gang is not None:
            self.gang.wait()
            self.gang.raise_for_state()
        return self._value()

    def __repr__(self) -> str:
        return f"<InferenceRun of {self.gang!r}>"
