"""Predictions beside their rows in new Parquet files: whole at the end, or not there at all.

    data/rows.parquet              what was read
    data/.rows-inferred.parquet-1f3a….part     what is being written
    data/rows-inferred.parquet     what it is renamed to; -2, -3, … where there is one already

A folder is answered with a folder, file by file with the same rows.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.memory_result import side_by_side

__all__ = ["Layout", "ParquetResult"]

_GROUP_BYTES = 32 << 20
"""Of rows in memory that become one row group."""
_GROUP_ROWS = 1 << 20
"""As other writers of Parquet have it."""


@dataclass(frozen=True)
class Layout:
    """Which files are to be written."""

    target: Path
    """The file, or the folder of all files."""
    is_single: bool
    files: tuple[tuple[Path, int], ...]
    """Name below the target and number of rows of each."""
    is_chosen: bool
    """Whether a person named the target: then it is that or nothing."""


class ParquetResult:
    """See :class:`hydrogen_magic.inference.sources.FrameResult`.

    Rows are written in their order, so chunks that come early wait in memory for those before them.
    """

    is_bounded = True

    def __init__(
        self,
        layout: Layout,
        own: pa.Schema,
        kept: list[str],
        from_folders: list[str],
        is_text: bool,
        is_absolute: bool,
    ) -> None:
        _refuse_target(layout)
        self._layout = layout
        self._own = own
        self._kept = kept
        self._from_folders = set(from_folders) if _names_folders(layout, from_folders) else set()
        self._is_text = is_text
        self._is_absolute = is_absolute
        self._waiting: dict[int, pa.Table] = {}
        self._next_row = 0
        self._files: _Files | None = None

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, schema: pa.Schema) -> None:
        self._files = _Files(self._layout, self._schema(schema))

    def _schema(self, predicted: pa.Schema) -> pa.Schema:
        """Return a file's columns; what its folder's name says is not among them."""
        own = [self._own.field(name) for name in self._kept if name not in self._from_folders]
        # What pandas wrote about an index holds only as long as its column is there.
        metadata = self._own.metadata if list(self._own.names) == self._kept else None
        return pa.schema([*own, *predicted], metadata=metadata)

    def put(self, first_row: int, columns: pa.Table, rows: pa.Table) -> None:
        in_file = [name for name in self._kept if name not in self._from_folders]
        self._waiting[first_row] = side_by_side(rows.select(in_file), columns)
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
            raise InferError(
                f"the predictions for rows {self._next_row} to"
                f" {min(self._waiting, default=n_rows) - 1} are missing"
            )
        path = self._files.commit()
        if not self._is_absolute and path.is_relative_to(Path.cwd()):
            path = path.relative_to(Path.cwd())
        return str(path) if self._is_text else path

    def abort(self) -> None:
        self._waiting.clear()
        if self._files is not None:
            self._files.discard()


def _names_folders(layout: Layout, from_folders: list[str]) -> bool:
    """Say whether the result's folders are named as those that were read."""
    folders = {part.partition("=")[0] for name, _ in layout.files for part in name.parent.parts}
    return set(from_folders) <= folders


def _refuse_target(layout: Layout) -> None:
    """Raise InferError where the result can be seen not to get its place."""
    target, folder = layout.target, layout.target.parent
    other = "name another place" if layout.is_chosen else "name another place with --out PATH"
    if layout.is_chosen and layout.is_single and target.is_dir():
        raise InferError(
            f"{target} is a folder, and the predictions for a file are one file: name that, as in"
            f" {target / layout.files[0][0]}"
        )
    if layout.is_chosen and os.path.lexists(target):
        raise InferError(
            f"{target} exists already and is not written over: remove it, or name another"
        )
    if not folder.is_dir():
        raise InferError(
            f"there is no folder {folder} to write the predictions to: make it, or {other}"
        )
    if not os.access(folder, os.W_OK):
        raise InferError(
            f"the predictions cannot be written to {target}: {folder} is not writable; {other}"
        )


