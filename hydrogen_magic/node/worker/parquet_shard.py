"""A rank's share of Parquet data: as a table, or as a stream of tables for a share larger than memory.

All ranks number the rows alike: row groups in the order of their files, or in a random order of one
seed. A rank reads only the row groups with rows of its share.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from hydrogen_magic.node import data_files

_POOL_ROWS = 1 << 16
"""Rows that a shuffled stream mixes, at least: whole row groups."""
Bounds = Callable[[int], tuple[int, int]]
"""Number of rows -> start and end of this rank's share."""


def open_dataset(source: Any) -> Any:
    """Return the PyArrow Dataset of Parquet files at a path; ``source`` may be a Dataset already.

    Columns from directory names (``year=2026``) are included. Raises the errors of
    :func:`~hydrogen_magic.node.data_files.find`, and PyArrow's for other files.
    """
    import pyarrow.dataset as ds

    if isinstance(source, ds.Dataset):
        if not isinstance(getattr(source, "format", None), ds.ParquetFileFormat):
            raise TypeError(
                "hm.shard() takes a PyArrow Dataset of Parquet files only: pass its to_table()"
            )
        return source
    found = data_files.find(source)
    return ds.dataset(
        [str(file) for file in found.files],
        format="parquet",
        filesystem=found.filesystem,
        partitioning="hive",
        partition_base_dir=None if found.is_single else str(found.root),
    )


def table(dataset: Any, bounds: Bounds, seed: int | None) -> Any:
    """Return the share as a ``pyarrow.Table``; with a seed, its rows are in random order."""
    groups = _RowGroups.of(dataset, None if seed is None else random.Random(seed))
    rows = groups.read(*bounds(groups.n_rows))
    return rows if seed is None else _shuffled(rows, random.Random(seed))


def stream(dataset: Any, bounds: Bounds, seed: int | None, batch_size: int) -> Any:
    """Return the share as an iterable of ``pyarrow.Table``; see ``hm.shard``."""
    if batch_size < 1:
        raise ValueError(f"hm.shard() needs a batch_size of at least 1, got {batch_size}")
    return _stream_class()(dataset, bounds, seed, batch_size)


# ── row groups ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _RowGroup:
    fragment: Any
    """The file, of a PyArrow Dataset."""
    file: int
    number: int
    """In its file."""
    n_rows: int


@dataclass(frozen=True)
class _RowGroups:
    """All row groups, in the order in which ranks number the rows."""

    schema: Any
    groups: tuple[_RowGroup, ...]

    @classmethod
    def of(cls, dataset: Any, order: random.Random | None) -> _RowGroups:
        """Read the footers of all files."""
        fragments = sorted(dataset.get_fragments(), key=lambda fragment: fragment.path)
        groups = [
            _RowGroup(fragment, file, number, group.num_rows)
            for file, fragment in enumerate(fragments)
            for number, group in enumerate(fragment.row_groups)
            if group.num_rows
        ]
        if order is not None:
            order.shuffle(groups)
        return cls(dataset.schema, tuple(groups))

    @property
    def n_rows(self) -> int:
        return sum(group.n_rows for group in self.groups)

    def read(self, start: int, stop: int) -> Any:
        import pyarrow as pa

        wanted, skipped = self._within(start, stop)
        # PyArrow reads row groups of a file in their order there, so only neighbours are read together.
        runs = groupby(enumerate(wanted), key=lambda each: (each[1].file, each[1].number - each[0]))
        tables = [self._table([group for _, group in run]) for _, run in runs]
        rows = pa.concat_tables(tables) if tables else self.schema.empty_table()
        return rows.slice(skipped, stop - start)

    def pieces(self, start: int, stop: int) -> Iterator[Any]:
        """Yield the rows, one row group at a time."""
        wanted, skipped = self._within(start, stop)
        left = stop - start
        for group in wanted:
            piece = self._table([group]).slice(skipped, left)
            skipped, left = 0, left - piece.num_rows
            yield piece

    def _within(self, start: int, stop: int) -> tuple[list[_RowGroup], int]:
        """Return the row groups with rows from ``start`` to ``stop``, and how many rows come before."""
        wanted: list[_RowGroup] = []
        before = skipped = 0
        for group in self.groups:
            if before < stop and before + group.n_rows > start:
                skipped = skipped if wanted else start - before
                wanted.append(group)
            before += group.n_rows
        return wanted, skipped

    def _table(self, groups: list[_RowGroup]) -> Any:
        """Return the rows of row groups of one file."""
        numbers = [group.number for group in groups]
        return groups[0].fragment.subset(row_group_ids=numbers).to_table(schema=self.schema)


# ── streams ──────────────────────────────────────────────────────────────────────────────────────


@functools.lru_cache(maxsize=1)
def _stream_class() -> Any:
    """Return the class of streams: of torch's, for a DataLoader, where torch is installed."""
    has_torch = find_spec("torch") is not None
    base: Any = import_module("torch.utils.data").IterableDataset if has_torch else object

    class ParquetStream(base):  # type: ignore[misc]
        def __init__(self, dataset: Any, bounds: Bounds, seed: int | None, size: int) -> None:
            self._given = dataset, bounds, seed, size
            self._epoch = 0
            start, stop = bounds(_RowGroups.of(dataset, None).n_rows)
            self.n_rows = stop - start

        def set_epoch(self, epoch: int) -> None:
            """Choose the random order of the next iteration; call it on all ranks alike."""
            self._epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            dataset, bounds, seed, size = self._given
            # A random number generator takes text: no two epochs have the same order by accident.
            order = None if seed is None else random.Random(f"{seed} {self._epoch}")
            groups = _RowGroups.of(dataset, order)
            pieces = groups.pieces(*_of_loader_worker(*bounds(groups.n_rows)))
            return _in_batches(pieces if order is None else _mixed(pieces, order), size)

        def __reduce__(self) -> Any:  # for DataLoader workers started by spawn
            return _restored, (self._given, self._epoch)

    return ParquetStream


def _restored(given: tuple[Any, ...], epoch: int) -> Any:
    found = stream(*given)
    found.set_epoch(epoch)
    return found


def _of_loader_worker(start: int, stop: int) -> tuple[int, int]:
    """Return the part of a DataLoader's worker, in one of which this may run."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    if worker is None:
        return start, stop
    n_rows, here, n_workers = stop - start, worker.id, worker.num_workers
    return start + n_rows * here // n_workers, start + n_rows * (here + 1) // n_workers


def _mixed(pieces: Iterator[Any], order: random.Random) -> Iterator[Any]:
    """Yield pools of row groups, the rows of each in random order."""
    import pyarrow as pa

    pool: list[Any] = []
    for piece in pieces:
        pool.append(piece)
        if sum(each.num_rows for each in pool) >= _POOL_ROWS:
            yield _shuffled(pa.concat_tables(pool), order)
            pool = []
    if pool:
        yield _shuffled(pa.concat_tables(pool), order)


def _shuffled(rows: Any, order: random.Random) -> Any:
    places = list(range(rows.num_rows))
    order.shuffle(places)
    return rows.take(places)


def _in_batches(pieces: Iterator[Any], size: int) -> Iterator[Any]:
    import pyarrow as pa

    rest: Any = None
    for piece in pieces:
        rows = piece if rest is None else pa.concat_tables([rest, piece])
        n_full = rows.num_rows // size * size
        yield from (rows.slice(first, size) for first in range(0, n_full, size))
        rest = rows.slice(n_full)
    if rest is not None and rest.num_rows:
        yield rest
