"""Saving and loading: ``MLWriter`` and ``MLReader`` for Params with values that JSON does not have.

    PATH/metadata   as all of Spark ML writes it: class, uid and Params, as JSON
    PATH/objects    a pickle of the others, in parts: functions, models, metrics

Both are written by Spark, so PATH may be on any file system that Spark knows. They have the same id: an
overwrite that was interrupted leaves new objects beside old metadata.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
from collections.abc import Iterator
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.serialization.pickler import Pickler

_PART_BYTES = 8 << 20
_WRITE_BYTES = 64 << 20
"""Size of the objects of one write: Spark sends them as part of a task, whose size it limits."""


class Writer(MLWriter):  # type: ignore[misc]  # pyspark's classes are Any here
    """Saves an instance and ``attributes`` of it."""

    def __init__(self, instance: Any, attributes: dict[str, Any]) -> None:
        super().__init__()
        self._instance = instance
        self._attributes = attributes

    def save(self, path: str) -> None:
        """Save it to ``path``, which must not have a saved instance unless :meth:`overwrite` was called."""
        values = {param.name: value for param, value in self._instance._paramMap.items()}
        # pyspark's reader passes what it reads to the Param's converter, which refuses None.
        plain = {
            name: value for name, value in values.items() if value is not None and _is_json(value)
        }
        others = {name: value for name, value in values.items() if name not in plain}
        spark, saving = self.sparkSession, secrets.token_hex(8)
        metadata = DefaultParamsWriter._get_metadata_to_save(
            self._instance, spark, {"saving": saving}, plain
        )
        folder, mode = os.path.join(path, "objects"), self._mode()
        for parts in _writes({"params": others, "attributes": self._attributes}, spark):
            rows = [(saving, start, data) for start, data in parts]
            objects = spark.createDataFrame(rows, "saving string, start long, data binary")
            objects.write.mode(mode).parquet(folder)
            mode = "append"
        # Last: what could not be written completely is not loaded.
        rows = spark.createDataFrame([(metadata,)], "value string").coalesce(1)
        rows.write.mode(self._mode()).text(os.path.join(path, "metadata"))

    def _mode(self) -> str:
        return "overwrite" if self.shouldOverwrite else "error"


class Reader(MLReader):  # type: ignore[misc]
    """Loads an instance of a class that has ``_restored(attributes)``."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        """Return the instance that was saved to ``path``. Raises HydrogenError if that was interrupted."""
        spark = self.sparkSession
        expected = f"{self._kind.__module__}.{self._kind.__name__}"
        metadata = DefaultParamsReader.loadMetadata(path, spark, expected)
        parts = spark.read.parquet(os.path.join(path, "objects")).orderBy("start")
        # Instances that were saved before there were ids have none in both.
        ids = (
            parts.select("saving").distinct().collect() if "saving" in parts.columns else [(None,)]
        )
        if [each[0] for each in ids] != [metadata.get("saving")]:
            raise HydrogenError(
                f"{path} has parts of two instances, since a save was interrupted: save it again"
            )
        data = b"".join(bytes(row["data"]) for row in parts.toLocalIterator())
        objects = unpickled(data, path)
        instance = self._kind._restored(objects["attributes"])
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        return instance._set(**objects["params"])


def unpickled(data: bytes, path: str) -> Any:
    """Return the objects of ``path``. Raises HydrogenError if they need another version of this package."""
    try:
        return pickle.loads(data)
    except (AttributeError, ImportError) as error:
        if __package__.partition(".")[0] not in str(error):
            raise
        raise HydrogenError(
            f"{path} was saved with another version of hydrogen_magic, which is needed to load it: {error}"
        ) from error


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _writes(value: Any, spark: Any) -> Iterator[list[tuple[int, bytearray]]]:
    """Yield the parts of one write after the other."""
    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    data = memoryview(file.getvalue())
    task_bytes = int(spark.conf.get("spark.rpc.message.maxSize", "128")) << 20
    n_parts = max(1, min(_WRITE_BYTES, task_bytes // 2) // _PART_BYTES)
    starts = range(0, len(data), _PART_BYTES)
    for first in range(0, len(starts), n_parts):
        chosen = starts[first : first + n_parts]
        yield [(start, bytearray(data[start : start + _PART_BYTES])) for start in chosen]
