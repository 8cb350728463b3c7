"""Parquet data as a source of chunks: one file, all files of a folder, or those a glob finds.

Files are read one after another, sorted by their path, a few batches at a time: the data may be
larger than memory. What Hive's folders say (``country=de/``) is a column.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.parquet_result import Layout, ParquetResult
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.column_names import listed, refuse_repeated

if TYPE_CHECKING:
    from hydrogen_magic.node.prediction.options import InferOptions

__all__ = ["ParquetSource"]

_HIDDEN = (".", "_")
"""Beginnings of names that are no data to any reader of Parquet: ``_SUCCESS``, ``.part-0.crc``."""
_READ_ROWS = 1 << 14
"""Rows that are decoded at once."""
_READ_BYTES = 1 << 16
"""Of each column that are read at once, so that no row group has to be in memory as a whole."""
_MAGIC = frozenset("*?[")


class ParquetSource:
    """See :class:`hydrogen_magic.inference.sources.FrameSource`."""

    kind = "parquet"

    def __init__(
        self, path: str | os.PathLike[str], target: str | os.PathLike[str] | None = None
    ) -> None:
        self._given = path
        self._target_given = target
        # Absolute paths: another cell may change the folder while this one reads and writes.
        self._found = _find(os.fspath(path))
        self._target = None if target is None else _absolute(target)
        dataset = _dataset(self._found)
        fragments = list(dataset.get_fragments())
        self.schema = _common_schema(dataset, fragments)
        self._pieces = [_Piece.of(fragment) for fragment in fragments]
        self.n_rows: int | None = sum(piece.n_rows for piece in self._pieces)
        self.n_bytes: int | None = sum(file.stat().st_size for file in self._found.files)

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        tables = (table for piece in self._pieces for table in piece.tables(self.schema))
        return chunking.rebatched(tables, self.schema, chunking.ChunkSizer(batch_size))

    def result(self, options: InferOptions) -> ParquetResult:
        kept = options.kept(self.schema.names)
        in_files = {name for piece in self._pieces for name in piece.names}
        from_folders = [name for name in self.schema.names if name not in in_files]
        return ParquetResult(
            self._layout(set(from_folders) <= set(kept)),
            self.schema,
            kept,
            from_folders,
            type(self._given) is str,
            os.path.isabs(os.path.expanduser(self._target_given or self._given)),
        )

    def _layout(self, keeps_folders: bool) -> Layout:
        """Return which files the result has: one for each that was read, with as many rows."""
        found = self._found
        if found.is_single:
            names = [Path(found.files[0].name)]
        elif keeps_folders:
            names = [file.relative_to(found.root) for file in found.files]
        else:
            # In its folder, a file would get the column back that was not asked for.
            names = [Path(f"{n:05d}-{file.name}") for n, file in enumerate(found.files)]
        target = self._target or _target_beside(found)
        _refuse_among(target, [target] if found.is_single else [target / n for n in names], found)
        return Layout(
            target,
            found.is_single,
            tuple(zip(names, (piece.n_rows for piece in self._pieces), strict=True)),
            is_chosen=self._target is not None,
        )


# ── finding files ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Found:
    """The files of a path."""

    root: Path
    """The folder that all of them are in or below."""
    files: tuple[Path, ...]
    """Sorted by path."""
    is_single: bool
    """Whether the path was that of a file."""
    is_folder: bool = False
    """Whether it was that of a folder, all of which is data."""
    pattern: tuple[str, ...] = ()
    """Parts of the glob that it was, if it was one."""


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(os.fspath(path))))


def _find(path: str) -> _Found:
    if "://" in path:
        raise InferError(
            f"{path} is not on this machine: give pyarrow.dataset.dataset({path!r}), which is read"
            " as it comes"
        )
    absolute = _absolute(path)
    if absolute.is_file():
        return _Found(absolute.parent, (absolute,), is_single=True)
    if absolute.is_dir():
        files = [found for found in absolute.rglob("*") if found.is_file()]
        return replace(_all_of(path, absolute, files), is_folder=True)
    if not _MAGIC & set(path):
        raise InferError(f"there is no file or folder {path} (from {os.getcwd()})")
    fixed = Path(*_before_magic(absolute))
    matches = [Path(match) for match in glob.glob(str(absolute), recursive=True)]
    files = [
        file for match in matches for file in (match.rglob("*") if match.is_dir() else [match])
    ]
    found = _all_of(path, fixed, [file for file in set(files) if file.is_file()])
    return replace(found, pattern=absolute.parts)


def _before_magic(pattern: Path) -> list[str]:
    """Return the leading parts of a glob's pattern that are plain names."""
    parts: list[str] = []
    for part in pattern.parts:
        if _MAGIC & set(part):
            break
        parts.append(part)
    return parts


