"""The lazy way of ``%%infer`` over a Spark DataFrame, with ``--out``, and what both ways prepare.

The same predictor as elsewhere runs in Spark's own tasks, classic or Connect. For the eager way, :mod:`.run`
runs jobs over the same DataFrames.

    kernel ── package and cell, once per executor ──► a Python worker per task slot
       │                                                  cell runs once, then predict per batch
       └─ frame with predict as a column ─► a lazy DataFrame

There is no barrier: Spark schedules and retries each partition by itself. Without ``--schema`` the first
batch is predicted at once, to know the columns that ``predict`` returns.
"""

from __future__ import annotations

import importlib
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any

import pyarrow as pa

from hydrogen_magic.capture.values import Captured
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.spark import gpu_resources
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.application_status import roster
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import HydrogenError, InferError, PlacementError
from hydrogen_magic.inference.spark import shipping
from hydrogen_magic.inference.spark.cell_task import CellTask, quoted, task_config
from hydrogen_magic.node.prediction.arrow_types import has_null_type, without_nulls
from hydrogen_magic.node.prediction.ddl import parse_schema, spark_schema
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.spark.inference_task import END

_GPU_QUERY_S = 0.5
"""Timeout of the query for the executors' GPUs."""
_WITHOUT_HASH = ("map", "variant", "geometry", "geography")
_MESSAGE = re.compile(rf"(?:InferError: )+(.*?)\n{END}", re.DOTALL)
"""Connect repeats the name of an error."""


def infer_spark(frame: Any, captured: Captured, spec: JobSpec, options: InferOptions) -> Any:
    """Return ``frame`` with the columns that ``predict`` of the captured cell returns for its rows.

    The result is lazy: its batches are predicted when an action needs them, in the order of each
    partition's rows. Only if ``options`` have no schema, the first batch is predicted now.

    Raises InferError for columns that Arrow does not support or that share a name, and for errors of the
    cell or ``predict`` in the first batch; PlacementError if ``--gpu`` is not possible, or if the session
    was stopped.
    """
    prepared = prepare(frame, captured, spec, options)
    try:
        return prepared.predicted(f"hydrogen_magic-infer-{secrets.token_hex(4)}")
    except SparkJobError as error:
        raise as_error(error) from error


def prepare(frame: Any, captured: Captured, spec: JobSpec, options: InferOptions) -> PreparedRun:
    """Check the arguments and send the cell. Runs no job; raises as :func:`infer_spark` does."""
    session = sessions.of(frame).of_this_thread()
    session.refuse_if_stopped()
    kept = _checked(frame, options)
    frame = with_arrays(frame, session)
    share = task_resources(session, spec)
    if options.schema is not None:
        predicted = parse_schema(options.schema)
        options.check_names(predicted.names, frame.columns)
        _stored(frame, kept, options.result_schema(predicted))
    sent = shipping.send(session, captured.payload)
    config = task_config(captured, spec, sent, has_gpu=share.for_ranks)
    task = CellTask(session, sent, {**config, "options": asdict(options)}, share.profile)
    return PreparedRun(frame, session, options, share, task, kept)


