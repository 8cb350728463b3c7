"""Parquet, CSV or JSON Lines data as a source of chunks: files of a path, a URL, a glob or a list of these.

The result is Parquet data, since the other formats have no types. Files are read one after another,
sorted by path, a few batches at a time, so the data may be larger than memory. The names of Hive folders
(``country=de/``) are columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import csv, json
from pyarrow.fs import LocalFileSystem

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import pandas_metadata
from hydrogen_magic.inference.parquet_result import Layout, ParquetResult, ResultFile
from hydrogen_magic.node import data_files
from hydrogen_magic.node.data_files import AnyPath, DataFiles
from hydrogen_magic.node.prediction import chunking
from hydrogen_magic.node.prediction.column_names import refuse_repeated

if TYPE_CHECKING:
    from hydrogen_magic.node.prediction.options import InferOptions

_FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
"""By the last of these endings of a name, as in ``rows.jsonl.1``; anything else is Parquet."""
_FORMAT_NAMES = {"csv": "CSV", "json": "JSON Lines", "parquet": "Parquet"}
_REMEDIES = {
    "csv": "correct them, or pass a frame of pandas.read_csv with types for its columns",
    "json": "correct them, or pass a frame of pandas.read_json(path, lines=True)",
    "parquet": "write it again",
}
"""For rows that cannot be read, or not with the types of the first ones."""
_COMPRESSED = {".gz", ".bz2", ".zst"}

_READ_ROWS = 1 << 14
_READ_BYTES = 1 << 16
"""Read buffer of each column, so that no row group has to be in memory as a whole."""
_READ_BYTES_OF_STORES = 8 << 20
"""Each read is a request there."""


class FileSource:
    """See :class:`hydrogen_magic.inference.sources.FrameSource`."""

    def __init__(self, path: AnyPath | Sequence[AnyPath], target: AnyPath | None = None) -> None:
        first = path if isinstance(path, (str, os.PathLike)) else next(iter(path), "")
        self._is_text = isinstance(first, str)
        self._is_relative = not os.path.isabs(os.path.expanduser(target or first))
        # Absolute paths: another cell may change the working directory meanwhile.
        self._found = _find(path)
        self._target = None if target is None else _absolute_target(target)
        self._is_list = first is not path
        dataset = _dataset(self._found)
        fragments = list(dataset.get_fragments())
        schema = _common_schema(dataset, fragments, _format_of(self._found.files[0]))
        self.attrs = pandas_metadata.attrs(schema)
        self._files = [_File.of(fragment, self._found.filesystem) for fragment in fragments]
        self.n_rows: int | None = sum(file.n_rows for file in self._files)
        self.schema = pandas_metadata.of_rows(schema, self.n_rows)

    def chunks(self, batch_size: int) -> Iterator[pa.Table]:
        tables = (table for file in self._files for table in file.tables(self.schema))
        return chunking.rebatched(tables, self.schema, chunking.ChunkSizer(batch_size))

    def result(self, options: InferOptions) -> ParquetResult:
        kept = options.kept(self.schema.names)
        in_files = {name for file in self._files for name in file.names}
        in_folders = {name for name in self.schema.names if name not in in_files}
        keeps_folders = in_folders <= set(kept)
        written = [name for name in kept if not keeps_folders or name not in in_folders]
        own = pa.schema([self.schema.field(name) for name in written])

        def order(predicted: Sequence[str]) -> list[str]:
            in_result = {*written, *predicted}
            return [n for n in options.order(self.schema.names, predicted) if n in in_result]

        return ParquetResult(self._layout(kept, keeps_folders), own, order, self._presented)

    def _layout(self, kept: list[str], keeps_folders: bool) -> Layout:
        """Return the files of the result: one for each file of the data, with as many rows."""
        found = self._found
        target = self._target or _default_target(found, is_list=self._is_list)
        if found.is_single:
            names = [Path(found.files[0].name)]
        else:
            names = [_parquet_name(file.relative_to(found.root)) for file in found.files]
            # Inside its folder, a file would get back a column that is not to be kept; and files that
            # differ in the ends of their names alone would get one name.
            if not keeps_folders or len(set(names)) < len(names):
                names = [Path(f"{n:05d}-{name.name}") for n, name in enumerate(names)]
        paths = [target] if found.is_single else [target / name for name in names]
        if any(found.contains(path) for path in paths):
            raise InferError(
                f"{target} is among the data {found.pattern_text}, so the next run would read it:"
                " choose another path with --out"
            )
        files = tuple(
            ResultFile(name, file.n_rows, partial(self._metadata, file, kept))
            for name, file in zip(names, self._files, strict=True)
        )
        return Layout(target, found.is_single, files, is_chosen=self._target is not None)

    def _metadata(self, file: _File, kept: list[str]) -> dict[bytes, bytes] | None:
        """Return that of the result of a file."""
        metadata = file.fragment.physical_schema.metadata
        return pandas_metadata.of_kept(self.schema.with_metadata(metadata), kept)

    def _presented(self, path: Path) -> str | Path:
        """Return the path of the result in the form of the path that was passed."""
        if self._is_relative and path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return str(path) if self._is_text else path


# ── finding files ────────────────────────────────────────────────────────────────────────────────


def _format_of(file: Path) -> str:
    return next((_FORMATS[end] for end in reversed(file.suffixes) if end in _FORMATS), "parquet")


def _parquet_name(file: Path) -> Path:
    """Return the name of the Parquet file with the rows of ``file``."""
    if _format_of(file) == "parquet":
        return file
    return (file.with_suffix("") if file.suffix in _COMPRESSED else file).with_suffix(".parquet")


def _find(path: AnyPath | Sequence[AnyPath]) -> DataFiles:
    try:
        return data_files.find(path)
    except (OSError, ImportError, ValueError, pa.ArrowException) as error:
        raise InferError(str(error)) from error


def _absolute_target(target: AnyPath) -> Path:
    if data_files.is_url(target):
        raise InferError(
            f"--out {target}: the result cannot be written to a URL: choose a path on this machine, and"
            " copy the result from there"
        )
    return data_files.absolute(target)


def _default_target(found: DataFiles, *, is_list: bool) -> Path:
    """Return the path of a result that got none: next to the data, never inside it."""
    if found.filesystem is not None or is_list:
        what = "a list of paths" if is_list else "data at a URL"
        raise InferError(
            f"the result of {what} has no default path: set one on this machine with --out PATH"
        )
    if found.is_single:
        file = found.files[0]
        file = _parquet_name(file)
        return file.with_name(f"{file.stem}-inferred{file.suffix}")
    root = found.root.resolve()
    if "=" in root.name:
        raise InferError(
            f"{root.name} is a partition of the data in {root.parent}, so a folder next to it would be"
            " read as another partition: choose a path with --out PATH"
        )
    return root.with_name(f"{root.name}-inferred")


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _File:
    fragment: Any
    """Of a PyArrow Dataset."""
    filesystem: Any
    """``pyarrow.fs.FileSystem``, None for this machine's own."""
    n_rows: int
    names: tuple[str, ...]
    """Columns in the file."""
    partition: Mapping[str, Any]
    """Columns from the names of its folders."""

    @staticmethod
    def of(fragment: Any, filesystem: Any) -> _File:
        partition = ds.get_partition_keys(fragment.partition_expression)
        names = tuple(fragment.physical_schema.names)
        with _named_in_errors(fragment.path):
            is_json = _format_of(Path(fragment.path)) == "json"
            n_rows = _n_json_rows(fragment, filesystem) if is_json else fragment.count_rows()
        return _File(fragment, filesystem, n_rows, names, partition)

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """Yield the rows in the common ``schema``."""
        with _named_in_errors(self.fragment.path):
            for batch in self._batches():
                own = dict(zip(batch.schema.names, batch.columns, strict=True))
                columns = [self._column(field, own, batch.num_rows) for field in schema]
                yield pa.Table.from_arrays(columns, schema=schema)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        path = self.fragment.path
        if _format_of(Path(path)) == "parquet":
            # A Dataset would decode whole row groups, and read ahead while its batches are not taken.
            n_bytes = _READ_BYTES if self.filesystem is None else _READ_BYTES_OF_STORES
            with pq.ParquetFile(
                path,
                pre_buffer=False,
                buffer_size=n_bytes,
                filesystem=self.filesystem,
                coerce_int96_timestamp_unit=data_files.INT96_UNIT,
            ) as file:
                found = tuple(file.schema_arrow.names), file.metadata.num_rows
                if found != (self.names, self.n_rows):
                    raise InferError(f"{path} was changed during the run: run the cell again")
                yield from file.iter_batches(_READ_ROWS)
            return
        yield from self.fragment.to_batches(batch_size=_READ_ROWS, batch_readahead=1)

    def _column(self, field: pa.Field, own: Mapping[str, pa.Array], n_rows: int) -> Any:
        column = own.get(field.name)
        if column is None:
            return pa.repeat(pa.scalar(self.partition.get(field.name), field.type), n_rows)
        return column if column.type == field.type else column.cast(field.type)


