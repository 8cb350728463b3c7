"""What a task of an ``%%infer`` on Spark reports to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TaskStatus", "TaskProgress"]

_MOST_FAILURES = 3
"""Failed places whose text a task tells; all of them are counted."""


@dataclass
class TaskProgress:
    """One attempt at one partition, so far."""

    stage: int
    partition: int
    attempt: int
    """Spark's number of this very attempt, of which there is no second in an application."""
    is_trial: bool
    """It is there to see which columns ``predict`` returns; its rows come once more."""
    phase: str = "loading"
    """``loading`` (the cell runs), ``running``, then ``done``, ``failed`` or ``left`` (nobody wants the
    rest of it)."""
    rows: int = 0
    """Rows done."""
    failed: int = 0
    """Of these, the ones without a prediction."""
    said: str = ""
    """Why it failed."""
    failures: tuple[str, ...] = ()
    """What a person is told of the first rows that got no prediction."""

    def count(self, n_rows: int, failed: int, failures: Sequence[str]) -> None:
        """Count a chunk that is done."""
        self.rows += n_rows
        self.failed += failed
        self.failures = (*self.failures, *failures)[:_MOST_FAILURES]


@dataclass
class TaskStatus:
    """What a worker says."""

    worker: str
    """Tells it from all others."""
    host: str
    pid: int
    device: str
    tasks: tuple[TaskProgress, ...]
    """The one under way, and those that ended since the last time."""
    stacks: str = ""
    """Where its threads are, when that was asked."""
