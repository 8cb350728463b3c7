"""Spark's own ways to run the model of ``infer.py`` over a frame, on ``local[2]``.

The frame is cached there before anything is counted, and what is predicted goes nowhere (``noop``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import Peer, lacks_spark, local_spark, timed
from _infer_model import BATCH, NAMES, predictor

OURS = "spark %%infer"
BY_HAND = "spark mapInArrow"
SCHEMA = ", ".join([*(f"{name} float" for name in NAMES), "score float"])


def peers(df: Any, stack: ExitStack) -> list[Peer]:
    """Return one peer for each way; the session ends with ``stack``."""
    missing = lacks_spark()
    ways: dict[str, Callable[[Any], Any]] = {
        OURS: by_infer,
        "spark mapInPandas": by_pandas,
        BY_HAND: by_arrow,
        "spark pandas_udf iterator": by_udf,
        BATCH_UDF: by_batch_udf,
    }
    if missing:
        return [Peer(name, lambda: 0.0, missing) for name in ways]
    cached = _cached(df, stack)

    def peer(name: str, way: Callable[[Any], Any]) -> Peer:
        return Peer(name, lambda: timed(lambda: _write(way(cached))))

    return [peer(name, way) for name, way in ways.items()]


BATCH_UDF = "spark predict_batch_udf"
ACTIONS: dict[str, Callable[[Any], Any]] = {
    "count()": lambda scored: scored.count(),
    'select("x1")': lambda scored: _write(scored.select("x1")),
    "filter x0 < 0.01": lambda scored: _write(scored.where("x0 < 0.01")),
    "filter score > 0": lambda scored: _write(scored.where("score > 0")),
    "take(20)": lambda scored: scored.take(20),
    "all rows": lambda scored: _write(scored),
}
"""What is done with a lazy frame of predictions."""


def lazy_peers(df: Any, stack: ExitStack) -> dict[str, tuple[Peer, Peer]]:
    """Return ``%%infer --out`` and ``predict_batch_udf`` for each of :data:`ACTIONS`."""
    cached = _cached(df, stack)
    ways = {OURS: by_infer(cached), BATCH_UDF: by_batch_udf(cached)}

    def peer(name: str, action: str) -> Peer:
        return Peer(name, lambda: timed(lambda: ACTIONS[action](ways[name])))

    return {action: (peer(OURS, action), peer(BATCH_UDF, action)) for action in ACTIONS}


def _write(rows: Any) -> None:
    rows.write.format("noop").mode("overwrite").save()


def wide_peer(df: Any, stack: ExitStack) -> Peer:
    """Return mapInPandas for the frame of ``infer.py`` with thousands of columns."""
    if missing := lacks_spark():
        return Peer("spark mapInPandas", lambda: 0.0, missing)
    cached = _cached(df, stack)

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        import pandas as pd
        from _infer_model import mean_predictor

        predict = mean_predictor()
        for batch in batches:
            yield pd.DataFrame(predict(batch))

    return Peer(
        "spark mapInPandas", lambda: timed(lambda: _write(cached.mapInPandas(work, "score float")))
    )


def _cached(df: Any, stack: ExitStack) -> Any:
    here = str(Path(__file__).parent)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    settings = {
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "4g",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH),
        "spark.executorEnv.OMP_NUM_THREADS": "1",
    }
    session = local_spark(settings)
    stack.callback(session.stop)
    cached = session.createDataFrame(df).repartition(2).cache()
    cached.count()
    return cached


def _set_up() -> Callable[[Any], Any]:
    import torch
    from _infer_model import model, scores

    torch.set_num_threads(1)
    net = model()
    return lambda values: scores(net, values)


def by_infer(rows: Any) -> Any:
    """What ``%%infer rows --schema "score float" --out scored`` does."""
    from hydrogen_magic import capture
    from hydrogen_magic.core.job import JobSpec
    from hydrogen_magic.inference.spark.prepared import infer_spark
    from hydrogen_magic.node.prediction.options import InferOptions

    captured = capture.capture_call(predictor, (), {})
    options = InferOptions(batch_size=BATCH, schema="score float")
    return infer_spark(
        rows, captured, JobSpec(placement="spark", env=(("OMP_NUM_THREADS", "1"),)), options
    )


def by_pandas(rows: Any) -> Any:
    def work(batches: Iterator[Any]) -> Iterator[Any]:
        score = _set_up()
        for batch in batches:
            yield batch.assign(score=score(batch.to_numpy()))

    return rows.mapInPandas(work, SCHEMA)


def by_arrow(rows: Any) -> Any:
    def work(batches: Iterator[Any]) -> Iterator[Any]:
        import numpy as np
        import pyarrow as pa

        score = _set_up()
        for batch in batches:
            values = np.stack([column.to_numpy() for column in batch.columns], axis=1)
            columns = [*batch.columns, pa.array(score(values))]
            yield pa.RecordBatch.from_arrays(columns, [*batch.schema.names, "score"])

    return rows.mapInArrow(work, SCHEMA)


def by_udf(rows: Any) -> Any:
    from pyspark.sql.functions import PandasUDFType, pandas_udf

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        import numpy as np
        import pandas as pd

        score = _set_up()
        for columns in batches:
            yield pd.Series(score(np.stack([column.to_numpy() for column in columns], axis=1)))

    work.__annotations__ = {}  # its hints are texts here, which Spark would read
    udf = pandas_udf(work, "float", PandasUDFType.SCALAR_ITER)
    return rows.withColumn("score", udf(*NAMES))


def by_batch_udf(rows: Any) -> Any:
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.functions import array
    from pyspark.sql.types import FloatType

    udf = predict_batch_udf(
        _set_up, return_type=FloatType(), batch_size=BATCH, input_tensor_shapes=[[len(NAMES)]]
    )
    return rows.withColumn("score", udf(array(*NAMES)))
