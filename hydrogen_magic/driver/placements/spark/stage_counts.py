"""How far Spark's jobs are: their tasks, by stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.spark_session import Session

TaskCount = tuple[int, int]
"""Number of finished tasks, and of all tasks."""


class StageCounts:
    """The tasks of the jobs under a tag. Any thread may ask."""

    def __init__(self, session: Session, tag: str) -> None:
        self._session = session
        self._tag = tag
        self._reported: dict[int, TaskCount] = {}
        """As Spark Connect has reported them, for all jobs of the session."""

    def counts(self) -> dict[int, TaskCount]:
        """Return the tasks of every stage that has begun, by its number.

        Connect reports a stage only after its first task has finished.
        """
        if self._session.is_connect:
            return dict(self._reported)
        return private_calls.stages_of(self._session, self._tag) or {}

    def clear(self) -> None:
        """Forget what was reported: another job begins."""
        self._reported.clear()

    def complete(self) -> None:
        """Count all tasks as finished: the last report of Connect may be older than their end."""
        self._reported = {stage: (total, total) for stage, (_, total) in self._reported.items()}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Receive the progress reports of Connect; a classic session is asked instead."""
        if not self._session.is_connect:
            yield
            return

        def report(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:
            for stage in stages or ():
                if stage.num_completed_tasks:
                    self._reported[stage.stage_id] = stage.num_completed_tasks, stage.num_tasks

        self._session.spark.registerProgressHandler(report)
        try:
            yield
        finally:
            self._session.spark.removeProgressHandler(report)
