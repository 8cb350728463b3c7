"""The predictions of a Spark DataFrame, made now: what ``%%infer`` does where no name is given for them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydrogen_magic.errors import GangStoppedError, HydrogenError
from hydrogen_magic.infer.on_spark import as_error
from hydrogen_magic.placements.spark import session as sessions
from hydrogen_magic.placements.spark.session import SparkJobError

__all__ = ["SparkRun"]


class SparkRun:
    """One run over a DataFrame of :func:`~hydrogen_magic.infer.on_spark.infer_spark`.

    :meth:`result` blocks; the others may be called meanwhile, from any thread.
    """

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self._session = sessions.of(frame)
        self._tag = f"hydrogen_magic-infer-{secrets.token_hex(4)}"
        self._is_stopped = threading.Event()
        self._told: dict[str, tuple[int, int]] = {}
        """Of Connect: operation -> tasks done, and all of them as far as they are known."""

    def result(self) -> Any:
        """Have Spark predict every row; return the same DataFrame, kept by Spark (``cache``).

        Raises InferError for what the cell or ``predict`` raise, GangStoppedError after :meth:`stop`.
        """
        if self._is_stopped.is_set():
            raise GangStoppedError("stopped before Spark had begun")
        kept = self._frame.persist()
        try:
            with self._listening():
                self._session.run(kept.count, self._tag, "hydrogen_magic %%infer")
        except BaseException as error:
            kept.unpersist()
            if isinstance(error, SparkJobError):
                raise self._explained(error) from error
            raise
        return kept

    def stop(self) -> None:
        """Have Spark cancel it. Returns at once."""
        self._is_stopped.set()
        self._session.cancel(self._tag)

    def progress(self) -> tuple[int, int]:
        """Return how many tasks are done, and how many there are in the stages that have begun.

        A task is one partition of the frame, or of what Spark does before and after. Of rows Spark
        tells nothing before the end. Stages that have not begun may be left out, so are not counted.
        """
        told = self._told.values() if self._session.is_connect else self._counted()
        counts = list(told)
        return sum(done for done, _ in counts), sum(total for _, total in counts)

    def _explained(self, error: SparkJobError) -> HydrogenError:
        if error.kind == "cancelled" and self._is_stopped.is_set():
            return GangStoppedError("stopped, and Spark has cancelled its job")
        return as_error(error)

    def _counted(self) -> Iterator[tuple[int, int]]:
        tracker = self._session.context().statusTracker()
        for number in tracker.getJobIdsForTag(self._tag):
            job = tracker.getJobInfo(number)
            for stage in job.get().stageIds() if job.isDefined() else ():
                info = tracker.getStageInfo(stage)
                if info.isDefined() and info.get().submissionTime() > 0:
                    yield info.get().numCompletedTasks(), info.get().numTasks()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Have Connect's server tell of its tasks; a classic session is asked."""
        if not self._session.is_connect:
            yield
            return

        def take(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:
            begun = [stage for stage in stages or () if stage.num_completed_tasks]
            done_tasks = sum(stage.num_completed_tasks for stage in begun)
            self._told[operation_id] = done_tasks, sum(stage.num_tasks for stage in begun)

        self._session.spark.registerProgressHandler(take)
        try:
            yield
        finally:
            self._session.spark.removeProgressHandler(take)