def _n_json_rows(fragment: Any, filesystem: Any) -> int:
    """Return the number of rows. Raises InferError if objects have keys that a Dataset would leave out.

    It knows those of the first block alone.
    """
    n_rows = 0
    only_these = json.ParseOptions(
        explicit_schema=fragment.physical_schema, unexpected_field_behavior="error"
    )
    with (filesystem or LocalFileSystem()).open_input_stream(fragment.path) as file:
        try:
            for batch in json.open_json(file, parse_options=only_these):
                n_rows += batch.num_rows
        except pa.ArrowInvalid as error:
            if "unexpected field" not in str(error):
                raise
            raise InferError(
                f"{fragment.path} has an object after row {n_rows:,} with a key that none in the first"
                " megabyte has: pass a frame of pandas.read_json(path, lines=True), which has the column"
            ) from None
    return n_rows


@contextmanager
def _named_in_errors(path: str) -> Iterator[None]:
    """Raise errors of Arrow with the file and what to do."""
    try:
        yield
    except pa.ArrowException as error:
        _refuse_long_row(path, error)
        remedy = _REMEDIES[_format_of(Path(path))]
        raise InferError(f"{path} has rows that cannot be read ({error}): {remedy}") from None


def _refuse_long_row(path: str, error: Exception) -> None:
    """Raise InferError if the error of Arrow is about a row that does not fit into two of its blocks."""
    if "straddling object" in str(error):
        raise InferError(
            f"{path} has a row of more than 1 MiB, which does not fit into the blocks that PyArrow reads of"
            " CSV and JSON Lines: pass a frame of pandas.read_csv(path) or pandas.read_json(path, lines=True)"
        ) from None


