"""The Spark jobs of the eager way, which can be counted and cancelled; :mod:`.gang` runs them in a thread.

A job predicts rows by what :mod:`.prepared` returns.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, lack_of_slots
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.stage_counts import StageCounts, TaskCount
from hydrogen_magic.errors import GangStoppedError
from hydrogen_magic.inference.spark.kept_partitions import KeptPartitions
from hydrogen_magic.inference.spark.prepared import PreparedRun, as_error
from hydrogen_magic.node.prediction.arrow_types import has_null_type
from hydrogen_magic.node.prediction.partition_files import NOT_KEPT
from hydrogen_magic.node.spark.inference_task import NOT_SHARED


class SparkRun:
    """One run of a :class:`~hydrogen_magic.inference.spark.prepared.PreparedRun`.

    Finished partitions go to files (``kept``), or to Spark's cache if executors do not share the disk.
    :meth:`result` blocks; the other methods may be called meanwhile from any thread.
    """

    def __init__(
        self, prepared: PreparedRun, kept: KeptPartitions | None = None, begun: Any = None
    ) -> None:
        """``begun``: the unfinished result of an earlier run in Spark's cache, if one is resumed."""
        self.n_rows: int | None = None
        """Rows of the result, None before the end."""
        self.kept = kept
        """None also after executors did not find the folder, or could not write to it."""
        self.not_kept = ""
        """Why they could not write."""
        self.unfinished: Any = begun
        """The result, of which Spark has cached some partitions; None before the first one."""
        self.widened: list[tuple[str, str, str]] = []
        """Columns whose first rows have another type: name, that type, and the final one."""
        self._added: pa.Schema | None = None
        """The known columns beside the frame's."""
        self._prepared = prepared
        self._session = prepared.session
        self._tag = f"hydrogen_magic-infer-{secrets.token_hex(4)}"
        self._tags = [self._tag, f"{self._tag}-first", f"{self._tag}-read"]
        """Of the job for all rows, for the first batch, and for reading finished partitions."""
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
                if self.kept is not None:
                    found = self._by_files(self.kept, report_to)
                    if found is not None:
                        return found
                return self._by_cache(report_to)
        except SparkJobError as error:
            if error.kind == "cancelled" and self._is_stopped.is_set():
                raise GangStoppedError("stopped: Spark has cancelled the job") from error
            raise as_error(error) from error

    # ── finished partitions in files ──

    def _by_files(self, kept: KeptPartitions, report_to: Mapping[str, Any] | None) -> Any:
        """Return the result, None if executors do not find the folder."""
        first_tag = self._tags[1]
        self._added = self._predicted(kept)
        if self._added is None:
            self._added = self._prepared.added(first_tag, report_to)
        self._raise_if_stopped()
        rows = self._prepared.into_parts(self._added, kept.instructions(), report_to)
        self._stages.clear()
        try:
            names = self._session.run(rows.collect, self._tag, "hydrogen_magic %%infer")
        except SparkJobError as error:
            _, is_full, why = error.details.partition(NOT_KEPT)
            if NOT_SHARED not in error.details and not is_full:
                raise
            self.kept, self.not_kept = None, f"{is_full}{why}".partition("\n")[0]
            return None
        kept.use(name for (name,) in names)
        self._raise_if_stopped()
        self._stages.complete()
        result = self._from_files(kept)
        self.n_rows = self._cached(result)
        return result

    def _cached(self, result: Any) -> int:
        """Let Spark cache the frame; return the number of its rows."""
        result.persist()
        try:
            n_rows = self._session.run(
                lambda: _count(result), self._tags[2], "hydrogen_magic %%infer: the result"
            )
            self._raise_if_stopped()
        except BaseException:
            with suppress(Exception):  # the session has ended
                result.unpersist()
            raise
        return n_rows

    def _from_files(self, kept: KeptPartitions) -> Any:
        """Return a lazy DataFrame of the partitions that are finished, in types for all of them."""
        added = self._predicted(kept)
        if added is None:
            return self._prepared.from_parts(self._added, kept.linked())
        schemas = kept.schemas(self._prepared.kept)
        schemas = schemas if self._added is None else [self._added, *schemas]
        self.widened = []
        for field in added:
            types = (
                schema.field(field.name).type for schema in schemas if field.name in schema.names
            )
            first = next((kind for kind in types if not has_null_type(kind)), field.type)
            if first != field.type:
                self.widened.append((field.name, str(first), str(field.type)))
        return self._prepared.from_parts(added, kept.linked())

    def _predicted(self, kept: KeptPartitions) -> Any:
        """Return the predicted columns of the finished partitions, None if there is no row yet."""
        return kept.predicted(self._prepared.kept, as_text=self._prepared.options.collects)

    def finished(self) -> Any:
        """Return a lazy DataFrame of the partitions that are finished, None if there are none."""
        if self.kept is None or not any(part.n_rows for part in self.kept.parts()):
            return None
        return self._from_files(self.kept)

    # ── finished partitions in Spark's cache ──

    def _by_cache(self, report_to: Mapping[str, Any] | None) -> Any:
        if self.unfinished is None:
            frame = self._prepared.predicted(self._tags[1], report_to)
            self._raise_if_stopped()
            self.unfinished = frame.persist()
        cached = self.unfinished
        self._stages.clear()
        n_rows = self._session.run(lambda: _count(cached), self._tag, "hydrogen_magic %%infer")
        self._raise_if_stopped()
        self.n_rows = n_rows
        self._stages.complete()
        return cached

    # ── commands ──

    def _raise_if_stopped(self) -> None:
        if self._is_stopped.is_set():  # between two jobs, when there was nothing to cancel
            raise GangStoppedError("stopped: no Spark job was running")

    def stop(self) -> None:
        """Cancel the jobs. Returns at once."""
        self._is_stopped.set()
        for tag in self._tags:
            self._session.cancel(tag)

    def lack_of_slots(self, capacity: ClusterCapacity) -> str:
        """Return what the jobs wait for while others hold all slots; empty if they do not."""
        return lack_of_slots(self._session, capacity, *self._tags)

    def stages(self) -> dict[int, TaskCount]:
        """Return the tasks of every stage that has begun, by its number."""
        return self._stages.counts()


def _count(frame: Any) -> int:
    """Return the number of rows. Spark refuses ``count()`` of a frame with a TIME column."""
    return int(frame.selectExpr("1").count())
