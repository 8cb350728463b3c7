"""``%%infer`` over a Spark DataFrame, classic or Connect: the same predictor in Spark's own tasks.

    kernel ── package and cell, once per executor ──► a Python worker per task slot
       │                                                  cell runs once, then predict per batch
       └─ frame.mapInArrow(task, schema) ─► a DataFrame, nothing of which has run yet

No barrier: partitions come and go by themselves, are retried by Spark, and a slow one holds up none.
What has to run at once is the first batch, where nobody has said which columns ``predict`` returns.
"""

from __future__ import annotations

import re
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any

import pyarrow as pa

from hydrogen_magic.capture.values import Captured
from hydrogen_magic.core import memory_settings
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.spark import forwarded_settings, gpu_resources, packaging
from hydrogen_magic.driver.placements.spark import session as sessions
from hydrogen_magic.driver.placements.spark.executors import roster
from hydrogen_magic.driver.placements.spark.session import Session, SparkJobError
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.errors import HydrogenError, InferError, PlacementError
from hydrogen_magic.inference.spark import shipping as sending
from hydrogen_magic.node.prediction.arrow_types import has_null_type
from hydrogen_magic.node.prediction.ddl import parse_schema, spark_schema
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.spark.inference_task import END

__all__ = ["PreparedRun", "as_error", "infer_spark", "prepare"]

_GLANCE_S = 0.5
"""How long a look at the executors' GPUs may take."""
_SHIPPED = {"cloudpickle", "hydrogen_magic"}
_TOLD = re.compile(rf"(?:InferError: )+(.*?)\n{END}", re.DOTALL)
"""Connect says the name of an error twice."""


def infer_spark(frame: Any, captured: Captured, spec: JobSpec, options: InferOptions) -> Any:
    """Return ``frame`` with the columns that ``predict`` of the captured cell gives for its rows.

    A DataFrame of the same kind, lazy: its batches are predicted when an action asks for them, in the
    order of each partition's rows. Only where ``options`` have no schema the first batch is run now.

    Raises InferError for columns that cannot go through Arrow or have one name, for a frame without
    rows whose schema is not given, and for what the cell or ``predict`` raise over the first batch;
    PlacementError when ``--gpu`` cannot be had.
    """
    prepared = prepare(frame, captured, spec, options)
    try:
        return prepared.predicted(f"hydrogen_magic-infer-{secrets.token_hex(4)}")
    except SparkJobError as error:
        raise as_error(error) from error


def prepare(frame: Any, captured: Captured, spec: JobSpec, options: InferOptions) -> PreparedRun:
    """Check what is asked, and send the cell. No job runs; raises as :func:`infer_spark` does."""
    kept = _checked(frame, options)
    session = sessions.of(frame)
    share = _share(session, spec)
    if options.schema is not None:
        predicted = parse_schema(options.schema)
        options.check_names(predicted.names, frame.columns)
        _schemas(frame, kept, options.result_schema(predicted))
    sent = sending.send(session, captured.parcel)
    return PreparedRun(
        frame, session, options, share, sent, kept, _boot(captured, spec, options, sent, share)
    )


@dataclass(frozen=True)
class PreparedRun:
    """Predictions that have been checked and whose cell is with Spark; nothing of it has run."""

    frame: Any
    session: Session
    options: InferOptions
    share: gpu_resources.TaskResources
    """What each task gets."""
    sent: sending.SentCell
    kept: list[str]
    """The frame's columns that come back."""
    boot: Mapping[str, Any]

    def predicted(self, tag: str, tell: Mapping[str, Any] | None = None) -> Any:
        """Return the frame with its predictions, lazy.

        Without a schema the first batch is run, as a job under ``tag``. ``tell``: whom tasks
        tell how far they are (:mod:`hydrogen_magic.node.worker.task_status`), None for nobody. Raises
        SparkJobError and InferError.
        """
        boot = {**self.boot, "tell": tell}
        if self.options.schema is None:
            predicted = self._columns_of_first_rows(_task(boot, self.sent), tag)
            boot["columns"] = predicted.serialize().to_pybytes()
        else:
            predicted, boot["columns"] = parse_schema(self.options.schema), b""
        self.options.check_names(predicted.names, self.frame.columns)
        schema, boot["of_spark"] = _schemas(
            self.frame, self.kept, self.options.result_schema(predicted)
        )
        boot["kept"] = self.kept
        return _mapped(self.session, self.frame, _task(boot, self.sent), schema, self.share.profile)

    def _columns_of_first_rows(self, task: Callable[..., Any], tag: str) -> pa.Schema:
        """Run the cell and predict the first batch, on an executor; return what that has.

        One row is asked for, so Spark runs one task, and more only while partitions have no rows.
        """
        rows = _mapped(self.session, self.frame, task, "o binary", self.share.profile).limit(1)
        found = self.session.run(rows.collect, tag, "hydrogen_magic %%infer: the first batch")
        if not found:
            raise InferError(
                "the frame has no rows, and so nothing says which columns predict returns: name"
                ' them with --schema, such as --schema "score double"'
            )
        return pa.ipc.read_schema(pa.py_buffer(bytes(found[0][0])))


