"""Predictions with their rows in new Parquet files: complete at the end, or not there at all.

    data/rows.parquet                          the data
    data/.rows-inferred.parquet-1f3a….part     the result while it is written
    data/rows-inferred.parquet                 its final name; -2, -3, … if that exists

The result for a folder is a folder with the same files.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.chunking import side_by_side

__all__ = ["Layout", "ParquetResult"]

_GROUP_BYTES = 32 << 20
"""Size in memory of the rows of one row group."""
_GROUP_ROWS = 1 << 20
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Layout:
    """The files of a result."""

    target: Path
    """The file, or the folder of all files."""
    is_single: bool
    files: tuple[tuple[Path, int], ...]
    """Name below the target and number of rows of each."""
    is_chosen: bool
    """Whether the user has chosen the target; then another name is not possible."""

    def check(self) -> None:
        """Raise InferError if the result cannot be written there."""
        target, folder = self.target, self.target.parent
        if self.is_chosen and self.is_single and target.is_dir():
            raise InferError(
                f"{target} is a folder, but the result of a file is a file: choose a path such as"
                f" {target / self.files[0][0]}"
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
        present: Makes the value of the run from the path of the result.
    """

    is_bounded = True

    def __init__(
        self, layout: Layout, own: pa.Schema, present: Callable[[Path], str | Path]
    ) -> None:
        layout.check()
        self._layout = layout
        self._own = own
        self._present = present
        self._waiting: dict[int, pa.Table] = {}
        self._next_row = 0
        self._files: _UnfinishedFiles | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, schema: pa.Schema) -> None:
        together = pa.schema([*self._own, *schema], metadata=self._own.metadata)
        self._files = _UnfinishedFiles(self._layout, together)

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table) -> None:
        self._waiting[first_row] = side_by_side(rows.select(self._own.names), columns)
        while self._files is not None and self._next_row in self._waiting:
            table = self._waiting.pop(self._next_row)
            self._next_row += table.num_rows
            self._files.write(table)
            if not table.num_rows:
                return

    def finish(self) -> str | Path:
        if self._files is None:
            self.begin(pa.schema([]))
        assert self._files is not None
        n_rows = sum(n for _, n in self._layout.files)
        if self._waiting or self._next_row != n_rows:
            self.abort()
            last_row = min(self._waiting, default=n_rows) - 1
            raise InferError(f"the predictions for rows {self._next_row} to {last_row} are missing")
        return self._present(self._files.commit())

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
        self._part = target.with_name(f".{target.name}-{secrets.token_hex(8)}.part")
        # Also if the kernel ends during the run.
        self._remove = weakref.finalize(self, _remove, self._part, os.getpid())
        self._next_files = deque(layout.files)
        self._writer: Any = None
        self._n_missing = 0
        """Rows that the open file still gets."""
        self._group = schema.empty_table()
        """Rows of the next row group."""
        if not layout.is_single:
            self._part.mkdir()

    def write(self, table: pa.Table) -> None:
        try:
            self._write(table)
        except OSError as error:
            raise self._failed(error) from None

    def _write(self, table: pa.Table) -> None:
        while table.num_rows:
            self._open_next()
            if self._n_missing == 0:
                raise InferError(
                    "the Parquet data has more rows than at the start: it was changed during the run;"
                    " run %%infer again"
                )
            rows = table.slice(0, self._n_missing)
            table = table.slice(rows.num_rows)
            self._n_missing -= rows.num_rows
            self._group = pa.concat_tables([self._group, rows])
            if self._group.nbytes >= _GROUP_BYTES or self._group.num_rows >= _GROUP_ROWS:
                self._write_group()

    def _open_next(self) -> None:
        """Open the next file that gets rows, and write those before it that get none."""
        while self._n_missing == 0 and self._next_files:
            self._close()
            name, self._n_missing = self._next_files.popleft()
            path = self._part if self._layout.is_single else self._part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = _writer(path, self._schema)

    def _write_group(self) -> None:
        group, self._group = self._group, self._schema.empty_table()
        if group.num_rows:
            self._writer.write_table(group, row_group_size=group.num_rows)

    def _close(self) -> None:
        if self._writer is not None:
            self._write_group()
            self._writer.close()
            self._writer = None

    def commit(self) -> Path:
        """Rename the files; return the path of the result."""
        try:
            self._open_next()
            self._close()
        except OSError as error:
            raise self._failed(error) from None
        first = target = self._layout.target
        number = 1
        while not _renamed(self._part, target):
            if self._layout.is_chosen:
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
        writer, self._writer = self._writer, None
        # On a full disk, the end of a file cannot be written either.
        with suppress(OSError, pa.ArrowException):
            if writer is not None:
                writer.close()
        self._remove()


def _writer(path: Path, schema: pa.Schema) -> Any:
    try:
        return pq.ParquetWriter(path, schema)
    except (pa.ArrowException, NotImplementedError) as error:
        unsupported = [field for field in schema if not _is_writable(field)]
        columns = ", ".join(f"{field.name!r} ({field.type})" for field in unsupported)
        raise InferError(f"Parquet does not support the column {columns}: {error}") from None


def _is_writable(field: pa.Field) -> bool:
    try:
        with pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])):
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


def _remove(part: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the kernel ends, but the run goes on
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