@dataclass(frozen=True)
class PreparedRun:
    """Checked arguments, and a cell that Spark has."""

    frame: Any
    session: Session
    options: InferOptions
    share: gpu_resources.TaskResources
    """Resources of each task."""
    task: CellTask
    kept: list[str]
    """Columns of the frame that come back."""

    def predicted(self, tag: str, report_to: Mapping[str, Any] | None = None) -> Any:
        """Return the frame with its predictions, lazy.

        Without a schema the first batch is predicted now, as a job with ``tag``. ``report_to``: where tasks
        report their progress (:mod:`hydrogen_magic.node.worker.inference.task_status`), if at all.
        Raises SparkJobError and InferError.
        """
        added = self.added(tag, report_to)
        stored = self._stored(added)
        task = self.task.with_config(report_to=report_to, columns=self._to_adopt(added))
        return self._in_order(task.scored(self.frame, self.kept, stored), added)

    def added(self, tag: str, report_to: Mapping[str, Any] | None = None) -> pa.Schema:
        """Return the columns that the result has beside the frame's: those of ``--schema``, or of the first
        batch, with the types that it shows. See :meth:`predicted`.
        """
        if self.options.schema is None:
            predicted = self._first_columns(self.task.with_config(report_to=report_to), tag)
        else:
            predicted = parse_schema(self.options.schema)
            self.options.check_replaced(predicted.names)
        self.options.check_names(predicted.names, self.frame.columns)
        return self.options.result_schema(predicted)

    def _stored(self, added: pa.Schema) -> pa.Schema:
        return _stored(self.frame, self.kept, added, as_text=self.options.collects)

    def _to_adopt(self, added: pa.Schema) -> bytes:
        return b"" if self.options.schema is not None else added.serialize().to_pybytes()

    def _in_order(self, result: Any, added: pa.Schema) -> Any:
        if not self.options.replace:
            return result
        order = self.options.order(self.frame.columns, added.names)
        return result.select(*map(quoted, order))

    # ── by files of finished partitions ──

    def into_parts(
        self, added: pa.Schema, parts: Mapping[str, Any], report_to: Mapping[str, Any] | None
    ) -> Any:
        """Return a DataFrame of the names of files, into which the partitions are predicted.

        ``parts``: see :meth:`.kept_partitions.KeptPartitions.instructions`.
        """
        self._stored(without_nulls(added))
        task = self.task.with_config(
            report_to=report_to, columns=self._to_adopt(added), kept=self.kept, parts=dict(parts)
        )
        functions = self.session.sql_module("functions")
        names = [
            quoted(field.name) for field in self.frame.schema.fields if _has_hash(field.dataType)
        ]
        hashes = functions.xxhash64(*names) if names else functions.lit(0).cast("long")
        hashed = self.frame.select("*", hashes.alias(secrets.token_hex(8)))
        return task.mapped(hashed, "o string", "serve_partition")

    def from_parts(self, added: pa.Schema, paths: list[str]) -> Any:
        """Return the DataFrame of the rows in files, in the order of the partitions; lazy."""
        from pyspark.sql.pandas.types import from_arrow_schema
        from pyspark.sql.types import StructType

        stored = self._stored(without_nulls(added))
        schema = StructType(
            [*(self.frame.schema[name] for name in self.kept), *from_arrow_schema(stored).fields]
        )
        task = replace(self.task, profile=None).with_config(
            of_spark=stored.serialize().to_pybytes(), kept=self.kept, parts=paths, gpu=False
        )
        numbers = self.session.spark.range(0, len(paths), 1, max(1, len(paths)))
        return self._in_order(task.mapped(numbers, schema, "serve_parts"), added)

    def _first_columns(self, task: CellTask, tag: str) -> pa.Schema:
        """Run the cell and predict the first batch on an executor; return the predicted columns.

        ``limit(1)`` makes Spark run one task, and more only for partitions without rows. If the frame has
        none, the batch has no rows either.
        """
        found = self._first_of(task.mapped(self.frame, "o binary").limit(1), tag)
        if not found:
            without_rows = task.with_config(without_rows=True)
            found = self._first_of(without_rows.mapped(self._row_of_nulls(), "o binary"), tag)
        return pa.ipc.read_schema(pa.py_buffer(bytes(found[0][0])))

    def _first_of(self, rows: Any, tag: str) -> list[Any]:
        found: list[Any] = self.session.run(
            rows.collect, tag, "hydrogen_magic %%infer: the first batch"
        )
        return found

    def _row_of_nulls(self) -> Any:
        """Return a DataFrame with the frame's columns: Spark gives a task no batch without rows."""
        nothing = self.session.sql_module("functions").lit(None)
        fields = self.frame.schema.fields
        return self.session.spark.range(0, 1, 1, 1).select(
            *(nothing.cast(field.dataType).alias(field.name) for field in fields)
        )


def as_error(error: SparkJobError) -> HydrogenError:
    """Return the error for the user of a job that ran ``predict``."""
    found = _MESSAGE.search(error.details)
    return InferError(found[1]) if found else HydrogenError(str(error))


# ── checks before a job runs ─────────────────────────────────────────────────────────────────────


def _checked(frame: Any, options: InferOptions) -> list[str]:
    """Return the frame's columns that come back."""
    if getattr(frame, "isStreaming", False):
        raise InferError(
            "%%infer does not support a streaming DataFrame: predict with a function of"
            " hm.udf(predict, schema)"
        )
    if not frame.columns:
        raise InferError("the frame has no columns: select at least one")
    _refuse_same_names(frame, frame.columns, "the frame")
    refuse_unsupported(frame.schema)
    return list(options.kept(frame.columns))