def _dataset(found: DataFiles) -> Any:
    is_partitioned = not found.is_single
    kind = _format_of(found.files[0])
    try:
        return ds.dataset(
            [str(file) for file in found.files],
            format=_dataset_format(kind),
            filesystem=found.filesystem,
            partitioning=ds.HivePartitioning.discover() if is_partitioned else None,
            partition_base_dir=str(found.root) if is_partitioned else None,
        )
    except (pa.ArrowException, OSError) as error:
        _refuse_long_row(str(found.files[0]), error)
        raise InferError(f"{found.root} cannot be read as {_FORMAT_NAMES[kind]}: {error}") from None


def _dataset_format(kind: str) -> Any:
    if kind == "csv":
        # Otherwise blocks are cut at line breaks inside quotes, too. Reading takes a tenth longer.
        return ds.CsvFileFormat(parse_options=csv.ParseOptions(newlines_in_values=True))
    return data_files.parquet_format() if kind == "parquet" else kind


def _common_schema(dataset: Any, fragments: list[Any], format_name: str) -> pa.Schema:
    """Return the columns of all files. Raises InferError if files differ."""
    common = None
    for fragment in fragments:
        try:
            schema = fragment.physical_schema
            names = schema.names
        except (pa.ArrowException, OSError) as error:
            _refuse_long_row(fragment.path, error)
            raise InferError(
                f"{fragment.path} is not a {_FORMAT_NAMES[format_name]} file ({error}): exclude it"
                " with a glob"
            ) from None
        except UnicodeDecodeError as error:
            raise InferError(
                f"{fragment.path} has names of columns that are not UTF-8 ({error}): pass a frame of"
                ' pandas.read_csv with its encoding, for example encoding="latin-1"'
            ) from None
        refuse_repeated(names, f"{fragment.path} has", "write it with unique names")
        try:
            common = data_files.unified(common, schema, fragment.path)
        except ValueError as error:
            raise InferError(str(error)) from None
    return data_files.with_folders(common, dataset.schema)
