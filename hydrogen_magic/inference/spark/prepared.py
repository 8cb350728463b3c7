"""``%%infer`` over a Spark DataFrame, classic or Connect, by the same predictor in Spark's own tasks.

    kernel ── package and cell, once per executor ──► a Python worker per task slot
       │                                                  cell runs once, then predict per batch
       └─ frame.mapInArrow(task, schema) ─► a lazy DataFrame

There is no barrier: Spark schedules and retries each partition by itself. Without ``--schema`` the first
batch is predicted at once, to know the columns that ``predict`` returns.
"""

from __future__ import annotations

import importlib
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any

import pyarrow as pa

from hydrogen_magic import plugins
from hydrogen_magic.capture.values import Captured
from hydrogen_magic.core import memory_settings
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.remote import forwarded_settings, packaging
from hydrogen_magic.driver.placements.spark import gpu_resources
from hydrogen_magic.driver.placements.spark import session as sessions
from hydrogen_magic.driver.placements.spark.executors import roster
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.errors import HydrogenError, InferError, PlacementError
from hydrogen_magic.inference.spark import shipping
from hydrogen_magic.node.prediction.arrow_types import has_null_type
from hydrogen_magic.node.prediction.ddl import parse_schema, spark_schema
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.spark.inference_task import END

_GPU_QUERY_S = 0.5
"""Timeout of the query for the executors' GPUs."""
_SENT_MODULES = {"cloudpickle", "hydrogen_magic"}
_MESSAGE = re.compile(rf"(?:InferError: )+(.*?)\n{END}", re.DOTALL)
"""Connect repeats the name of an error."""


def infer_spark(frame: Any, captured: Captured, spec: JobSpec, options: InferOptions) -> Any:
    """Return ``frame`` with the columns that ``predict`` of the captured cell returns for its rows.

    The result is lazy: its batches are predicted when an action needs them, in the order of each
    partition's rows. Only if ``options`` have no schema, the first batch is predicted now.

    Raises InferError for columns that Arrow does not support or that share a name, for a frame without
    rows and schema, and for errors of the cell or ``predict`` in the first batch; PlacementError if
    ``--gpu`` is not possible.
    """
    prepared = prepare(frame, captured, spec, options)
    try:
        return prepared.predicted(f"hydrogen_magic-infer-{secrets.token_hex(4)}")
    except SparkJobError as error:
        raise as_error(error) from error


def prepare(frame: Any, captured: Captured, spec: JobSpec, options: InferOptions) -> PreparedRun:
    """Check the arguments and send the cell. Runs no job; raises as :func:`infer_spark` does."""
    kept = _checked(frame, options)
    session = sessions.of(frame)
    frame = _with_arrays(frame, session)
    share = _share(session, spec)
    if options.schema is not None:
        predicted = parse_schema(options.schema)
        options.check_names(predicted.names, frame.columns)
        _schemas(frame, kept, options.result_schema(predicted))
    sent = shipping.send(session, captured.payload)
    return PreparedRun(
        frame, session, options, share, sent, kept, _config(captured, spec, options, sent, share)
    )


@dataclass(frozen=True)
class PreparedRun:
    """Checked arguments, and a cell that Spark has."""

    frame: Any
    session: Session
    options: InferOptions
    share: gpu_resources.TaskResources
    """Resources of each task."""
    sent: shipping.SentCell
    kept: list[str]
    """Columns of the frame that come back."""
    config: Mapping[str, Any]

    def predicted(self, tag: str, report_to: Mapping[str, Any] | None = None) -> Any:
        """Return the frame with its predictions, lazy.

        Without a schema the first batch is predicted now, as a job with ``tag``. ``report_to``: where
        tasks report their progress (:mod:`hydrogen_magic.node.worker.task_status`), if at all. Raises
        SparkJobError and InferError.
        """
        config = {**self.config, "report_to": report_to}
        if self.options.schema is None:
            predicted = self._first_columns(_task(config, self.sent), tag)
            config["columns"] = predicted.serialize().to_pybytes()
        else:
            predicted, config["columns"] = parse_schema(self.options.schema), b""
            self.options.check_replaced(predicted.names)
        self.options.check_names(predicted.names, self.frame.columns)
        added = self.options.result_schema(predicted)
        schema, config["of_spark"] = _schemas(self.frame, self.kept, added)
        config["kept"] = self.kept
        result = _mapped(
            self.session, self.frame, _task(config, self.sent), schema, self.share.profile
        )
        if not self.options.replace:
            return result
        order = self.options.order(self.frame.columns, added.names)
        return result.select(*map(_quoted, order))

    def _first_columns(self, task: Callable[..., Any], tag: str) -> pa.Schema:
        """Run the cell and predict the first batch on an executor; return the predicted columns.

        ``limit(1)`` makes Spark run one task, and more only for partitions without rows.
        """
        rows = _mapped(self.session, self.frame, task, "o binary", self.share.profile).limit(1)
        found = self.session.run(rows.collect, tag, "hydrogen_magic %%infer: the first batch")
        if not found:
            raise InferError(
                "the DataFrame has no rows, so the columns that predict returns are not known: set"
                ' them with --schema, for example --schema "score double"'
            )
        return pa.ipc.read_schema(pa.py_buffer(bytes(found[0][0])))


def as_error(error: SparkJobError) -> HydrogenError:
    """Return the error for the user of a job that ran ``predict``."""
    found = _MESSAGE.search(error.details)
    return InferError(found[1]) if found else HydrogenError(str(error))


# ── checks before a job runs ─────────────────────────────────────────────────────────────────────


