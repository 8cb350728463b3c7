"""What came in to be predicted: which kind of frame, cut into Arrow chunks, and back to that kind.

    source(frame) ──► Source.chunks() ─► Arrow tables, in order ─► ranks
                      Source.result() ◄─ predicted columns, in any order ◄─ ranks

| frame | its own columns in the result | the result |
|---|---|---|
| pandas DataFrame | never converted: same dtypes, same index | DataFrame |
| Polars DataFrame | the same ones | DataFrame |
| Polars LazyFrame | collected in batches, never as a whole before | LazyFrame over what is there |
| PyArrow Table, RecordBatch | the same ones | Table, RecordBatch |
| PyArrow RecordBatchReader, Dataset | read once, in its order | Table |
| Parquet: a file, a folder, a glob | written again, a piece at a time | path of a new file or folder |

This file imports none of the libraries: it tells kinds apart by what is loaded already.
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

_TAKEN = (
    "It takes a pandas, Polars, PyArrow or Spark DataFrame, or the path of Parquet data: a file, a"
    " folder or a glob."
)
_REMEDIES = {
    "Series": "make it a frame: .to_frame()",
    "ndarray": "make it a frame: pd.DataFrame(array)",
    "Tensor": "make it a frame: pd.DataFrame(tensor.numpy())",
    "dict": "make it a frame: pd.DataFrame(…)",
    "list": "make it a frame: pd.DataFrame(…)",
    "DuckDBPyRelation": "make it an Arrow table: .arrow()",
    "DataFrameGroupBy": "give the frame that was grouped",
    "DatasetDict": "take one of its splits, as df['train'].with_format('arrow')[:]",
    "Dataset": "make it a frame: .to_pandas()",
    "Table": "make it a frame: .to_pandas()",
}
"""What to do with what people have in their hands when they want predictions."""


class FrameSource(Protocol):
    """A frame, seen as consecutive chunks of rows."""

    kind: str
    """``pandas``, ``polars``, ``arrow`` or ``parquet``."""
    schema: pa.Schema
    """Of every chunk. A pandas frame's says in its metadata which dtypes the columns had."""
    n_rows: int | None
    """None where only reading to the end would tell."""
    n_bytes: int | None
    """About, of the data in memory or in files; None where nobody knows."""

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        """Yield all rows in their order, a whole number of batches at a time but for the last chunk.

        A frame of no rows gives one chunk of no rows: what predict makes of it has the columns of
        the result. Chunks are views where the frame's memory is laid out as Arrow wants it.
        """

    def result(self, options: InferOptions) -> FrameResult:
        """Return the still empty result. Raises InferError for columns that there are not."""


class FrameResult(Protocol):
    """The frame that comes back, while it is put together. For one thread at a time."""

    is_bounded: bool
    """Whether it takes no more memory the more rows there are."""

    @property
    def n_waiting(self) -> int:
        """Chunks in memory that an earlier one, not there yet, keeps from being written.

        Always 0 where the place of every row is known; otherwise a reason not to run further ahead.
        """

    def begin(self, schema: pa.Schema) -> None:
        """Say which columns are predicted; none has the name of one that the frame keeps."""

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table | None) -> None:
        """Take the predictions for ``rows``, the chunk that begins at ``first_row``; in any order."""

    def finish(self) -> Any:
        """Return the frame; without predicted columns where :meth:`begin` was never called.

        Raises InferError when rows are missing.
        """

    def abort(self) -> None:
        """Let go of everything, also of what was begun on disk. Does nothing after :meth:`finish`."""


def kind_of(frame: Any) -> str | None:
    """Return ``pandas``, ``polars``, ``arrow``, ``parquet`` or ``spark``, None for anything else."""
    if isinstance(frame, (str, os.PathLike)):
        return "parquet"
    _need("narwhals")
    from narwhals import dependencies as loaded

    kinds: dict[str, tuple[Callable[[Any], bool], ...]] = {
        "pandas": (loaded.is_pandas_dataframe,),
        "polars": (loaded.is_polars_dataframe, loaded.is_polars_lazyframe),
        "arrow": (_is_arrow,),
        "spark": (loaded.is_pyspark_dataframe, loaded.is_pyspark_connect_dataframe),
    }
    return next((kind for kind, tests in kinds.items() if any(is_a(frame) for is_a in tests)), None)


def source(frame: Any, target: str | os.PathLike[str] | None = None) -> FrameSource:
    """Return ``frame`` as a source of chunks.

    ``target`` is where the predictions for Parquet data are written: a file for a file, a folder
    for a folder or a glob. Default: beside the data, ``rows-inferred.parquet`` for
    ``rows.parquet``. What is there already is never written over.

    Raises InferError for what is no frame, and for a frame whose rows cannot be given to a rank.
    """
    _need("pyarrow")
    kind = kind_of(frame)
    if target is not None and kind != "parquet":
        raise InferError(f"only Parquet data is written to a file: a {describe(frame)} is not")
    if kind == "pandas":
        from hydrogen_magic.inference.pandas_source import PandasSource

        return PandasSource(frame)
    if kind == "parquet":
        from hydrogen_magic.inference.parquet_source import ParquetSource

        return ParquetSource(frame, target)
    if kind in ("polars", "arrow"):
        return _arrow_source(frame, kind)
    raise InferError(_not_a_frame(frame, kind))


def _arrow_source(frame: Any, kind: str) -> FrameSource:
    from hydrogen_magic.inference import arrow_source, stream_source

    if kind == "polars":
        is_lazy = type(frame).__name__ == "LazyFrame"
        return stream_source.of_lazy_frame(frame) if is_lazy else arrow_source.PolarsSource(frame)
    if hasattr(frame, "num_rows"):
        return arrow_source.TableSource(frame)
    is_reader = hasattr(frame, "read_next_batch")
    return stream_source.of_reader(frame) if is_reader else stream_source.of_dataset(frame)


def _is_arrow(frame: Any) -> bool:
    arrow, dataset = sys.modules.get("pyarrow"), sys.modules.get("pyarrow.dataset")
    if arrow is None:
        return False
    kinds = [arrow.Table, arrow.RecordBatch, arrow.RecordBatchReader]
    return isinstance(frame, (*kinds, dataset.Dataset) if dataset is not None else tuple(kinds))


def _not_a_frame(frame: Any, kind: str | None) -> str:
    if kind == "spark":
        return "a Spark DataFrame stays on its cluster: it is not cut into chunks here"
    remedy = _REMEDIES.get(type(frame).__name__)
    advice = f"; {remedy}" if remedy else ""
    return f"%%infer was given a {describe(frame)}, which is no frame{advice}. {_TAKEN}"


def _need(module: str) -> None:
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        raise InferError(
            f"%%infer needs {module}, which is not installed: pip install 'hydrogen_magic[infer]'"
        )
