"""Frames that lie in memory as Arrow lays them out: PyArrow's, and Polars'.

Chunks are views of them, and the result holds the very same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.result_columns import ResultColumns, owned
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.column_names import refuse_repeated

if TYPE_CHECKING:
    import polars as pl

    from hydrogen_magic.node.prediction.options import InferOptions

__all__ = ["PolarsSource", "TableSource", "arrow_as_polars", "polars_as_arrow", "polars_schema"]


class TableSource:
    """A PyArrow Table or RecordBatch; see :class:`hydrogen_magic.inference.sources.FrameSource`."""

    kind = "arrow"

    def __init__(self, frame: Any) -> None:
        refuse_repeated(frame.schema.names, "the table calls", "rename one with rename_columns()")
        self._is_batch = isinstance(frame, pa.RecordBatch)
        self._table = pa.Table.from_batches([frame]) if self._is_batch else frame
        self.schema = frame.schema
        self.n_rows: int | None = frame.num_rows
        self.n_bytes: int | None = frame.nbytes

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        pace = chunking.ChunkSizer(batch_size)
        for start, end in chunking.spans(self._table.num_rows, pace):
            chunk = self._table.slice(start, end - start)
            pace.saw(chunk)
            yield chunk

    def result(self, options: InferOptions) -> InMemoryResult:
        kept = options.kept(self.schema.names)
        return InMemoryResult(self._table.num_rows, lambda made: self._joined(kept, made))

    def _joined(self, kept: list[str], predicted: pa.Table) -> Any:
        table = self._table.select(kept)
        # A table of no columns forgets how many rows it has.
        whole = _side_by_side(table, predicted) if kept else predicted
        whole = whole if predicted.num_columns or kept else table
        return _one_batch(whole) if self._is_batch else whole


def _side_by_side(left: pa.Table, right: pa.Table) -> pa.Table:
    schema = pa.schema([*left.schema, *right.schema], metadata=left.schema.metadata)
    return pa.Table.from_arrays([*left.columns, *right.columns], schema=schema)


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    if not table.num_columns:
        return table.to_batches()[0]
    arrays = [
        pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        for column in table.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=table.schema)


class PolarsSource:
    """A Polars DataFrame; see :class:`hydrogen_magic.inference.sources.FrameSource`."""

    kind = "polars"

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame
        self.schema = polars_schema(frame.clear())
        self.n_rows: int | None = frame.height
        self.n_bytes: int | None = int(frame.estimated_size())

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        pace = chunking.ChunkSizer(batch_size)
        for start, end in chunking.spans(self._frame.height, pace):
            chunk = polars_as_arrow(self._frame.slice(start, end - start))
            pace.saw(chunk)
            yield chunk

    def result(self, options: InferOptions) -> InMemoryResult:
        kept = options.kept(self.schema.names)
        return InMemoryResult(self._frame.height, lambda made: self._joined(kept, made))

    def _joined(self, kept: list[str], predicted: pa.Table) -> Any:
        own = self._frame.select(kept)
        if not predicted.num_columns:
            return own
        columns = arrow_as_polars(predicted)
        return own.hstack(columns) if kept else columns


def polars_as_arrow(frame: pl.DataFrame) -> pa.Table:
    """Return the same values under Arrow's first types, which every reader of Arrow knows."""
    import polars as pl

    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def arrow_as_polars(table: pa.Table) -> pl.DataFrame:
    """Return the same columns as a frame, each read by itself.

    Together, PyArrow would cut them into batches of equal length, and of fixed-size lists with nulls
    Polars takes none that begins inside a longer one.
    """
    import polars as pl

    columns: list[Any] = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if "fixed_size_list" in str(field.type):
            column = pa.chunked_array([owned(part) for part in column.chunks], type=field.type)
        alone = pa.Table.from_arrays([column], schema=pa.schema([field]))
        columns.append(pl.from_arrow(alone, rechunk=False))
    return pl.concat(columns, how="horizontal") if columns else pl.DataFrame()


def polars_schema(empty: pl.DataFrame) -> pa.Schema:
    """Return the Arrow schema of a frame. Raises InferError for a column that has no Arrow type."""
    import polars as pl

    for name, dtype in empty.schema.items():
        try:
            is_object = dtype == pl.Object
            field = None if is_object else polars_as_arrow(empty.select(name)).schema.field(0)
        except (pa.ArrowException, pl.exceptions.PolarsError):
            field = None
        if field is None:
            raise InferError(
                f"column {name!r} of the frame is {dtype}, which no Arrow type holds, so it cannot"
                f" be given to a rank: cast it, or leave it out: df.drop({name!r})"
            )
    return polars_as_arrow(empty).schema


class InMemoryResult:
    """Predictions beside a frame in memory; see :class:`hydrogen_magic.inference.sources.FrameResult`."""

    is_bounded = False
    n_waiting = 0

    def __init__(self, n_rows: int, join: Callable[[pa.Table], Any]) -> None:
        self._predicted = ResultColumns(n_rows)
        self._join = join

    def begin(self, schema: pa.Schema) -> None:
        self._predicted.begin(schema)

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table | None) -> None:
        self._predicted.put(first_row, columns)

    def finish(self) -> Any:
        made = [(field, column.arrow()) for field, column in self._predicted.take()]
        schema = pa.schema([field for field, _ in made])
        return self._join(pa.Table.from_arrays([array for _, array in made], schema=schema))

    def abort(self) -> None:
        self._predicted.clear()
