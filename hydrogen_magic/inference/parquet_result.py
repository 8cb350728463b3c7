"""Predictions with their rows in new Parquet files: complete at the end, or not there at all.

    data/rows.parquet                          the data
    data/.rows-inferred.parquet-1f3a….part     the result while it is written
    data/rows-inferred.parquet                 its final name; -2, -3, … if that exists

The result for a folder is a folder with the same files.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hydrogen_magic.core import run_log
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.arrow_types import size_bytes
from hydrogen_magic.node.prediction.chunking import side_by_side
from hydrogen_magic.node.prediction.schema_unify import MisfitError, fit_table

_GROUP_BYTES = 32 << 20
"""Size in memory of the rows of one row group."""
_GROUP_ROWS = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class ResultFile:
    """A file of a result."""

    name: Path
    """Below the target."""
    n_rows: int
    metadata: Callable[[], Mapping[Any, Any] | None] = lambda: None
    """Returns that of its schema, such as the index of pandas."""


@dataclass(frozen=True)
class Layout:
    """The files of a result."""

    target: Path
    """The file, or the folder of all files."""
    is_single: bool
    files: tuple[ResultFile, ...]
    is_chosen: bool
    """Whether the user has chosen the target; then another name is not possible."""

    def check(self) -> None:
        """Raise InferError if the result cannot be written there."""
        target, folder = self.target, self.target.parent
        if self.is_chosen and self.is_single and target.is_dir():
            raise InferError(
                f"{target} is a folder, but the result of a file is a file: choose a path such as"
                f" {target / self.files[0].name}"
            )
        if self.is_chosen and os.path.lexists(target):
            raise InferError(
                f"{target} already exists and is not overwritten: remove it, or choose another path"
            )
        if not folder.is_dir():
            raise InferError(
                f"there is no folder {folder} for the result: create it, or choose another path with"
                " --out"
            )
        if not os.access(folder, os.W_OK):
            raise InferError(f"{folder} is not writable: choose another path with --out")


class ParquetResult:
    """See :class:`hydrogen_magic.inference.sources.FrameResult`.

    Rows are written in order; chunks that arrive early wait in memory for those before them.

    Args:
        layout: The files to write.
        own: Columns of the data that the files have.
        order: Returns the columns of the files from the names of the predicted ones.
        present: Makes the value of the run from the path of the result.
    """

    is_bounded = True

    def __init__(
        self,
        layout: Layout,
        own: pa.Schema,
        order: Callable[[Sequence[str]], list[str]],
        present: Callable[[Path], str | Path],
    ) -> None:
        layout.check()
        self._layout = layout
        self._own = own
        self._order = order
        self._present = present
        self._waiting: dict[int, pa.Table] = {}
        self.waiting_bytes = 0
        self._next_row = 0
        self._files: _UnfinishedFiles | None = None
        self._schema = own

    @property
    def target(self) -> Path:
        """Path of the result."""
        return self._layout.target

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, schema: pa.Schema) -> None:
        fields = {field.name: field for field in (*self._own, *schema)}
        ordered = [fields[name] for name in self._order(schema.names)]
        whole = pa.schema(ordered)
        _check_types(whole)
        waiting = {row: fit_table(table, whole) for row, table in self._waiting.items()}
        if self._files is None:
            self._files = _UnfinishedFiles(self._layout, whole)
        else:
            self._files.widen(whole)
        self._schema, self._waiting = whole, waiting
        self.waiting_bytes = sum(map(size_bytes, waiting.values()))

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table) -> None:
        table = fit_table(side_by_side(rows.select(self._own.names), columns), self._schema)
        self._waiting[first_row] = table
        self.waiting_bytes += size_bytes(table)
        while self._files is not None and self._next_row in self._waiting:
            table = self._waiting.pop(self._next_row)
            self.waiting_bytes -= size_bytes(table)
            self._next_row += table.num_rows
            self._files.write(table)
            if not table.num_rows:
                return

    def finish(self) -> str | Path:
        if self._files is None:
            self.begin(pa.schema([]))
        assert self._files is not None
        n_rows = sum(file.n_rows for file in self._layout.files)
        if self._waiting or self._next_row != n_rows:
            self.abort()
            last_row = min(self._waiting, default=n_rows) - 1
            raise InferError(f"the predictions for rows {self._next_row} to {last_row} are missing")
        return self._present(self._files.commit())

    @property
    def done(self) -> list[tuple[int, int]]:
        early = ((row, row + table.num_rows) for row, table in sorted(self._waiting.items()))
        return [*([(0, self._next_row)] if self._next_row else []), *early]

    def finished(self) -> str | Path:
        """Return the path of the finished rows, which is not the one of a complete result."""
        assert self._files is not None
        for first_row, table in sorted(self._waiting.items()):
            self._files.skip(first_row - self._next_row)
            self._files.write(table)
            self._next_row = first_row + table.num_rows
        self._waiting.clear()
        self._files.skip(sum(file.n_rows for file in self._layout.files) - self._next_row)
        return self._present(self._files.commit(is_partial=True))

    def abort(self) -> None:
        self._waiting.clear()
        if self._files is not None:
            self._files.discard()


class _UnfinishedFiles:
    """The files under a temporary name that readers of Parquet ignore, written one after another."""

    def __init__(self, layout: Layout, schema: pa.Schema) -> None:
        self._layout = layout
        self._schema = schema
        target = layout.target
        _remove_abandoned(target)
        self._part = target.with_name(f"{_part_name(target)}-{secrets.token_hex(4)}.part")
        # Also if the kernel ends during the run.
        self._remove = weakref.finalize(self, _remove, self._part, os.getpid())
        self._next_files = deque(layout.files)
        self._writer: Any = None
        self._n_missing = 0
        """Rows that the open file still gets."""
        self._group = schema.empty_table()
        """Rows of the next row group."""
        self._written: list[Path] = []
        if not layout.is_single:
            self._part.mkdir()

    def widen(self, schema: pa.Schema) -> None:
        """Set wider types of columns, also for the rows that are already written.

        Raises MisfitError if some do not fit; the files are unchanged then.
        """
        group = fit_table(self._group, schema)
        try:
            self._close_writer()
            try:
                self._check_written(schema)
            except MisfitError:
                self._writer = self._rewritten(self._written[-1])
                raise
            self._group, self._schema = group, schema
            for path in self._written:
                self._close_writer()
                self._writer = self._rewritten(path)
        except OSError as error:
            raise self._failed(error) from None

    def _check_written(self, schema: pa.Schema) -> None:
        """Raise MisfitError if rows of closed files do not fit ``schema``."""
        changed = pa.schema([field for field in schema if field != self._schema.field(field.name)])
        for path in self._written:
            with pq.ParquetFile(path) as file:
                for number in range(file.num_row_groups):
                    fit_table(file.read_row_group(number, columns=changed.names), changed)

    def _rewritten(self, path: Path) -> Any:
        """Write a file again with the present types; return its writer."""
        old = path.with_name(f"{path.name}.old")
        path.rename(old)
        try:
            with pq.ParquetFile(old) as file:
                writer = pq.ParquetWriter(
                    path, self._schema.with_metadata(file.schema_arrow.metadata)
                )
                for number in range(file.num_row_groups):
                    group = file.read_row_group(number)
                    writer.write_table(fit_table(group, self._schema), group.num_rows)
        finally:
            old.unlink()
        return writer

    def skip(self, n_rows: int) -> None:
        """Leave out the next rows of the data; stop after its last row."""
        while n_rows:
            self._open_next()
            if self._n_missing == 0:
                return
            n_left_out = min(n_rows, self._n_missing)
            self._n_missing -= n_left_out
            n_rows -= n_left_out

    def write(self, table: pa.Table) -> None:
        try:
            self._write(table)
        except OSError as error:
            raise self._failed(error) from None

    def _write(self, table: pa.Table) -> None:
        while table.num_rows:
            self._open_next()
            if self._n_missing == 0:
                self.discard()
                raise InferError(
                    "the data has more rows than at the start: it was changed during the run; run"
                    " %%infer again"
                )
            rows = table.slice(0, self._n_missing)
            table = table.slice(rows.num_rows)
            self._n_missing -= rows.num_rows
            self._group = pa.concat_tables([self._group, rows])
            if size_bytes(self._group) >= _GROUP_BYTES or self._group.num_rows >= _GROUP_ROWS:
                self._write_group()

    def _open_next(self) -> None:
        """Open the next file that gets rows, and write those before it that get none."""
        while self._n_missing == 0 and self._next_files:
            self._close()
            file = self._next_files.popleft()
            self._n_missing = file.n_rows
            path = self._part if self._layout.is_single else self._part / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, self._schema.with_metadata(file.metadata()))
            self._written.append(path)

    def _write_group(self) -> None:
        group, self._group = self._group, self._schema.empty_table()
        if group.num_rows:
            self._writer.write_table(group, row_group_size=group.num_rows)

    def _close(self) -> None:
        if self._writer is not None:
            self._write_group()
            self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def commit(self, *, is_partial: bool = False) -> Path:
        """Rename the files; return the path of the result, which is another one if it is partial."""
        try:
            self._open_next()
            self._close()
        except OSError as error:
            raise self._failed(error) from None
        first = target = self._layout.target
        if is_partial:
            first = target = first.with_name(f"{first.stem}-partial{first.suffix}")
        number = 1
        while not _renamed(self._part, target):
            if self._layout.is_chosen and not is_partial:
                self.discard()
                raise InferError(
                    f"{target} was created while %%infer ran; refusing to overwrite it"
                )
            number += 1
            target = first.with_name(f"{first.stem}-{number}{first.suffix}")
        self._remove.detach()
        return target

    def _failed(self, error: OSError) -> InferError:
        self.discard()
        return InferError(
            f"the result cannot be written to {self._layout.target}: {error}. Unfinished files were"
            " removed. Fix this, or choose another path with --out"
        )

    def discard(self) -> None:
        # On a full disk, the end of a file cannot be written either.
        with suppress(OSError, pa.ArrowException):
            self._close_writer()
        self._remove()


def _check_types(schema: pa.Schema) -> None:
    """Raise MisfitError for types that Parquet does not have."""
    if not is_writable(schema):
        unsupported = [field for field in schema if not is_writable(pa.schema([field]))]
        columns = ", ".join(f"{field.name!r} ({field.type})" for field in unsupported)
        text = (
            f"Parquet does not support the column {columns}: make it text with --on-error collect"
        )
        raise MisfitError(text, unsupported[0].name)


def is_writable(schema: pa.Schema) -> bool:
    """Return whether Parquet has all types of ``schema``."""
    try:
        with pq.ParquetWriter(pa.BufferOutputStream(), schema):
            return True
    except (pa.ArrowException, NotImplementedError):
        return False


def _renamed(part: Path, target: Path) -> bool:
    """Rename ``part``; return False if ``target`` exists, perhaps from another process."""
    if part.is_file():
        try:
            os.link(part, target)  # unlike a rename, it never replaces a file
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            part.unlink()
            return True
    if target.exists():
        return False
    os.rename(part, target)
    return True


def _part_name(target: Path, process: str = "") -> str:
    """Return the beginning of the names of unfinished files of a process, by default of this one."""
    machine, _, here = run_log.owner_of_this_process().partition(":")
    return f".{target.name}-{zlib.crc32(machine.encode()):08x}-{process or here.replace(':', '_')}"


def _remove_abandoned(target: Path) -> None:
    """Delete unfinished files of processes that have been killed."""
    machine = run_log.owner_of_this_process().partition(":")[0]
    for part in target.parent.glob(f"{_part_name(Path(glob.escape(target.name)), '*')}.part"):
        process = part.name.split("-")[-2].replace("_", ":")
        if not run_log.is_alive(f"{machine}:{process}"):
            _remove(part, os.getpid())


def _remove(part: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the kernel ends, but the run goes on
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
