"""Saving and loading: ``MLWriter`` and ``MLReader`` for Params with values that JSON does not have.

    PATH/metadata   as all of Spark ML writes it: class, uid and Params, as JSON
    PATH/objects    a pickle of the others, in parts: functions, models, metrics

Both are written by Spark, so PATH may be on any file system that Spark knows.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from hydrogen_magic.serialization.pickler import Pickler

_PART_BYTES = 8 << 20


class Writer(MLWriter):  # type: ignore[misc]  # pyspark's classes are Any here
    """Saves an instance and ``attributes`` of it."""

    def __init__(self, instance: Any, attributes: dict[str, Any]) -> None:
        super().__init__()
        self._instance = instance
        self._attributes = attributes

    def save(self, path: str) -> None:
        """Save it to ``path``, which must not exist unless :meth:`overwrite` was called."""
        values = {param.name: value for param, value in self._instance._paramMap.items()}
        plain = {name: value for name, value in values.items() if _is_json(value)}
        others = {name: value for name, value in values.items() if name not in plain}
        spark = self.sparkSession
        metadata = DefaultParamsWriter._get_metadata_to_save(self._instance, spark, None, plain)
        rows = spark.createDataFrame([(metadata,)], "value string").coalesce(1)
        self._mode(rows).text(os.path.join(path, "metadata"))
        parts = _parts({"params": others, "attributes": self._attributes})
        objects = spark.createDataFrame(parts, "start long, data binary")
        self._mode(objects).parquet(os.path.join(path, "objects"))

    def _mode(self, rows: Any) -> Any:
        return rows.write.mode("overwrite" if self.shouldOverwrite else "error")


class Reader(MLReader):  # type: ignore[misc]
    """Loads an instance of a class that has ``_restored(attributes)``."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Return the instance that was saved to ``path``."""
        spark = self.sparkSession
        expected = f"{self._kind.__module__}.{self._kind.__name__}"
        metadata = DefaultParamsReader.loadMetadata(path, spark, expected)
        objects = _loaded(spark.read.parquet(os.path.join(path, "objects")))
        instance = self._kind._restored(objects["attributes"])
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance._set(**objects["params"])


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _parts(value: Any) -> list[tuple[int, bytearray]]:
    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    data = file.getbuffer()
    starts = range(0, len(data), _PART_BYTES)
    return [(start, bytearray(data[start : start + _PART_BYTES])) for start in starts]


def _loaded(parts: Any) -> Any:
    rows = parts.orderBy("start").toLocalIterator()
    return pickle.loads(b"".join(bytes(row["data"]) for row in rows))
