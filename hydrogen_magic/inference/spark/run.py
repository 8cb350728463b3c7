"""Predictions for all rows of a Spark DataFrame as Spark jobs, which can be counted and cancelled."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.stage_counts import StageCounts, TaskCount
from hydrogen_magic.errors import GangStoppedError
from hydrogen_magic.inference.spark.prepared import PreparedRun, as_error


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
        self._stages = StageCounts(self._session, self._tag)

    def result(self, report_to: Mapping[str, Any] | None = None) -> Any:
        """Predict all rows; return the DataFrame, cached by Spark.

        ``report_to``: where tasks report their progress, see :meth:`PreparedRun.predicted`. Raises
        InferError if the cell or ``predict`` fails, GangStoppedError after :meth:`stop`.
        """
        try:
            with self._stages.followed():
                self._raise_if_stopped()
                if self.unfinished is None:
                    frame = self._prepared.predicted(self._first_tag, report_to)
                    self._raise_if_stopped()
                    self.unfinished = frame.persist()
                self._stages.clear()
                return self._counted(self.unfinished)
        except SparkJobError as error:
            if error.kind == "cancelled" and self._is_stopped.is_set():
                raise GangStoppedError("stopped: Spark has cancelled the job") from error
            raise as_error(error) from error

    def _counted(self, cached: Any) -> Any:
        n_rows = self._session.run(cached.count, self._tag, "hydrogen_magic %%infer")
        self._raise_if_stopped()
        self.n_rows = int(n_rows)
        self._stages.complete()
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
        """Return the tasks of every stage that has begun, by its number."""
        return self._stages.counts()
