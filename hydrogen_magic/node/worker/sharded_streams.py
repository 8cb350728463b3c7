"""A rank's share of streamed data: a torch IterableDataset, or rows of Parquet files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

# ── IterableDataset ──────────────────────────────────────────────────────────────────────────────


def every_nth(data: Any, rank: int, world_size: int, drop_last: bool) -> Any:
    """Return an IterableDataset that yields one item of every ``world_size`` items of ``data``.

    The shares have equal lengths although the total is unknown: an item is yielded after its whole round
    has been read. Items of an incomplete last round are repeated, or dropped with ``drop_last``. With fewer
    items than ranks, the last round is as short as the data.

    A worker of a DataLoader reads ``data`` as usual: datasets that split themselves among the workers
    (``get_worker_info``) still do so, and others are read once per worker.
    """
    return _class_of_streams()(data, rank, world_size, drop_last)


@functools.lru_cache(maxsize=1)
def _class_of_streams() -> Any:
    """Return the class of the result of :func:`every_nth`; its base class is only imported on use."""
    from torch.utils.data import IterableDataset

    class Shard(IterableDataset):  # type: ignore[misc]
        def __init__(self, data: Any, rank: int, world_size: int, drop_last: bool) -> None:
            self.dataset = data
            self._numbers = rank, world_size, drop_last

        def __iter__(self) -> Iterator[Any]:
            return _every_nth(iter(self.dataset), *self._numbers)

        def __len__(self) -> int:
            _, world_size, drop_last = self._numbers
            n_items = len(self.dataset)  # TypeError for an unknown length, as usual
            return n_items // world_size if drop_last else -(-n_items // world_size)

        def __reduce__(self) -> Any:  # for DataLoader workers started by spawn
            return every_nth, (self.dataset, *self._numbers)

    return Shard


def _every_nth(items: Iterator[Any], rank: int, world_size: int, drop_last: bool) -> Iterator[Any]:
    while round_ := list(islice(items, world_size)):
        if len(round_) == world_size or not drop_last:
            yield round_[rank % len(round_)]


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────


def parquet_rows(path: str, bounds: Callable[[int], tuple[int, int]]) -> Any:
    """Return the rows of a Parquet file or directory selected by ``bounds(number of rows)``.

    Files are ordered by path, as Spark names its parts; columns from directory names (``year=2026``) are
    included. Reads the footers of all files, but only row groups with selected rows. Returns a
    ``pyarrow.Table``. Raises FileNotFoundError, and pyarrow's errors for other files.
    """
    import pyarrow
    import pyarrow.dataset

    dataset = pyarrow.dataset.dataset(path, format="parquet", partitioning="hive")
    fragments = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
    counts = [[group.num_rows for group in fragment.row_groups] for fragment in fragments]
    start, stop = bounds(sum(map(sum, counts)))
    tables, skipped = [], None
    seen = 0
    for fragment, rows in zip(fragments, counts, strict=True):
        wanted, first = _groups_within(rows, seen, start, stop)
        if wanted:
            skipped = first if skipped is None else skipped
            tables.append(fragment.subset(row_group_ids=wanted).to_table(schema=dataset.schema))
        seen += sum(rows)
    if skipped is None:
        return dataset.schema.empty_table()
    return pyarrow.concat_tables(tables).slice(start - skipped, stop - start)


def _groups_within(
    rows: Sequence[int], before: int, start: int, stop: int
) -> tuple[list[int], int]:
    """Return which row groups of a file contain rows from ``start`` to ``stop``, and their first row.

    ``rows``: the number of rows of each group; ``before``: the number of rows in the files before.
    """
    wanted: list[int] = []
    first = 0
    for number, count in enumerate(rows):
        if before < stop and before + count > start and count:
            first = first if wanted else before
            wanted.append(number)
        before += count
    return wanted, first
