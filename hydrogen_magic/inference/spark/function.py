"""``hm.udf``: a ``predict`` as a function of Spark's DataFrames and SQL."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from hydrogen_magic import capture
from hydrogen_magic.core import memory_settings
from hydrogen_magic.core.job import JobSpec, variables
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import InferError, OptionTypeError, OptionValueError, PlacementError
from hydrogen_magic.inference.spark import shipping
from hydrogen_magic.inference.spark.cell_task import CellTask, task_config
from hydrogen_magic.inference.spark.prepared import task_resources
from hydrogen_magic.node.prediction.calling import caller_of
from hydrogen_magic.node.prediction.ddl import parse_schema, spark_schema
from hydrogen_magic.node.prediction.options import InferOptions

_ARROW_UDFS_SINCE = (4, 1)


def udf(
    predict: Callable[[Any], Any],
    schema: str,
    *,
    columns: Sequence[str] | None = None,
    batch_size: int = InferOptions.batch_size,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Return a Spark UDF that calls ``predict`` with batches of rows, as ``%%infer`` does.

    Use it like any UDF of pyspark, with classic sessions and Spark Connect::

        score = hm.udf(predict, "score double")
        df.withColumn("score", score("a", "b"))        # predict gets a DataFrame with columns a and b

        spark.udf.register("score", score)
        spark.sql("SELECT id, score(struct(a, b)) AS score FROM rows")

    ``predict`` is sent as it is now, with the functions, values and local modules that it uses. Its
    annotation selects the kind of batch, a pandas DataFrame by default. The columns of a batch have the
    names of the arguments: of columns or of aliases. Two arguments of one name need ``columns``. SQL passes
    arguments without names, so pass a struct there, or set ``columns``. A predicted column may have the name
    of an argument.

    As with any UDF, Spark may call ``predict`` a second time for a filter of its values.
    ``score.asNondeterministic()`` is called once; Spark then also moves no other filter in front of it.

    Args:
        predict: A function of one batch that returns a value for each row, or what else ``%%infer`` accepts.
        schema: The predicted columns, as in ``"score double, label string"``. With one column the UDF
            returns its values, with several it returns structs.
        columns: Names of the columns of a batch, in the order of the arguments. Default: their own names.
        batch_size: Maximum number of rows per call of ``predict``.
        env: Environment variables of ``predict``. Default: none.

    Raises:
        CaptureError: an object that ``predict`` uses cannot be sent.
        PlacementError: there is no Spark session, or Spark or pyspark is older than 4.1.
        TypeError, ValueError: an argument is invalid.
    """
    _check_types(predict, schema, columns)
    options = _options(schema, batch_size)
    try:
        caller_of(predict)
    except InferError as error:
        raise OptionTypeError(str(error)) from None
    return function_of(_session(), predict, options, columns=columns, env=env)


def function_of(
    session: Session,
    predict: Callable[[Any], Any],
    options: InferOptions,
    *,
    columns: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Return the UDF of :func:`udf` for one session, with checked arguments; ``options`` has a schema."""
    # A captured call returns predict: this one is (predict,)[0].
    captured = capture.capture_call(operator.itemgetter(0), ((predict,),), {})
    spec = JobSpec(np=1, env=variables(env))
    resources = task_resources(session, spec)
    has_gpu = resources.for_ranks and resources.profile is None  # a column cannot have a profile
    sent = shipping.send(session, captured.payload)
    config = task_config(captured, spec, sent, has_gpu=has_gpu)
    stored = spark_schema(parse_schema(options.schema or ""))
    task = CellTask(session, sent, config).with_config(
        options=asdict(replace(options, of_function=True)),
        columns=b"",
        of_spark=stored.serialize().to_pybytes(),
        names=None if columns is None else list(columns),
        of_structs=True,
        is_column=len(stored) == 1,
    )
    return _with_names(task.udf(_returned(stored)), session, columns)


def _check_types(predict: Any, schema: Any, columns: Any) -> None:
    if not callable(predict):
        raise OptionTypeError(f"hm.udf expects a function as predict, got {predict!r}")
    if not isinstance(schema, str):
        raise OptionTypeError(f'hm.udf expects a schema such as "score double", got {schema!r}')
    if isinstance(columns, str) or any(not isinstance(name, str) for name in columns or ()):
        raise OptionTypeError(f'hm.udf expects columns such as ["a", "b"], got {columns!r}')


def _options(schema: str, batch_size: int) -> InferOptions:
    try:
        parse_schema(schema)
        return InferOptions(batch_size=batch_size, schema=schema)
    except InferError as error:
        text = str(error).replace("--schema", "schema").replace("--batch-size", "batch_size")
        raise OptionValueError(text) from None


def _session() -> Session:
    try:
        session = sessions.find()
    except PlacementError as error:
        raise PlacementError(str(error).replace("`--on spark`", "hm.udf")) from None
    check_version(session, "hm.udf", "use %%infer there")
    return session


def check_version(session: Session, caller: str, remedy: str) -> None:
    """Raise PlacementError if the session has no Arrow UDFs."""
    if not session.is_at_least(_ARROW_UDFS_SINCE):
        import pyspark

        raise PlacementError(
            f"{caller} needs Spark and pyspark 4.1 or newer, found Spark {session.spark.version} and "
            f"pyspark {pyspark.__version__}: {remedy}"
        )


def _returned(stored: Any) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    fields = from_arrow_schema(stored)
    return fields[0].dataType if len(fields) == 1 else fields


def _with_names(function: Any, session: Session, names: Sequence[str] | None) -> Any:
    """Return the UDF for columns that it passes as one struct, which has ``names``; None: their own."""
    functions = session.sql_module("functions")

    def score(*columns: Any) -> Any:
        if session.is_stopped():
            raise PlacementError(
                "the Spark session of this function was stopped: call hm.udf again in the new one"
            )
        if not columns:
            raise OptionTypeError(
                'a function of hm.udf expects one or more columns, as in score("a", "b"), got none'
            )
        if names is not None and len(names) != len(columns):
            raise OptionTypeError(
                f"predict was called with {counted(len(columns), 'column')}, but `columns` of hm.udf names"
                f" {len(names)} ({', '.join(names)}): pass as many columns as names"
            )
        with session.python_workers(memory_settings.ENVIRONMENT):
            return function(functions.struct(*named(columns)))

    def named(columns: Sequence[Any]) -> Sequence[Any]:
        if names is None:
            return columns
        found = (functions.col(each) if isinstance(each, str) else each for each in columns)
        return [each.alias(name) for each, name in zip(found, names, strict=True)]

    functools.update_wrapper(score, function)  # with what spark.udf.register reads
    score.__dict__["asNondeterministic"] = lambda: _with_names(
        function.asNondeterministic(), session, names
    )
    return score
