"""Data for ``%%infer``: cut into Arrow chunks, and returned as the same kind with predictions.

    source(frame) ──► FrameSource.chunks() ─► Arrow tables, in order ─► ranks
                      FrameSource.result() ◄─ predicted columns, in any order ◄─ ranks

| frame | its own columns in the result | the result |
|---|---|---|
| pandas DataFrame | never converted: same dtypes, same index | DataFrame |
| Polars DataFrame | the same ones | DataFrame |
| Polars LazyFrame | collected in batches | LazyFrame over the collected rows |
| PyArrow Table, RecordBatch | the same ones | Table, RecordBatch |
| Hugging Face Dataset | read in batches | Dataset in memory |
| PyArrow Dataset, and objects with ``__arrow_c_stream__``: DuckDB, Ibis, … | read once, in order | Table |
| Parquet, CSV, JSON Lines: a path, URL, glob, list of these | copied by chunks | path of new Parquet data |

This module imports none of the libraries: it looks only at those that are loaded. Narwhals would replace none
of this: it collects a LazyFrame at once, and its conversions between pandas and Arrow are PyArrow's, which
split blocks of columns and turn predicted integers with nulls into floats.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hydrogen_magic.errors import InferError
from hydrogen_magic.serialization.object_paths import describe

if TYPE_CHECKING:
    import pyarrow as pa

    from hydrogen_magic.node.prediction.block_rows import BlockRows
    from hydrogen_magic.node.prediction.options import InferOptions

_OLDEST_PYARROW = 21
"""As pyproject.toml says: older releases read and write structs and text files in other ways."""

_SUPPORTED = (
    "Pass a pandas, Polars, PyArrow or Spark DataFrame, a DuckDB relation, a Hugging Face Dataset or"
    " another object with __arrow_c_stream__, or {formats} data: a path or a URL of a file or folder,"
    " a glob, or a list of these."
)
_KINDS = {
    "pandas": ("pandas", "DataFrame"),
    "polars": ("polars", "DataFrame", "LazyFrame"),
    "spark": ("pyspark.sql", "DataFrame"),
}
"""The package and the names of classes; nothing is imported for it."""
_REMEDIES = {
    "Series": "convert it: .to_frame()",
    "ndarray": "convert it: pd.DataFrame(array)",
    "Tensor": "convert it: pd.DataFrame(tensor.numpy())",
    "dict": "convert it: pd.DataFrame(…)",
    "list": "convert it: pd.DataFrame(…)",
    "DataFrameGroupBy": "pass the DataFrame before groupby()",
    "GroupedTable": "pass the table before group_by()",
    "DatasetDict": "pass one of its splits, such as df['train']",
    "IterableDataset": "convert it: Dataset.from_generator(…)",
}
"""What to do with other objects that hold data, by the name of their class."""


class FrameSource(Protocol):
    """Data as consecutive chunks of rows."""

    schema: pa.Schema
    """Schema of every chunk."""
    n_rows: int | None
    """None if it is not known before all data is read."""
    attrs: Any
    """``attrs`` of batches that are pandas DataFrames; empty or None if they have none."""

    def chunks(self, batch_size: int) -> Iterator[pa.Table | BlockRows]:
        """Yield all rows in order; every chunk but the last has a whole number of batches.

        A frame without rows gives one empty chunk, whose predictions have the columns of the result.
        Chunks are views if the memory of the frame already has Arrow's layout.
        """

    def result(self, options: InferOptions) -> FrameResult:
        """Return an empty result. Raises InferError if a column of ``options`` does not exist."""


class FrameResult(Protocol):
    """The frame with predictions, while they arrive. Not thread-safe."""

    is_bounded: bool
    """Whether its memory does not grow with the number of rows."""

    @property
    def target(self) -> Path | None:
        """Its path, None for a result in memory."""

    @property
    def n_waiting(self) -> int:
        """Chunks in memory that wait for an earlier chunk before they can be written.

        Always 0 for a result in memory; otherwise a reason not to send further chunks.
        """

    @property
    def waiting_bytes(self) -> int:
        """Size of these chunks with their predictions."""

    def begin(self, schema: pa.Schema) -> None:
        """Set the predicted columns, or later wider types for them.

        None of them has the name of a column that the result keeps. Raises MisfitError if values that have
        arrived do not fit, or if the result cannot have a type; it is unchanged then.
        """

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table) -> None:
        """Add the predictions for ``rows``, the chunk that begins at ``first_row``; in any order.

        Their types are those of the last :meth:`begin`; a later one may set wider types.
        """

    def finish(self) -> Any:
        """Return the frame; without predicted columns if :meth:`begin` was never called.

        Raises InferError if rows of files are missing.
        """

    @property
    def done(self) -> list[tuple[int, int]]:
        """First row and end of the rows that have arrived, in order."""

    def finished(self) -> Any:
        """Return the frame with these rows alone: the run has been stopped."""

    def abort(self) -> None:
        """Release memory and delete unfinished files. Does nothing after :meth:`finish`."""


def kind_of(frame: Any) -> str | None:
    """Return ``pandas``, ``polars``, ``spark`` or ``path``, None for anything else."""
    if isinstance(frame, (str, os.PathLike)) or _is_list_of_paths(frame):
        return "path"
    for base in type(frame).__mro__:
        for kind, (package, *names) in _KINDS.items():
            if base.__name__ in names and f"{base.__module__}.".startswith(f"{package}."):
                return kind
    return None


def _is_list_of_paths(frame: Any) -> bool:
    is_list = isinstance(frame, (list, tuple)) and bool(frame)
    return is_list and all(isinstance(path, (str, os.PathLike)) for path in frame)


def source(
    frame: Any,
    target: str | os.PathLike[str] | None = None,
    *,
    caller: str = "%%infer",
    formats: str = "Parquet, CSV or JSON Lines",
) -> FrameSource:
    """Return ``frame`` as a source of chunks.

    ``target`` is the path for predictions of files: a file for a file, a folder for a folder or a glob.
    The default is next to the data: ``rows-inferred.parquet`` for ``rows.parquet``. Existing data is
    never overwritten. Other frames have none: :func:`.request.plan` refuses it. ``caller``: what errors
    name as the subject. ``formats``: files that it reads.

    Raises InferError for an unsupported object or column.
    """
    require_pyarrow(caller)
    kind = kind_of(frame)
    if kind == "pandas":
        from hydrogen_magic.inference.pandas_source import PandasSource

        return PandasSource(frame)
    if kind == "path":
        from hydrogen_magic.inference.file_source import FileSource

        return FileSource(frame, target)
    if kind == "spark":
        raise InferError(
            "a Spark DataFrame is processed by Spark, not cut into chunks by the kernel"
        )
    from hydrogen_magic.inference.arrow_source import arrow_source

    found = arrow_source(frame)
    if found is None:
        remedy = _REMEDIES.get(type(frame).__name__)
        advice = f"; {remedy}" if remedy else ""
        raise InferError(
            f"{caller} expects a DataFrame, got a {describe(frame)}{advice}. "
            + _SUPPORTED.format(formats=formats)
        )
    return found


def close(source: FrameSource) -> None:
    """End the reading of data that is read once, such as the query of a database, whether it began or not."""
    getattr(source, "close", lambda: None)()


def require_pyarrow(caller: str) -> None:
    """Raise InferError with the remedy if PyArrow, which most modules here import, is missing or too old."""
    if fault := pyarrow_fault():
        raise InferError(
            f"{caller} needs PyArrow {_OLDEST_PYARROW} or newer, {fault}: pip install"
            " 'hydrogen_magic[infer]', and restart the kernel"
        )


def pyarrow_fault() -> str:
    """Return what is wrong with the installed PyArrow; empty if nothing is."""
    try:
        found = importlib.metadata.version("pyarrow")
    except importlib.metadata.PackageNotFoundError:
        return "which is not installed"
    is_old = int(found.partition(".")[0]) < _OLDEST_PYARROW
    return f"here is {found}" if is_old else ""
