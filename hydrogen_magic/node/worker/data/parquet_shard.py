"""The rows of Parquet data that a rank reads: row groups, or parts of them.

All ranks number the rows alike: row groups in the order of their files, or in a random order of one
seed. A rank reads only the row groups with rows of its share. Ranks that share a row group get rows of all
parts of it when they shuffle: the labels of a sorted table are not split among the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hydrogen_magic.node import data_files
from hydrogen_magic.node.worker.data.batch_kinds import picked
from hydrogen_magic.node.worker.data.index_share import IndexShare

_POOL_ROWS = 1 << 16
_POOL_GROUPS = 8
"""A shuffled stream mixes at least so many rows of at least so many row groups at a time, …"""
_POOL_BYTES = 128 << 20
"""… unless they are larger than this together: a pool is in memory twice while it is mixed."""


def open_dataset(source: Any) -> Any:
    """Return the PyArrow Dataset of Parquet files at a path; ``source`` may be a Dataset already.

    Columns from directory names (``year=2026``) are included. The footers of all files are read. Raises the
    errors of :func:`~hydrogen_magic.node.data_files.find`, and ValueError for files that are not Parquet or
    have different columns.
    """
    import pyarrow as pa
    import pyarrow.dataset as ds

    if isinstance(source, ds.Dataset):
        if not isinstance(getattr(source, "format", None), ds.ParquetFileFormat):
            raise TypeError(
                "hm.shard() takes a PyArrow Dataset of Parquet files only: pass its to_table()"
            )
        return source
    found = data_files.find(source)
    try:
        dataset = ds.dataset(
            [str(file) for file in found.files],
            format=data_files.parquet_format(),
            filesystem=found.filesystem,
            partitioning="hive",
            partition_base_dir=None if found.is_single else str(found.root),
        )
        fragments = list(dataset.get_fragments())
        schemas = {fragment.path: fragment.physical_schema for fragment in fragments}
    except pa.ArrowInvalid as error:
        if "duplicate field" in str(error):
            raise ValueError(
                f"{source} has more than one column of a name ({error}): rename one where it is written"
            ) from None
        raise ValueError(
            f"{source} cannot be read as Parquet data ({error}); read other formats into a frame in the "
            "notebook, and pass hm.shard() the handle of hm.dataset(frame), as in "
            "rows = hm.dataset(pd.read_csv('rows.csv'))"
        ) from None
    except pa.ArrowTypeError as error:
        raise ValueError(
            f"{source} has a column both in its files and in the names of its folders, with other types "
            f"({error}): pass pyarrow.dataset.dataset({str(found.root)!r}, format='parquet'), which has the "
            "columns of the files alone"
        ) from None
    # A Dataset by itself has the columns and types of its first file.
    common = None
    for path, schema in schemas.items():
        common = data_files.unified(common, schema, path)
    schema = data_files.with_folders(common, dataset.schema)
    return ds.FileSystemDataset(fragments, schema, dataset.format, dataset.filesystem)


def table(dataset: Any, share: IndexShare, seed: int | None) -> Any:
    """Return the share as a ``pyarrow.Table``; with a seed, its rows are in random order."""
    name = None if seed is None else str(seed)
    groups = RowGroups.of(dataset, name)
    pieces = groups.pieces(*share.bounds(groups.n_rows))
    rows = groups.read(pieces)
    return in_file_order(rows, pieces) if name is None else picked(rows, mixed(pieces, name))


# ── row groups ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RowGroup:
    fragment: Any
    """The file, of a PyArrow Dataset."""
    file: int
    number: int
    """In its file."""
    n_rows: int
    n_bytes: int
    """Uncompressed."""


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one row group: in its file, or in a random order of the group's rows."""

    group: RowGroup
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"{self.group.file} {self.group.number} {self.start}"