def _checked(frame: Any, options: InferOptions) -> list[str]:
    """Return the frame's columns that come back."""
    if getattr(frame, "isStreaming", False):
        raise InferError("%%infer does not support a streaming DataFrame")
    _refuse_same_names(frame, frame.columns, "the frame")
    _refuse_unsupported(frame.schema)
    return list(options.kept(frame.columns))


def _with_arrays(frame: Any, session: Session) -> Any:
    """Return the frame with arrays for Spark ML's vectors, which Arrow has as structs of their parts."""
    vectors = [f.name for f in frame.schema.fields if type(f.dataType).__name__ == "VectorUDT"]
    if not vectors:
        return frame
    # Spark's own choice between them is for the process, which may have sessions of both kinds.
    functions = "pyspark.ml.connect.functions" if session.is_connect else "pyspark.ml.functions"
    as_array = importlib.import_module(functions).vector_to_array
    return frame.withColumns({name: as_array(frame[_quoted(name)]) for name in vectors})


def _quoted(name: str) -> str:
    """Return the name of a column as an identifier of Spark SQL."""
    return f"`{name.replace('`', '``')}`"


def _refuse_same_names(frame: Any, names: list[str], owner: str) -> None:
    """Raise InferError if Spark cannot tell two columns apart, by default also if only case differs."""
    is_case_sensitive = frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true"
    keys = names if is_case_sensitive else [name.lower() for name in names]
    counts = Counter(keys)
    same = [name for name, key in zip(names, keys, strict=True) if counts[key] > 1]
    if same:
        raise InferError(
            f"{owner} has more than one column {same[0]!r} ({', '.join(same)}): rename one"
        )


def _refuse_unsupported(schema: Any) -> None:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    options: dict[str, Any] = {"error_on_duplicated_field_names_in_struct": True}
    if "timezone" in signature(to_arrow_type).parameters:  # from Spark 4.2 on
        options["timezone"] = "UTC"
    for field in schema.fields:
        try:
            to_arrow_type(field.dataType, **options)
        except PySparkException as error:
            raise InferError(
                f"column {field.name!r} has type {field.dataType.simpleString()}, which Spark cannot"
                f" convert to Arrow ({str(error).partition(' SQLSTATE')[0]}): cast it, or drop it with"
                f" df.drop({field.name!r})"
            ) from None


def _share(session: Session, spec: JobSpec) -> gpu_resources.TaskResources:
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


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def _config(
    captured: Captured,
    spec: JobSpec,
    options: InferOptions,
    sent: shipping.SentCell,
    share: gpu_resources.TaskResources,
) -> dict[str, Any]:
    """Return the message to a task. Without ``columns``, it returns those of the first batch."""
    needs = {name.partition(".")[0] for name in captured.required_modules}
    needs -= _SENT_MODULES.union(plugins.shipped())
    return {
        "package": sent.package_digest,
        "closure": sent.closure_digest,
        "env": [*forwarded_settings.forwarded(), *spec.env],
        "gpu": share.for_ranks,
        "needs": sorted(needs),
        "cells": dict(captured.cells),
        "options": asdict(options),
        "columns": None,
        "of_worker": memory_settings.ENVIRONMENT,
    }


def _task(
    config: dict[str, Any], sent: shipping.SentCell
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function that is pickled by value, since executors do not have this package."""
    source = packaging.source("hydrogen_magic.node.spark.inference_task")
    config, package, closure = dict(config), sent.package, sent.closure

    def hydrogen_magic_infer(batches: Iterator[Any]) -> Iterator[Any]:
        namespace: dict[str, Any] = {"__name__": "hydrogen_magic_infer"}
        exec(compile(source, "hydrogen_magic/node/spark/inference_task.py", "exec"), namespace)
        yield from namespace["serve"](batches, config, package, closure)

    return hydrogen_magic_infer


def _mapped(
    session: Session, frame: Any, task: Callable[..., Any], schema: Any, profile: Any
) -> Any:
    with warnings.catch_warnings(), session.python_workers(memory_settings.ENVIRONMENT):
        # pyspark checks the version of pandas, which is not used here.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        names = frame.columns
        if any("." in name or "`" in name for name in names):  # mapInArrow would take these apart
            frame = frame.toDF(*(f"column_{number}" for number in range(len(names))))
            task = _with_names(task, names)
        return frame.mapInArrow(task, schema, profile=profile)


def _with_names(
    task: Callable[[Iterator[Any]], Iterator[Any]], names: list[str]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a task for batches whose columns have other names; pickled by value, as ``task`` is."""

    def hydrogen_magic_infer(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        def renamed() -> Iterator[Any]:
            for batch in batches:
                fields = [f.with_name(name) for f, name in zip(batch.schema, names, strict=True)]
                yield pyarrow.RecordBatch.from_arrays(batch.columns, schema=pyarrow.schema(fields))

        yield from task(renamed())

    return hydrogen_magic_infer


def _schemas(frame: Any, kept: list[str], added: pa.Schema) -> tuple[Any, bytes]:
    """Return the Spark schema of the result, and the Arrow schema of the predicted columns."""
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    for field in added:
        if has_null_type(field.type):
            raise InferError(
                f"column {field.name!r} has no value in the first batch, so its type is not known:"
                f' set it, for example --schema "{field.name} double"'
            )
    of_spark = spark_schema(added)
    _refuse_same_names(frame, [*kept, *of_spark.names], "the result")
    of_frame = frame.schema
    fields = [*(of_frame[name] for name in kept), *from_arrow_schema(of_spark).fields]
    return StructType(fields), of_spark.serialize().to_pybytes()
