"""Frames that are read once, from front to back: how many rows there are shows at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.arrow_source import arrow_as_polars, polars_as_arrow, polars_schema
from hydrogen_magic.inference.result_columns import RowCoverage, owned
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.column_names import refuse_repeated

if TYPE_CHECKING:
    import polars as pl

    from hydrogen_magic.node.prediction.options import InferOptions

__all__ = ["StreamSource", "beside", "of_dataset", "of_lazy_frame", "of_reader"]

_READING = {"batch_size": 1 << 14, "batch_readahead": 2, "fragment_readahead": 1}
"""What a Dataset reads at once, and ahead of the batch that is asked for."""


class StreamSource:
    """Batches from somewhere; see :class:`hydrogen_magic.inference.sources.FrameSource`."""

    n_rows: int | None = None
    n_bytes: int | None = None

    def __init__(
        self,
        kind: str,
        schema: pa.Schema,
        read: Callable[[], Iterable[Any]],
        make: Callable[[pa.Table], Any],
    ) -> None:
        refuse_repeated(schema.names, "the data calls", "rename one")
        self.kind = kind
        self.schema = schema
        self._read = read
        self._make = make

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        return chunking.rebatched(self._read(), self.schema, chunking.ChunkSizer(batch_size))

    def result(self, options: InferOptions) -> StreamResult:
        return StreamResult(self.schema, options.kept(self.schema.names), self._make)


class StreamResult:
    """Rows as they were read, with predictions; see :class:`hydrogen_magic.inference.sources.FrameResult`."""

    is_bounded = False
    n_waiting = 0

    def __init__(self, own: pa.Schema, kept: list[str], make: Callable[[pa.Table], Any]) -> None:
        self._own = own
        self._kept = kept
        self._make = make
        self._parts: dict[int, pa.Table] = {}
        self._coverage = RowCoverage()

    def begin(self, schema: pa.Schema) -> None:
        """Do nothing: the columns come with each part."""

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table | None) -> None:
        self._coverage.add(first_row, columns.num_rows)
        self._parts[first_row] = beside(rows, self._kept, columns)

    def finish(self) -> Any:
        self._coverage.check()
        parts = [self._parts[first_row] for first_row in sorted(self._parts)]
        self._parts.clear()
        nothing = pa.schema([self._own.field(name) for name in self._kept]).empty_table()
        return self._make(pa.concat_tables(parts) if parts else nothing)

    def abort(self) -> None:
        self._parts.clear()


def beside(rows: pa.Table | None, kept: list[str], columns: pa.Table) -> pa.Table:
    """Return the ``kept`` columns of ``rows`` with the predicted ones, these in memory of their own."""
    if kept and rows is None:
        raise InferError("rows that are read only once must be put together with their predictions")
    own = rows.select(kept) if kept and rows is not None else None
    metadata = None if own is None else own.schema.metadata
    fields = [*([] if own is None else own.schema), *columns.schema]
    arrays = [*([] if own is None else own.columns), *map(_owned, columns.columns)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def _owned(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([owned(array) for array in column.chunks], type=column.type)


# ── what there is ────────────────────────────────────────────────────────────────────────────────


def of_reader(reader: Any) -> StreamSource:
    """Return a source of a RecordBatchReader: the result is a Table, for a reader is read only once."""
    return StreamSource("arrow", reader.schema, lambda: reader, lambda table: table)


def of_dataset(dataset: Any) -> StreamSource:
    """Return a source of a Dataset of any format: the result is a Table, in the Dataset's order."""
    return StreamSource("arrow", dataset.schema, lambda: _scanned(dataset), lambda table: table)


def _scanned(dataset: Any) -> Iterator[Any]:
    """Yield all batches, of Parquet one row group after another.

    While nobody takes what it has read, Arrow reads on until there is nothing left, or a gigabyte in
    memory. So it is given little at a time: a row group, or a file of what has none; only data with a
    filter can be given as a whole alone.
    """
    try:
        fragments = list(dataset.get_fragments())
    except ValueError:  # there is a filter
        yield from dataset.to_batches(**_READING)
        return
    for fragment in fragments:
        has_groups = hasattr(fragment, "split_by_row_group")
        for part in fragment.split_by_row_group() if has_groups else [fragment]:
            yield from part.to_batches(schema=dataset.schema, **_READING)


def of_lazy_frame(frame: pl.LazyFrame) -> StreamSource:
    """Return a source of a LazyFrame: the result is a LazyFrame over what was read and predicted."""
    import polars as pl

    schema = polars_schema(pl.DataFrame(schema=frame.collect_schema()))

    def make(table: pa.Table) -> Any:
        return arrow_as_polars(table).lazy()

    return StreamSource("polars", schema, lambda: map(polars_as_arrow, _collected(frame)), make)


def _collected(frame: pl.LazyFrame) -> Iterable[pl.DataFrame]:
    """Return the rows in order, in batches where this Polars can."""
    collect_batches: Any = getattr(frame, "collect_batches", None)
    if collect_batches is None:
        return [frame.collect()]
    batches: Iterable[pl.DataFrame] = collect_batches(maintain_order=True)
    return batches
