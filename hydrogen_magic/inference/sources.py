"""Data for ``%%infer``: cut into Arrow chunks, and returned as the same kind with predictions.

    source(frame) ──► FrameSource.chunks() ─► Arrow tables, in order ─► ranks
                      FrameSource.result() ◄─ predicted columns, in any order ◄─ ranks

| frame | its own columns in the result | the result |
|---|---|---|
| pandas DataFrame | never converted: same dtypes, same index | DataFrame |
| Polars DataFrame | the same ones | DataFrame |
| Polars LazyFrame | collected in batches | LazyFrame over the collected rows |
| PyArrow Table, RecordBatch | the same ones | Table, RecordBatch |
| PyArrow RecordBatchReader, Dataset | read once, in order | Table |
| Parquet: a file, a folder, a glob | copied chunk by chunk | path of a new file or folder |

This module imports none of the libraries: it looks only at those that are loaded.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from hydrogen_magic.errors import InferError
from hydrogen_magic.serialization.pickling_errors import describe

if TYPE_CHECKING:
    import pyarrow as pa

    from hydrogen_magic.node.prediction.options import InferOptions

__all__ = ["FrameResult", "FrameSource", "kind_of", "source"]

_SUPPORTED = (
    "Pass a pandas, Polars, PyArrow or Spark DataFrame, or a path of Parquet data: a file, a folder or"
    " a glob."
)
_REMEDIES = {
    "Series": "convert it: .to_frame()",
    "ndarray": "convert it: pd.DataFrame(array)",
    "Tensor": "convert it: pd.DataFrame(tensor.numpy())",
    "dict": "convert it: pd.DataFrame(…)",
    "list": "convert it: pd.DataFrame(…)",
    "DuckDBPyRelation": "convert it: .arrow()",
    "DataFrameGroupBy": "pass the DataFrame before groupby()",
    "DatasetDict": "pass one of its splits: df['train'].with_format('arrow')[:]",
    "Dataset": "convert it: .to_pandas()",
    "Table": "convert it: .to_pandas()",
}
"""What to do with other objects that hold data, by the name of their class."""


class FrameSource(Protocol):
    """Data as consecutive chunks of rows."""

    schema: pa.Schema
    """Schema of every chunk. For pandas its metadata has the original dtypes."""
    n_rows: int | None
    """None if it is not known before all data is read."""

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        """Yield all rows in order; every chunk but the last has a whole number of batches.

        A frame without rows gives one empty chunk, whose predictions have the columns of the result.
        Chunks are views if the memory of the frame already has Arrow's layout.
        """
        ...

    def result(self, options: InferOptions) -> FrameResult:
        """Return an empty result. Raises InferError if a column of ``options`` does not exist."""
        ...


class FrameResult(Protocol):
    """The frame with predictions, while they arrive. Not thread-safe."""

    is_bounded: bool
    """Whether its memory does not grow with the number of rows."""

    @property
    def n_waiting(self) -> int:
        """Chunks in memory that wait for an earlier chunk before they can be written.

        Always 0 for a result in memory; otherwise a reason not to send further chunks.
        """
        ...

    def begin(self, schema: pa.Schema) -> None:
        """Set the predicted columns. None of them has the name of a column that the result keeps."""
        ...

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table) -> None:
        """Add the predictions for ``rows``, the chunk that begins at ``first_row``; in any order."""
        ...

    def finish(self) -> Any:
        """Return the frame; without predicted columns if :meth:`begin` was never called.

        Raises InferError if rows are missing.
        """
        ...

    def abort(self) -> None:
        """Release memory and delete unfinished files. Does nothing after :meth:`finish`."""
        ...


def kind_of(frame: Any) -> str | None:
    """Return ``pandas``, ``polars``, ``arrow``, ``parquet`` or ``spark``, None for anything else."""
    if isinstance(frame, (str, os.PathLike)):
        return "parquet"
    _require("narwhals")
    from narwhals import dependencies as loaded

    checks: dict[str, tuple[Callable[[Any], bool], ...]] = {
        "pandas": (loaded.is_pandas_dataframe,),
        "polars": (loaded.is_polars_dataframe, loaded.is_polars_lazyframe),
        "arrow": (_is_arrow,),
        "spark": (loaded.is_pyspark_dataframe, loaded.is_pyspark_connect_dataframe),
    }
    return next(
        (kind for kind, is_kind in checks.items() if any(is_it(frame) for is_it in is_kind)), None
    )


def _is_arrow(frame: Any) -> bool:
    kinds = {
        "pyarrow": ("Table", "RecordBatch", "RecordBatchReader"),
        "pyarrow.dataset": ("Dataset",),
    }
    return any(
        isinstance(frame, getattr(sys.modules[module], name))
        for module, names in kinds.items()
        if module in sys.modules
        for name in names
    )


def source(frame: Any, target: str | os.PathLike[str] | None = None) -> FrameSource:
    """Return ``frame`` as a source of chunks.

    ``target`` is the path for predictions of Parquet data: a file for a file, a folder for a folder or
    a glob. The default is next to the data: ``rows-inferred.parquet`` for ``rows.parquet``. Existing
    data is never overwritten.

    Raises InferError for an unsupported object or column.
    """
    _require("pyarrow")
    kind = kind_of(frame)
    if target is not None and kind != "parquet":
        raise InferError(
            f"a path as the result needs Parquet data as input, got a {describe(frame)}"
        )
    if kind == "pandas":
        from hydrogen_magic.inference.pandas_source import PandasSource

        return PandasSource(frame)
    if kind == "parquet":
        from hydrogen_magic.inference.parquet_source import ParquetSource

        return ParquetSource(frame, target)
    if kind in ("polars", "arrow"):
        return _arrow_source(frame, kind)
    raise InferError(_unsupported(frame, kind))


def _arrow_source(frame: Any, kind: str) -> FrameSource:
    from hydrogen_magic.inference import arrow_source

    if kind == "polars":
        is_lazy = type(frame).__name__ == "LazyFrame"
        return (arrow_source.from_lazy_frame if is_lazy else arrow_source.from_polars)(frame)
    if hasattr(frame, "num_rows"):
        return arrow_source.from_table(frame)
    is_reader = hasattr(frame, "read_next_batch")
    return (arrow_source.from_reader if is_reader else arrow_source.from_dataset)(frame)


def _unsupported(frame: Any, kind: str | None) -> str:
    if kind == "spark":
        return "a Spark DataFrame is processed by Spark, not cut into chunks by the kernel"
    remedy = _REMEDIES.get(type(frame).__name__)
    advice = f"; {remedy}" if remedy else ""
    return f"%%infer expects a DataFrame, got a {describe(frame)}{advice}. {_SUPPORTED}"


def _require(module: str) -> None:
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        raise InferError(
            f"%%infer needs {module}, which is not installed: pip install 'hydrogen_magic[infer]'"
        )
