"""Finished partitions of an eager run on Spark, as files on a disk that executors and kernel share.

    rows/<partition>.<rows>.<sum of the rows' hashes>.<place of the last stream>.part
         Arrow IPC streams, one after another: a new one where the types of the columns become wider

The name says that a file is complete, and of which rows it is; see ``inference_task.serve_partition``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.chunking import side_by_side
from hydrogen_magic.node.prediction.fixed_types import fits, fixed, with_reasons

PART = ".part"
"""End of the name of a complete file."""
NOT_KEPT = "finished partitions cannot be written"
"""In the error of a task: the disk is full, for example."""


@dataclass(frozen=True)
class Part:
    """The rows of one partition: columns of the frame, then the predicted ones."""

    path: Path
    number: int
    n_rows: int
    place: int
    """Of the last stream, whose schema holds all rows."""

    @property
    def schema(self) -> pa.Schema:
        with self.path.open("rb") as file:
            file.seek(self.place)
            return pa.ipc.open_stream(file).schema


def found(folder: Path, names: Container[str] | None = None) -> list[Part]:
    """Return the complete parts in a folder, in the order of their partitions; ``names``: only these.

    Of each partition one: Spark may run a task twice, and each writes a file.
    """
    paths = sorted(folder.glob(f"*{PART}"))
    parts = [_part(path) for path in paths if names is None or path.name in names]
    of_partition = {part.number: part for part in parts}
    return sorted(of_partition.values(), key=lambda part: part.number)


def _part(path: Path) -> Part:
    number, n_rows, _, place = path.name.removesuffix(PART).split(".")
    return Part(path, int(number), int(n_rows), int(place))


def write(path: str, tables: Iterable[pa.Table]) -> Iterator[int]:
    """Write all rows; yield the place of each stream.

    Raises InferError with :data:`NOT_KEPT` if they cannot be written. Errors of ``tables`` are those of the
    cell.
    """
    with _writing():
        file = pa.OSFile(path, "wb")
    with file:
        # By the metadata, too: it says of which columns no value is known yet.
        for _, group in groupby(tables, key=lambda table: table.schema.serialize().to_pybytes()):
            yield file.tell()
            first = next(group)
            with _writing():
                stream = pa.ipc.new_stream(file, first.schema)
            for table in chain([first], group):
                with _writing():
                    stream.write_table(table)
            with _writing():
                stream.close()
        with _writing():
            file.close()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:  # the run has no folder any more
        raise
    except OSError as error:
        raise InferError(f"{NOT_KEPT}: {error}") from error


def read(path: str, config: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part: kept columns, and predicted ones in the types of Spark."""
    of_spark = pa.ipc.read_schema(pa.py_buffer(config["of_spark"]))
    as_text = config["options"]["on_error"] == "collect"
    with pa.OSFile(path, "rb") as file:
        for batch in _batches(file):
            table = pa.Table.from_batches([batch])
            own, predicted = table.select(config["kept"]), table.drop(config["kept"])
            added, misfits = fixed(predicted, of_spark, as_text=as_text, rounds=True)
            if misfits and not as_text:
                remedy = (
                    "; or continue with --resume --on-error collect, which makes the column text"
                )
                can_resume = config["options"]["on_error"] == "fail"
                raise InferError(f"{next(iter(misfits.values()))}{remedy if can_resume else ''}")
            yield from side_by_side(own, with_reasons(added, misfits)).to_batches()


def unfit_columns(path: Path, of_spark: pa.Schema) -> set[str]:
    """Return the columns of ``of_spark`` that cannot hold all values of a part.

    Only values of other types are read.
    """
    found: set[str] = set()
    with pa.memory_map(str(path)) as file:
        for batch in _batches(file):
            known = set(batch.schema.names) - found
            found.update(
                field.name
                for field in of_spark
                if field.name in known and not fits(batch.column(field.name), field.type)
            )
    return found


def _batches(file: Any) -> Iterator[pa.RecordBatch]:
    while file.tell() < file.size():
        yield from pa.ipc.open_stream(file)