# ── files ────────────────────────────────────────────────────────────────────────────────────────


class _Files:
    """The files that are being written, one after another, under a name that is no data to anybody."""

    def __init__(self, layout: Layout, schema: pa.Schema) -> None:
        self._layout = layout
        self._schema = schema
        target = layout.target
        self._part = target.with_name(f".{target.name}-{secrets.token_hex(8)}.part")
        # Also where the kernel ends with a run under way.
        self._remove = weakref.finalize(self, _remove, self._part, os.getpid())
        self._todo = deque(layout.files)
        self._writer: Any = None
        self._left = 0
        """Rows that the open file still gets."""
        self._group: list[pa.Table] = []
        self._group_bytes = self._group_rows = 0
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
            if self._left == 0:
                raise InferError(
                    "the Parquet data has more rows than when this run began: somebody wrote to it"
                    " meanwhile; run %%infer again"
                )
            rows = table.slice(0, self._left)
            table = table.slice(rows.num_rows)
            self._left -= rows.num_rows
            self._group.append(rows)
            self._group_rows += rows.num_rows
            self._group_bytes += rows.nbytes
            if self._group_bytes >= _GROUP_BYTES or self._group_rows >= _GROUP_ROWS:
                self._write_group()

    def _open_next(self) -> None:
        """Have a file open that still gets rows; those that get none are written too."""
        while self._left == 0 and self._todo:
            self._close()
            name, self._left = self._todo.popleft()
            path = self._part if self._layout.is_single else self._part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = _writer(path, self._schema)

    def _write_group(self) -> None:
        group = pa.concat_tables(self._group)
        self._group.clear()
        self._group_bytes = self._group_rows = 0
        self._writer.write_table(group, row_group_size=max(1, group.num_rows))

    def _close(self) -> None:
        if self._writer is not None:
            if self._group:
                self._write_group()
            self._writer.close()
            self._writer = None

    def commit(self) -> Path:
        """Give the files their name; return it."""
        try:
            self._open_next()
            self._close()
        except OSError as error:
            raise self._failed(error) from None
        target = self._layout.target
        number = 1
        while not _renamed(self._part, target):
            if self._layout.is_chosen:
                self.discard()
                raise InferError(f"{target} came to be meanwhile and is not written over")
            number += 1
            first = self._layout.target
            target = first.with_name(f"{first.stem}-{number}{first.suffix}")
        self._remove.detach()
        return target

    def _failed(self, error: OSError) -> InferError:
        self.discard()
        return InferError(
            f"the predictions cannot be written to {self._layout.target}: {error}; nothing of them is"
            " left there. Mend that, or name another place for them"
        )

    def discard(self) -> None:
        writer, self._writer = self._writer, None
        self._group.clear()
        # A full disk cannot take the end of a file either, which is to go anyway.
        with suppress(OSError, pa.ArrowException):
            if writer is not None:
                writer.close()
        self._remove()


def _writer(path: Path, schema: pa.Schema) -> Any:
    try:
        return pq.ParquetWriter(path, schema)
    except (pa.ArrowException, NotImplementedError) as error:
        refused = [field for field in schema if not _is_writable(field)]
        what = ", ".join(f"{field.name!r} ({field.type})" for field in refused)
        raise InferError(f"Parquet cannot hold the column {what}: {error}") from None


def _is_writable(field: pa.Field) -> bool:
    try:
        with pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])):
            return True
    except (pa.ArrowException, NotImplementedError):
        return False


def _renamed(part: Path, target: Path) -> bool:
    """Give ``part`` its name, False where something has it: another process may have been quicker."""
    if part.is_dir():
        if target.exists():
            return False
        os.rename(part, target)
        return True
    try:
        os.link(part, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if target.exists():  # the file system has no links: nothing better can be done
            return False
        os.rename(part, target)
        return True
    part.unlink()
    return True


def _remove(part: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork of the kernel ends: the run is not its own
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)
