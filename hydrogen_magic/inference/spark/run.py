"""Predictions for all rows of a Spark DataFrame as Spark jobs, which can be counted and cancelled."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.errors import GangStoppedError
from hydrogen_magic.inference.spark.prepared import PreparedRun, as_error

TaskCount = tuple[int, int]
"""Number of finished tasks, and of all tasks."""


class SparkRun:
    """One run of a :class:`~hydrogen_magic.inference.spark.prepared.PreparedRun`.

    :meth:`result` blocks; the other methods may be called meanwhile from any thread.
    """

    def __init__(self, prepared: PreparedRun, begun: Any = None) -> None:
        """``begun``: the unfinished result of an earlier run, if one is resumed."""
        self.n_rows: int | None = None
        """Rows of the result, None before the end."""
        self.unfinished: Any = begun
        """The result, of which Spark has cached some partitions; None before the first one."""
        self._prepared = prepared
        self._session = prepared.session
        self._tag = f"hydrogen_magic-infer-{secrets.token_hex(4)}"
        self._first_tag = f"{self._tag}-first"
        """Tag of the job for the first batch."""
        self._is_stopped = threading.Event()
        self._reported: dict[int, TaskCount] = {}
        """Tasks by stage as Spark Connect has reported them."""

    def result(self, report_to: Mapping[str, Any] | None = None) -> Any:
        """Predict all rows; return the DataFrame, cached by Spark.

        ``report_to``: where tasks report their progress, see :meth:`PreparedRun.predicted`. Raises
        InferError if the cell or ``predict`` fails, GangStoppedError after :meth:`stop`.
        """
        try:
            with self._progress_handler():
                self._raise_if_stopped()
                if self.unfinished is None:
                    frame = self._prepared.predicted(self._first_tag, report_to)
                    self._raise_if_stopped()
                    self.unfinished = frame.persist()
                self._reported.clear()
                return self._counted(self.unfinished)
        except SparkJobError as error:
            if error.kind == "cancelled" and self._is_stopped.is_set():
                raise GangStoppedError("stopped: Spark has cancelled the job") from error
            raise as_error(error) from error

    def _counted(self, cached: Any) -> Any:
        n_rows = self._session.run(cached.count, self._tag, "hydrogen_magic %%infer")
        self._raise_if_stopped()
        self.n_rows = int(n_rows)
        # The last report of Connect may be older than the end of the last task.
        self._reported = {stage: (total, total) for stage, (_, total) in self._reported.items()}
        return cached

    def _raise_if_stopped(self) -> None:
        if self._is_stopped.is_set():  # between two jobs, when there was nothing to cancel
            raise GangStoppedError("stopped: no Spark job was running")

    def stop(self) -> None:
        """Cancel the jobs. Returns at once."""
        self._is_stopped.set()
        for tag in (self._first_tag, self._tag):
            self._session.cancel(tag)

    def stages(self) -> dict[int, TaskCount]:
        """Return the tasks of every stage that has begun, by its number.

        Connect reports a stage only after its first task has finished.
        """
        if self._session.is_connect:
            return dict(self._reported)
        return private_calls.stages_of(self._session, self._tag) or {}

    @contextmanager
    def _progress_handler(self) -> Iterator[None]:
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
