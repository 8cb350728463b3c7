"""A cell in Spark's Python workers: as columns of a DataFrame, or as a map over its batches.

The columns are expressions, so Spark's optimizer works as for any others: it drops predictions that are not
used (``count()``, ``select("id")``), and filters and limits the frame's own rows first. ``mapInArrow`` hides
all of this. It remains for the first batch, which would be a single row below a limit; for a resource
profile (GPUs of tasks), which a column cannot have; and for Spark before 4.2, which has no Arrow UDFs (4.0),
or calls one again for a filter of its values (4.1).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from hydrogen_magic.capture.values import Captured
from hydrogen_magic.core import memory_settings
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.remote import forwarded_settings, packaging
from hydrogen_magic.driver.placements.spark.spark_session import (
    Session,
    numbered,
    without_pandas_warning,
)
from hydrogen_magic.inference.spark import shipping

_COLUMNS_SINCE = (4, 2)
"""The first version of Spark that does not copy expensive expressions into filters."""


@dataclass(frozen=True)
class CellTask:
    """A cell that Spark has, and the instructions to the tasks that run it."""

    session: Session
    sent: shipping.SentCell
    config: Mapping[str, Any]
    """See ``inference_task.serve``. Without ``columns``, a task returns those of the first batch."""
    profile: Any = None
    """TaskResourceProfile of the tasks, None for the session's own."""

    def with_config(self, **changes: Any) -> CellTask:
        return replace(self, config={**self.config, **changes})

    def scored(self, frame: Any, kept: list[str], predicted: pa.Schema) -> Any:
        """Return the columns ``kept`` of ``frame``, then the predicted ones; lazy.

        ``predicted``: the types as Spark stores them.
        """
        from pyspark.sql.pandas.types import from_arrow_schema
        from pyspark.sql.types import StructType

        task = self.with_config(of_spark=predicted.serialize().to_pybytes())
        added = from_arrow_schema(predicted)
        stays_single = self.session.is_at_least(_COLUMNS_SINCE)
        if self.profile is None and stays_single:
            return task._with_columns(frame, kept, added)
        schema = StructType([*(frame.schema[name] for name in kept), *added.fields])
        return task.with_config(kept=kept).mapped(frame, schema)

    def _with_columns(self, frame: Any, kept: list[str], added: Any) -> Any:
        """Return the columns: fields of one call's structs, since equal calls of a function are one."""
        task = self.with_config(names=frame.columns, of_structs=False, is_column=False)
        with self._python_workers():
            predicted = task.udf(added)(*(frame[quoted(name)] for name in frame.columns))
        fields = (
            called_once(predicted.getField(name), frame.columns[0], self.session).alias(name)
            for name in added.names
        )
        return frame.select(*(frame[quoted(name)] for name in kept), *fields)

    def udf(self, returned: Any) -> Any:
        """Return a Spark UDF with values of type ``returned``, for columns or one struct of them."""
        from pyspark.util import PythonEvalType

        function = self.session.sql_module("udf").UserDefinedFunction(
            self._function("serve_arrays"),
            returnType=returned,
            evalType=PythonEvalType.SQL_SCALAR_ARROW_ITER_UDF,
        )
        return function._wrapped()

    def mapped(self, frame: Any, schema: Any, entry: str = "serve") -> Any:
        """Return the frame that the tasks make of ``frame`` by a function of ``inference_task``."""
        renamed, task = numbered(frame), self.with_config(names=frame.columns)
        with self._python_workers(), without_pandas_warning():
            return renamed.mapInArrow(task._function(entry), schema, profile=self.profile)

    def _python_workers(self) -> Any:
        return self.session.python_workers(memory_settings.ENVIRONMENT)

    def _function(self, entry: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """Return a function that is pickled by value, since executors do not have this package."""
        source = packaging.source("hydrogen_magic.node.spark.inference_task")
        config, package, closure = dict(self.config), self.sent.package, self.sent.closure

        def hydrogen_magic_infer(batches: Iterator[Any]) -> Iterator[Any]:
            namespace: dict[str, Any] = {"__name__": "hydrogen_magic_infer"}
            exec(compile(source, "hydrogen_magic/node/spark/inference_task.py", "exec"), namespace)
            yield from namespace[entry](batches, config, package, closure)

        return hydrogen_magic_infer


def called_once(predicted: Any, column: str, session: Session) -> Any:
    """Return a column with the values of ``predicted``, which a filter of it calls only once.

    ``column``: the name of any column of the frame that it has once.

    Spark copies a function into filters of its value, and so calls it twice, unless the column counts as
    expensive. Functions of Python do not (SPARK-47672), ``array_join`` does: here in a condition that is
    true for every row. A nondeterministic function would not be copied either, but keep all filters above
    it.
    """
    functions = session.sql_module("functions")
    nothing = f"array_repeat('', size(array_repeat({quoted(column)}, 0)))"
    return functions.when(functions.expr(f"array_join({nothing}, '') = ''"), predicted)


def task_config(
    captured: Captured, spec: JobSpec, sent: shipping.SentCell, *, has_gpu: bool
) -> dict[str, Any]:
    """Return the instructions to tasks that run this cell, without those about its rows."""
    return {
        "package_digest": sent.package_digest,
        "closure_digest": sent.closure_digest,
        "run": secrets.token_hex(8),
        "env": [*forwarded_settings.forwarded(), *spec.env],
        "gpu": has_gpu,
        "needs": packaging.not_sent(captured.required_modules),
        "cells": dict(captured.cells),
        "columns": None,
        "kept": [],
        "names": None,
        "without_rows": False,
        "of_worker": memory_settings.ENVIRONMENT,
    }


def quoted(name: str) -> str:
    """Return the name of a column as an identifier of Spark SQL."""
    return f"`{name.replace('`', '``')}`"
