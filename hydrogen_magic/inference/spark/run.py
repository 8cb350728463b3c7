"""The predictions of a Spark DataFrame, made now: what ``%%infer`` does where no name is given for them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydrogen_magic.driver.placements.spark.session import SparkJobError
from hydrogen_magic.errors import GangStoppedError, HydrogenError
from hydrogen_magic.inference.spark.prepared import PreparedRun, as_error

__all__ = ["SparkRun", "Tasks"]

Tasks = tuple[int, int]
"""How many tasks are done, and how many there are."""


class SparkRun:
    """One run over what :func:`~hydrogen_magic.inference.spark.prepared.prepare` has prepared.

    :meth:`result` blocks; the others may be called meanwhile, from any thread.
    """

    def __init__(self, prepared: PreparedRun) -> None:
        self.n_rows: int | None = None
        """Rows of the result, None before its end."""
        self._prepared = prepared
        self._session = prepared.session
        self._tag = f"hydrogen_magic-infer-{secrets.token_hex(4)}"
        self._first_tag = f"{self._tag}-first"
        """Of the first batch, whose job is one of its own."""
        self._is_stopped = threading.Event()
        self._told: dict[int, Tasks] = {}
        """Of Connect: by stage, as far as they are known."""

    def result(self, tell: Mapping[str, Any] | None = None) -> Any:
        """Have Spark predict every row; return the DataFrame, kept by Spark (``cache``).

        ``tell``: whom the tasks tell how far they are, see :meth:`PreparedRun.predicted`. Raises InferError
        for what the cell or ``predict`` raise, GangStoppedError after :meth:`stop`.
        """
        try:
            with self._listening():
                self._go_on()
                frame = self._prepared.predicted(self._first_tag, tell)
                self._go_on()
                self._told.clear()
                return self._kept(frame)
        except SparkJobError as error:
            raise self._explained(error) from error

    def _kept(self, frame: Any) -> Any:
        kept = frame.persist()
        try:
            n_rows = self._session.run(kept.count, self._tag, "hydrogen_magic %%infer")
            self._go_on()
        except BaseException:
            kept.unpersist()
            raise
        self.n_rows = int(n_rows)
        # The job has ended well; Connect's last report may have come before its last task.
        self._told = {stage: (total, total) for stage, (_, total) in self._told.items()}
        return kept

    def _go_on(self) -> None:
        if self._is_stopped.is_set():  # between two jobs: there was nothing to cancel
            raise GangStoppedError("stopped, and Spark has no job of it")

    def stop(self) -> None:
        """Have Spark cancel it. Returns at once."""
        self._is_stopped.set()
        for tag in (self._first_tag, self._tag):
            self._session.cancel(tag)

    def stages(self) -> dict[int, Tasks]:
        """Return the tasks of each stage that has begun, by Spark's number of it.

        A task is one partition of the frame, or of what Spark does before and after. Of rows Spark
        tells nothing before the end. Of a stage that Connect's server has not told of nothing is known.
        """
        return dict(self._told) if self._session.is_connect else dict(self._counted())

    def progress(self) -> Tasks:
        """Return the sums over all :meth:`stages`."""
        counts = self.stages().values()
        return sum(done for done, _ in counts), sum(total for _, total in counts)

    def _explained(self, error: SparkJobError) -> HydrogenError:
        if error.kind == "cancelled" and self._is_stopped.is_set():
            return GangStoppedError("stopped, and Spark has cancelled its job")
        return as_error(error)

    def _counted(self) -> Iterator[tuple[int, Tasks]]:
        tracker = self._session.context().statusTracker()
        for number in tracker.getJobIdsForTag(self._tag):
            job = tracker.getJobInfo(number)
            for stage in job.get().stageIds() if job.isDefined() else ():
                info = tracker.getStageInfo(stage)
                if info.isDefined() and info.get().submissionTime() > 0:
                    yield stage, (info.get().numCompletedTasks(), info.get().numTasks())

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Have Connect's server tell of its tasks; a classic session is asked."""
        if not self._session.is_connect:
            yield
            return

        def take(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:
            for stage in stages or ():
                if stage.num_completed_tasks:
                    self._told[stage.stage_id] = stage.num_completed_tasks, stage.num_tasks

        self._session.spark.registerProgressHandler(take)
        try:
            yield
        finally:
            self._session.spark.removeProgressHandler(take)
