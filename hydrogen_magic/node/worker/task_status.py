"""What a task of an ``%%infer`` on Spark reports to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TaskProgress", "TaskStatus"]

_MAX_FAILURES = 3
"""Failures that are reported with their text; all are counted."""


@dataclass
class TaskProgress:
    """One attempt at one partition."""

    stage: int
    partition: int
    attempt: int
    """Spark's number of the attempt, unique in an application."""
    is_trial: bool
    """It only finds out which columns ``predict`` returns; its rows are predicted again later."""
    phase: str = "loading"
    """``loading`` (the cell runs), ``running``, then ``done``, ``failed`` or ``left`` (cancelled)."""
    rows: int = 0
    """Rows done."""
    failed: int = 0
    """Rows of these without a prediction."""
    error: str = ""
    """Why the attempt failed."""
    failures: tuple[str, ...] = ()
    """Messages about the first rows without a prediction."""

    def count(self, n_rows: int, failed: int, failures: Sequence[str]) -> None:
        """Count a finished chunk."""
        self.rows += n_rows
        self.failed += failed
        self.failures = (*self.failures, *failures)[:_MAX_FAILURES]


@dataclass
class TaskStatus:
    """The report of a worker."""

    worker: str
    """Unique name of the worker process."""
    host: str
    pid: int
    device: str
    tasks: tuple[TaskProgress, ...]
    """The current task, and those that ended since the last report."""
    stacks: str = ""
    """Stacks of its threads, if requested."""
