"""Whatever exports Arrow data as a source of chunks: in memory, or read once from front to back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import pandas_metadata
from hydrogen_magic.inference.memory_result import MemoryResult, PredictedColumns, RowRanges, copied
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.chunking import one_batch, side_by_side
from hydrogen_magic.node.prediction.column_names import refuse_repeated

if TYPE_CHECKING:
    import polars as pl

    from hydrogen_magic.node.prediction.options import InferOptions

_READ_OPTIONS = {"batch_size": 1 << 14, "batch_readahead": 2, "fragment_readahead": 1}
"""How much of a Dataset is read at once, and ahead of the requested batch."""
_READ_ROWS = 1 << 14


def arrow_source(frame: Any) -> ArrowSource | None:
    """Return a source of any object with Arrow data, None for other objects.

    Other libraries than those named here take part by Arrow's PyCapsule interface.
    """
    if isinstance(frame, (pa.Table, pa.RecordBatch)):
        return _from_table(frame)
    if is_a(frame, "polars", "DataFrame"):
        return _from_polars(frame)
    if is_a(frame, "polars", "LazyFrame"):
        return _from_lazy_frame(frame)
    if is_a(frame, "pyarrow._dataset", "Dataset"):
        return _read_once(frame.schema, lambda: scanned(frame))
    if is_a(frame, "datasets", "Dataset"):  # of Hugging Face
        rows = frame.with_format("arrow")
        schema = frame.features.arrow_schema
        return _read_once(schema, lambda: rows.iter(_READ_ROWS), type(frame))
    if not hasattr(type(frame), "__arrow_c_stream__"):  # an Ibis group answers every attribute
        return None
    try:
        reader = pa.RecordBatchReader.from_stream(frame)
    except pa.ArrowInvalid:  # one column, such as a Series
        return None
    except Exception as error:
        if type(error).__name__ != "ResourceInUseException":  # of DuckDB
            raise
        raise InferError(
            f"the DuckDB relation cannot be read: {error}. Its connection runs one query at a time: make the"
            " relation by another one, con.cursor().sql(…)"
        ) from error
    try:
        return _read_once(reader.schema, lambda: reader, close=reader.close)
    except InferError:
        reader.close()
        raise


class ArrowSource:
    """See :class:`hydrogen_magic.inference.sources.FrameSource`.

    Args:
        schema: Of all chunks.
        cut: Yields the chunks for a batch size.
        join: Joins the columns to keep, the rows that were read (only if ``n_rows`` is None), the predicted
            columns, and the numbers of their rows.
        n_rows: None for data that is read once.
        convert: Makes the result from what ``join`` returns.
        close: Ends the reading of such data, which may block a connection to a database.
    """

    def __init__(
        self,
        schema: pa.Schema,
        cut: Callable[[int], Iterator[pa.Table]],
        join: Callable[[list[str], pa.Table, pa.Table, RowRanges], Any],
        n_rows: int | None = None,
        convert: Callable[[Any], Any] = lambda joined: joined,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        refuse_repeated(schema.names, "the data has", "rename one")
        self.schema = schema
        self.n_rows = n_rows
        self.attrs = pandas_metadata.attrs(schema)
        self.chunks = cut
        self.close = close
        self._join = join
        self._convert = convert

    def result(self, options: InferOptions) -> MemoryResult:
        kept = options.kept(self.schema.names)

        def join(rows: pa.Table, predicted: PredictedColumns, done: RowRanges) -> Any:
            table = pa.table({field.name: column for field, column in predicted})
            joined = self._join(kept, rows, table, done)
            if options.replace:
                joined = joined.select(options.order(self.schema.names, table.column_names))
            return self._convert(joined)

        metadata = pandas_metadata.of_kept(self.schema, kept)
        own = pa.schema([self.schema.field(name) for name in kept], metadata=metadata)
        return MemoryResult(join, own if self.n_rows is None else None)


# ── PyArrow ──────────────────────────────────────────────────────────────────────────────────────


def _from_table(frame: pa.Table | pa.RecordBatch) -> ArrowSource:
    """Return a source whose chunks are views; the result has the frame's own columns."""
    is_batch = isinstance(frame, pa.RecordBatch)
    table = pa.Table.from_batches([frame]) if is_batch else frame
    metadata = pandas_metadata.of_rows(table.schema, table.num_rows).metadata
    sent = table.replace_schema_metadata(metadata)

    def cut(batch_size: int) -> Iterator[pa.Table]:
        return chunking.sliced(sent.slice, table.num_rows, batch_size)

    def join(kept: list[str], rows: pa.Table, predicted: pa.Table, done: RowRanges) -> Any:
        chosen = table.select(kept).replace_schema_metadata(
            pandas_metadata.of_kept(table.schema, kept)
        )
        own = [chosen.slice(first, end - first) for first, end in done]
        rows = pa.concat_tables(own or [chosen.slice(0, 0)])
        whole = side_by_side(rows, predicted)
        return one_batch(whole) if is_batch else whole

    return ArrowSource(table.schema, cut, join, table.num_rows)


