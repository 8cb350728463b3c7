"""Status of a task of ``%%infer`` on Spark, for the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TaskStatus", "TaskProgress"]

_MOST_FAILURES = 3
"""Number of failures whose text a task reports; all of them are counted."""


@dataclass
class TaskProgress:
    """One attempt at one partition, so far."""

    stage: int
    partition: int
    attempt: int
    """Spark's number of this attempt, unique within an application."""
    is_trial: bool
    """It only determines the columns that ``predict`` returns; its rows are predicted again."""
    phase: str = "loading"
    """``loading`` (the cell runs), ``running``, then ``done``, ``failed`` or ``left`` (the rest is not
    needed)."""
    rows: int = 0
    """Rows done."""
    failed: int = 0
    """Of these, the ones without a prediction."""
    said: str = ""
    """The reason of its failure."""
    failures: tuple[str, ...] = ()
    """Description of the first rows without a prediction, for the user."""

    def count(self, n_rows: int, failed: int, failures: Sequence[str]) -> None:
        """Count a chunk that is done."""
        self.rows += n_rows
        self.failed += failed
        self.failures = (*self.failures, *failures)[:_MOST_FAILURES]


@dataclass
class TaskStatus:
    """The report of a worker."""

    worker: str
    """Unique id of the worker."""
    host: str
    pid: int
    device: str
    tasks: tuple[TaskProgress, ...]
    """The current task, and those that ended since the last report."""
    stacks: str = ""
    """Stacks of its threads, if requested."""