def as_error(error: SparkJobError) -> HydrogenError:
    """Return what the user is told of a job that ran ``predict``."""
    found = _TOLD.search(error.details)
    return InferError(found[1]) if found else HydrogenError(str(error))


# ── what is asked, checked before anything runs ──────────────────────────────────────────────────


def _checked(frame: Any, options: InferOptions) -> list[str]:
    """Return which of the frame's columns come back."""
    if getattr(frame, "isStreaming", False):
        raise InferError("a streaming DataFrame has no end: %%infer takes what has one")
    _refuse_equal(frame, frame.columns, "the frame has more than one column")
    _refuse_what_arrow_has_not(frame.schema)
    return list(options.kept(frame.columns))


def _refuse_equal(frame: Any, names: list[str], who: str) -> None:
    """Spark finds a column by its name, as a rule without regard to case."""
    if frame.sparkSession.conf.get("spark.sql.caseSensitive", "false") == "true":
        folded = names
    else:
        folded = [name.lower() for name in names]
    counts = Counter(folded)
    equal = [name for name, same in zip(names, folded, strict=True) if counts[same] > 1]
    if equal:
        raise InferError(f"{who} {equal[0]!r} ({', '.join(equal)}): give each a name of its own")


def _refuse_what_arrow_has_not(schema: Any) -> None:
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    options: dict[str, Any] = {"error_on_duplicated_field_names_in_struct": True}
    if "timezone" in signature(to_arrow_type).parameters:  # not before Spark 4.2
        options["timezone"] = "UTC"
    for field in schema.fields:
        try:
            to_arrow_type(field.dataType, **options)
        except PySparkException as error:
            kind = field.dataType.simpleString()
            raise InferError(
                f"column {field.name!r} is {kind}, which Spark cannot give to Python as Arrow"
                f" ({str(error).partition(' SQLSTATE')[0]}): cast it to another type, or leave it out"
                f" with df.drop({field.name!r})"
            ) from None


def _share(session: Session, spec: JobSpec) -> gpu_resources.TaskResources:
    """Return what each task gets. How many run at once is Spark's business, not ``--np``'s."""
    settings = SessionSettings.read(session)
    may_have_gpus = bool(settings.executor_gpus) and spec.gpu is not False
    seen = roster(session, _GLANCE_S) if may_have_gpus else None
    try:
        return gpu_resources.share(session, settings, replace(spec, np=1), seen, more_come=False)
    except PlacementError as error:
        raise PlacementError(str(error).replace("`--np 1 --gpu`", "`--gpu`")) from None


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def _boot(
    captured: Captured,
    spec: JobSpec,
    options: InferOptions,
    sent: sending.SentCell,
    share: gpu_resources.TaskResources,
) -> dict[str, Any]:
    """Return what a task is told; without ``columns`` it says what the first batch's are."""
    needs = {name.partition(".")[0] for name in captured.needs} - _SHIPPED
    return {
        "package": sent.package_digest, "closure": sent.closure_digest,
        "env": [*forwarded_settings.forwarded(), *spec.env],
        "gpu": share.for_ranks, "needs": sorted(needs), "cells": dict(captured.cells),
        "options": asdict(options), "columns": None, "of_worker": memory_settings.ENVIRONMENT,
    }  # fmt: skip


def _task(boot: dict[str, Any], sent: sending.SentCell) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return what Spark pickles: by value, since executors do not have this package."""
    source = packaging.source("hydrogen_magic.node.spark.inference_task")
    boot, package, closure = dict(boot), sent.package, sent.closure

    def hydrogen_magic_infer(batches: Iterator[Any]) -> Iterator[Any]:
        namespace: dict[str, Any] = {"__name__": "hydrogen_magic_infer"}
        exec(compile(source, "hydrogen_magic/node/spark/inference_task.py", "exec"), namespace)
        yield from namespace["serve"](batches, boot, package, closure)

    return hydrogen_magic_infer


def _mapped(
    session: Session, frame: Any, task: Callable[..., Any], schema: Any, profile: Any
) -> Any:
    with warnings.catch_warnings(), session.python_workers(memory_settings.ENVIRONMENT):
        # pyspark checks its pandas on first use; rows come as Arrow.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        return frame.mapInArrow(task, schema, profile=profile)


def _schemas(frame: Any, kept: list[str], added: pa.Schema) -> tuple[Any, bytes]:
    """Return the result's schema for Spark, and Arrow's of the columns that are added to the kept."""
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    for field in added:
        if has_null_type(field.type):
            raise InferError(
                f"column {field.name!r} of the first batch is {field.type}: it has no value to tell"
                f' its type by, so name it, such as --schema "{field.name} double"'
            )
    of_spark = spark_schema(added)
    _refuse_equal(frame, [*kept, *of_spark.names], "the result would have more than one column")
    of_frame = frame.schema
    fields = [*(of_frame[name] for name in kept), *from_arrow_schema(of_spark).fields]
    return StructType(fields), of_spark.serialize().to_pybytes()