def _read_once(
    schema: pa.Schema,
    read: Callable[[], Iterable[Any]],
    convert: Callable[[pa.Table], Any] = lambda table: table,
    close: Callable[[], None] = lambda: None,
) -> ArrowSource:
    """Return a source of batches or tables; ``convert`` makes the result from a Table."""

    sent = pandas_metadata.of_rows(schema, None)

    def cut(batch_size: int) -> Iterator[pa.Table]:
        pieces = (piece.replace_schema_metadata(sent.metadata) for piece in read())
        return chunking.rebatched(pieces, sent, chunking.ChunkSizer(batch_size))

    def join(kept: list[str], rows: pa.Table, predicted: pa.Table, done: RowRanges) -> Any:
        return side_by_side(rows, predicted)

    return ArrowSource(schema, cut, join, convert=convert, close=close)


def scanned(dataset: Any) -> Iterator[pa.RecordBatch]:
    """Yield all batches, for Parquet one row group after another.

    While batches are not taken, Arrow reads ahead until it has read all data or a gigabyte. So we scan a
    row group at a time, or a file if its format has no row groups. Only a Dataset with a filter cannot
    be split.
    """
    try:
        fragments = list(dataset.get_fragments())
    except ValueError:  # the Dataset has a filter
        yield from dataset.to_batches(**_READ_OPTIONS)
        return
    for fragment in fragments:
        has_groups = hasattr(fragment, "split_by_row_group")
        for part in fragment.split_by_row_group() if has_groups else [fragment]:
            yield from part.to_batches(schema=dataset.schema, **_READ_OPTIONS)


# ── Polars ───────────────────────────────────────────────────────────────────────────────────────


def _from_polars(frame: pl.DataFrame) -> ArrowSource:
    """Return a source of a DataFrame; the result has its columns."""
    import polars as pl

    def cut(batch_size: int) -> Iterator[pa.Table]:
        return chunking.sliced(
            lambda start, n_rows: _polars_as_arrow(frame.slice(start, n_rows)),
            frame.height,
            batch_size,
        )

    def join(kept: list[str], rows: pa.Table, predicted: pa.Table, done: RowRanges) -> Any:
        own = frame.select(kept)
        if done not in ([], [(0, frame.height)]):
            own = pl.concat([own.slice(first, end - first) for first, end in done])
        if not predicted.num_columns:
            return own
        columns = arrow_as_polars(predicted)
        return own.hstack(columns) if kept else columns

    return ArrowSource(_polars_schema(frame.clear()), cut, join, frame.height)


def _from_lazy_frame(frame: pl.LazyFrame) -> ArrowSource:
    """Return a source of a LazyFrame; the result is a LazyFrame of the rows that were read."""
    import polars as pl

    def read() -> Iterator[pa.Table]:
        collect_batches: Any = getattr(frame, "collect_batches", None)  # not in Polars 1.0
        is_old = collect_batches is None
        frames = [frame.collect()] if is_old else collect_batches(maintain_order=True)
        return map(_polars_as_arrow, frames)

    known = frame.collect_schema()

    def joined(table: pa.Table) -> pl.LazyFrame:
        # Arrow has no type for Enum, whose order is that of its categories.
        columns = arrow_as_polars(table)
        enums: dict[Any, Any] = {
            name: kind
            for name, kind in known.items()
            if isinstance(kind, pl.Enum) and columns.schema.get(name) == pl.Categorical
        }
        return columns.lazy().cast(enums) if enums else columns.lazy()

    return _read_once(_polars_schema(pl.DataFrame(schema=known)), read, joined)


def _polars_as_arrow(frame: pl.DataFrame) -> pa.Table:
    """Return the same values in Arrow's oldest types, which every reader of Arrow supports."""
    import polars as pl

    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def arrow_as_polars(table: pa.Table) -> pl.DataFrame:
    """Return the same columns as a DataFrame.

    Each column is converted alone, since PyArrow would cut a table into batches of equal length. Polars
    cannot read a part of a fixed-size list column that has nulls.
    """
    import polars as pl

    columns: list[Any] = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if "fixed_size_list" in str(field.type):
            column = pa.chunked_array(copied(column), field.type)
        columns.append(pl.Series(field.name, pl.from_arrow(column, rechunk=False)))
    return pl.DataFrame(columns)


def _polars_schema(empty: pl.DataFrame) -> pa.Schema:
    """Return the Arrow schema of a DataFrame. Raises InferError for a column without an Arrow type."""
    if _is_in_arrow(empty):
        return _polars_as_arrow(empty).schema
    name = next(name for name in empty.columns if not _is_in_arrow(empty.select(name)))
    raise InferError(
        f"column {name!r} has type {empty.schema[name]}, which Arrow does not support, so it cannot be sent"
        f" to a rank: cast it, or drop it with df.drop({name!r})"
    )


def _is_in_arrow(empty: pl.DataFrame) -> bool:
    import polars as pl

    try:
        return pl.Object not in empty.dtypes and _polars_as_arrow(empty) is not None
    except (pa.ArrowException, pl.exceptions.PolarsError):
        return False