@dataclass(frozen=True)
class RowGroups:
    """All row groups, in the order in which ranks number the rows."""

    schema: Any
    groups: tuple[RowGroup, ...]

    @classmethod
    def of(cls, dataset: Any, seed: str | None) -> RowGroups:
        """Read the footers of all files. With a seed, the row groups are in random order."""
        fragments = sorted(_fragments(dataset), key=lambda fragment: fragment.path)
        groups = [
            # Not numbered here: a fragment may be a subset of the groups of its file.
            RowGroup(fragment, file, group.id, group.num_rows, group.total_byte_size)
            for file, fragment in enumerate(fragments)
            for group in fragment.row_groups
            if group.num_rows
        ]
        if seed is not None:
            random.Random(seed).shuffle(groups)
        return cls(dataset.schema, tuple(groups))

    @property
    def n_rows(self) -> int:
        return sum(group.n_rows for group in self.groups)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the rows from ``start`` to ``stop``: whole row groups except for the first and the last."""
        found, before = [], 0
        for group in self.groups:
            first, end = max(start - before, 0), min(stop - before, group.n_rows)
            if first < end:
                found.append(Piece(group, first, end))
            before += group.n_rows
        return found

    def read(self, pieces: Sequence[Piece]) -> Any:
        """Return the row groups of the pieces as a table, with the rows that belong to other pieces."""
        import pyarrow as pa

        # PyArrow reads row groups of a file in their order there, so only neighbours are read together.
        runs = groupby(
            enumerate(pieces), key=lambda each: (each[1].group.file, each[1].group.number - each[0])
        )
        tables = [self._table([piece.group for _, piece in run]) for _, run in runs]
        return pa.concat_tables(tables) if tables else self.schema.empty_table()

    def _table(self, groups: list[RowGroup]) -> Any:
        """Return the rows of row groups of one file."""
        import pyarrow as pa

        numbers, fragment = [group.number for group in groups], groups[0].fragment
        try:
            return fragment.subset(row_group_ids=numbers).to_table(schema=self.schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            data_files.check_types(fragment.path, fragment.physical_schema, self.schema, error)
            raise


def _fragments(dataset: Any) -> Iterator[Any]:
    try:
        yield from dataset.get_fragments()
    except ValueError as error:  # it is filtered or projected
        raise ValueError(
            f"hm.shard() reads a PyArrow Dataset in parts, which this one does not have ({error}): pass its "
            "to_table(), or the Dataset without the filter, and filter the batches"
        ) from None


# ── their rows ───────────────────────────────────────────────────────────────────────────────────


def in_file_order(rows: Any, pieces: Sequence[Piece]) -> Any:
    """Return the rows of consecutive pieces, of the table that :meth:`RowGroups.read` returned for them."""
    return rows.slice(pieces[0].start if pieces else 0, sum(piece.n_rows for piece in pieces))


def mixed(pieces: Sequence[Piece], seed: str) -> Any:
    """Return the numbers of the pieces' rows in that table in a random order, as an array."""
    import numpy as np

    found, before = [np.arange(0)], 0
    for piece in pieces:
        found.append(before + _in_group(piece, seed))
        before += piece.group.n_rows
    numbers = np.concatenate(found)
    return numbers[_random_order(len(numbers), f"{seed} {pieces[0].name if pieces else ''}")]


def _in_group(piece: Piece, seed: str) -> Any:
    """Return the numbers of a piece's rows in its group; all ranks cut the same random order into pieces."""
    import numpy as np

    n_rows, name = piece.group.n_rows, f"{piece.group.file} {piece.group.number}"
    is_whole = piece.n_rows == n_rows
    order = np.arange(n_rows) if is_whole else _random_order(n_rows, f"{seed} {name}")
    return order[piece.start : piece.stop]


def _random_order(n_rows: int, seed: str) -> Any:
    import numpy as np

    return np.random.default_rng(random.Random(seed).getrandbits(128)).permutation(n_rows)


def pools(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces that a shuffled stream mixes at a time."""
    pool: list[Piece] = []
    n_rows = n_bytes = 0
    for piece in pieces:
        pool.append(piece)
        n_rows += piece.n_rows
        n_bytes += piece.group.n_bytes
        is_mixed = len(pool) >= _POOL_GROUPS and n_rows >= _POOL_ROWS
        if is_mixed or n_bytes >= _POOL_BYTES:
            yield pool
            pool, n_rows, n_bytes = [], 0, 0
    if pool:
        yield pool