def with_arrays(frame: Any, session: Session) -> Any:
    """Return the frame with arrays for Spark ML's vectors, which Arrow has as structs of their parts."""
    vectors = [f.name for f in frame.schema.fields if type(f.dataType).__name__ == "VectorUDT"]
    if not vectors:
        return frame
    return frame.withColumns({name: as_array(frame[quoted(name)], session) for name in vectors})


def as_array(vectors: Any, session: Session) -> Any:
    """Return a column of arrays for one of Spark ML's vectors."""
    # Spark's own choice between them is for the process, which may have sessions of both kinds.
    functions = "pyspark.ml.connect.functions" if session.is_connect else "pyspark.ml.functions"
    arrays = importlib.import_module(functions).vector_to_array(vectors)
    return session.sql_module("functions").when(vectors.isNotNull(), arrays)  # it fails for null


def _refuse_same_names(frame: Any, names: list[str], owner: str) -> None:
    """Raise InferError if Spark cannot tell two columns apart."""
    keys = column_keys(frame, names)
    counts = Counter(keys)
    same = [name for name, key in zip(names, keys, strict=True) if counts[key] > 1]
    if same:
        raise InferError(
            f"{owner} has more than one column {same[0]!r} ({', '.join(same)}): rename one"
        )


def column_keys(frame: Any, names: Iterable[str]) -> list[str]:
    """Return values that are equal for names that Spark cannot tell apart.

    By default these are names that differ in case alone.
    """
    return list(names) if is_case_sensitive(frame) else [name.lower() for name in names]


def is_case_sensitive(frame: Any) -> bool:
    """Return whether Spark can tell names apart that differ in case alone."""
    return bool(frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true")


def refuse_unsupported(schema: Any) -> None:
    """Raise InferError for a column without a type of Arrow."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    options: dict[str, Any] = {"error_on_duplicated_field_names_in_struct": True}
    if "timezone" in signature(to_arrow_type).parameters:  # from Spark 4.2 on
        options["timezone"] = "UTC"
    for field in schema.fields:
        try:
            to_arrow_type(field.dataType, **options)
        except (PySparkException, ValueError, pa.ArrowException) as error:
            raise InferError(
                f"column {field.name!r} has type {field.dataType.simpleString()}, which Spark cannot"
                f" convert to Arrow ({str(error).partition(' SQLSTATE')[0]}): cast it, or drop it with"
                f" df.drop({field.name!r})"
            ) from None


def task_resources(session: Session, spec: JobSpec) -> gpu_resources.TaskResources:
    """Return the resources of each task. Spark decides how many run at a time, not ``--np``."""
    settings = SessionSettings.read(session)
    may_have_gpus = bool(settings.executor_gpus) and spec.gpu is not False
    executors = roster(session, _GPU_QUERY_S) if may_have_gpus else None
    try:
        return gpu_resources.share(
            session, settings, replace(spec, np=1), executors, more_come=False
        )
    except PlacementError as error:
        raise PlacementError(str(error).replace("`--np 1 --gpu`", "`--gpu`")) from None


def _has_hash(kind: Any) -> bool:
    """Return whether Spark has a hash for the values of a type."""
    parts = [field.dataType for field in getattr(kind, "fields", ())]
    if hasattr(kind, "elementType"):
        parts.append(kind.elementType)
    return kind.typeName() not in _WITHOUT_HASH and all(map(_has_hash, parts))


def _stored(frame: Any, kept: list[str], added: pa.Schema, *, as_text: bool = False) -> pa.Schema:
    """Return the predicted columns in the types by which Spark stores them.

    ``as_text``: those of types that Spark lacks are text. Otherwise raises InferError.
    """
    for field in added:
        if pa.types.is_null(field.type):
            raise InferError(
                f"column {field.name!r} has no value in the first batch, so its type is not known:"
                f' set it, for example --schema "{field.name} double"'
            )
        if has_null_type(field.type):
            raise InferError(
                f"column {field.name!r} is {field.type} in the first batch; the type of its null parts is not"
                " known: set the column's type with --schema"
            )
    stored = spark_schema(added, as_text=as_text)
    _refuse_same_names(frame, [*kept, *stored.names], "the result")
    return stored