def _all_of(path: str, root: Path, files: list[Path]) -> _Found:
    visible = [
        file
        for file in files
        if not any(part.startswith(_HIDDEN) for part in file.relative_to(root).parts)
    ]
    if not visible:
        raise InferError(f"there are no Parquet files in {path} (from {os.getcwd()})")
    return _Found(root, tuple(sorted(visible)), is_single=False)


def _target_beside(found: _Found) -> Path:
    """Return where the result goes when nobody said: beside the data, never among it."""
    if found.is_single:
        file = found.files[0]
        return file.with_name(f"{file.stem}-inferred{file.suffix}")
    root = found.root.resolve()
    if "=" in root.name:
        raise InferError(
            f"{root.name} is one part of the data in {root.parent}, and a folder beside it would be"
            " another one: say where the result is to be with --out PATH"
        )
    return root.with_name(f"{root.name}-inferred")


def _refuse_among(target: Path, files: Sequence[Path], found: _Found) -> None:
    """Raise InferError for a place where the next reader of the data would take the result for rows.

    ``files``: what is to be written.
    """
    if found.is_folder and target.resolve().is_relative_to(found.root.resolve()):
        raise InferError(
            f"{target} lies in {found.root}, the folder of the data, where it would be read as rows"
            " the next time: name a place outside of it"
        )
    if found.pattern and any(_is_at_or_below(file.parts, found.pattern) for file in files):
        raise InferError(
            f"{target} is among {Path(*found.pattern)}, so it would be read as rows the next time: name"
            " a place that this does not match"
        )


def _is_at_or_below(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether a glob's pattern matches a path, or a folder that it is in."""
    if not pattern:
        return True
    if pattern[0] == "**":
        is_here = _is_at_or_below(parts, pattern[1:])
        return is_here or (bool(parts) and _is_at_or_below(parts[1:], pattern))
    is_match = bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0])
    return is_match and _is_at_or_below(parts[1:], pattern[1:])


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Piece:
    """One file of the data."""

    path: str
    n_rows: int
    names: tuple[str, ...]
    """Of the columns in the file."""
    folders: Mapping[str, Any]
    """What the names of its folders say: column -> value."""

    @staticmethod
    def of(fragment: Any) -> _Piece:
        folders = ds.get_partition_keys(fragment.partition_expression)
        names = tuple(fragment.physical_schema.names)
        return _Piece(fragment.path, fragment.metadata.num_rows, names, folders)

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """Yield the file's rows under the common ``schema``.

        Read when they are asked for: a Dataset reads on while nobody takes what it has read, until
        all of a file is in memory.
        """
        with pq.ParquetFile(self.path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            for batch in file.iter_batches(_READ_ROWS):
                yield pa.Table.from_arrays(
                    [self._column(field, batch) for field in schema], schema=schema
                )

    def _column(self, field: pa.Field, batch: pa.RecordBatch) -> Any:
        if field.name not in self.names:
            value = pa.scalar(self.folders.get(field.name), field.type)
            return pa.repeat(value, batch.num_rows)
        column = batch.column(field.name)
        return column if column.type == field.type else column.cast(field.type)


def _dataset(found: _Found) -> Any:
    hive = ds.HivePartitioning.discover()
    try:
        return ds.dataset(
            [str(file) for file in found.files],
            format="parquet",
            partitioning=None if found.is_single else hive,
            partition_base_dir=None if found.is_single else str(found.root),
        )
    except (pa.ArrowException, OSError) as error:
        raise InferError(f"the Parquet data cannot be read: {error}") from None


def _common_schema(dataset: Any, fragments: list[Any]) -> pa.Schema:
    """Return the columns that all files have. Raises InferError for files that differ."""
    common: Any = None
    for fragment in fragments:
        try:
            schema = fragment.physical_schema
        except (pa.ArrowException, OSError) as error:
            raise InferError(
                f"{fragment.path} is no Parquet file ({error}): leave it out, as with a glob"
            ) from None
        refuse_repeated(schema.names, f"{fragment.path} calls", "write it again with other names")
        common = schema if common is None else _with(common, schema, fragment.path)
    from_folders = [field for field in dataset.schema if field.name not in common.names]
    return pa.schema([*common, *from_folders], metadata=common.metadata)


def _with(common: pa.Schema, schema: pa.Schema, path: str) -> pa.Schema:
    different = set(common.names) ^ set(schema.names)
    if different:
        raise InferError(
            f"{path} differs from the files before it in {listed(sorted(different))}: all files"
            " must have the same columns; run %%infer on each kind, as with a glob"
        )
    try:
        return pa.unify_schemas([common, schema])
    except pa.ArrowException as error:
        raise InferError(
            f"{path} has a column of another type than the files before it ({error}): write the"
            " files with the same types, or run %%infer on each kind, as with a glob"
        ) from None
