"""What a task of an ``%%infer`` on Spark counts; a thread beside it reports that to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydrogen_magic.core import messages as msg

_MAX_FAILURES = 3
"""Failures that are reported with their text; all are counted."""


class TaskCounter:
    """The progress of one attempt at one partition."""

    def __init__(self, progress: msg.TaskProgress) -> None:
        self.progress = progress

    def enter(self, phase: str) -> None:
        self.progress = replace(self.progress, phase=phase)

    def fail(self, error: str) -> None:
        """Note why it failed."""
        self.progress = replace(self.progress, error=error)

    def count(self, n_rows: int, failed: int, failures: Sequence[str]) -> None:
        """Count a chunk that is done."""
        so_far = self.progress
        self.progress = replace(
            so_far,
            rows=so_far.rows + n_rows,
            failed=so_far.failed + failed,
            failures=(*so_far.failures, *failures)[:_MAX_FAILURES],
        )
