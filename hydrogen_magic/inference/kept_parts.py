"""Keeps the predictions of an unfinished run on disk, so that ``--resume`` continues it.

Each answer of a rank is appended to one file by a thread, and described in a journal; the files are part of
the run's record, or next to the result for Parquet data. A run with the same fingerprint takes them over, and
uses each answer like one of its own ranks, after a comparison of its rows by their checksums.

    runs/<gang>/kept/journal    lines of JSON: the fingerprint, then one for each answer, and before it
                                the files that ranks have read in their set-up
                     answers    predicted columns, one Arrow IPC stream after another

For Parquet data ``kept`` is a link to ``.rows-inferred.parquet-<gang>.kept``, next to the result.
Predictions are kept as ranks send them, so a resumed run can have other ``--columns``, ranks or retries. It
may also set ``--schema`` or ``--on-error``, if the earlier run ended because of a type or a row that failed.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from hydrogen_magic.core import run_log
from hydrogen_magic.core.units import counted
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference.fingerprints import (
    FILES,
    JOURNAL,
    NOTHING_KEPT,
    SETTABLE,
    WRITTEN,
    earlier,
)
from hydrogen_magic.inference.row_checksums import checksum
from hydrogen_magic.node.agent.file_versions import modified_ns
from hydrogen_magic.node.prediction.row_labels import rows_text

_MAX_WAITING = 16
"""Answers that wait for the disk. If predictions come faster for long, some are not kept: a fast model is
not slowed down, and its rows are soon predicted again."""
_CLOSE_S = 20.0
"""How long a disk may take to write them at the end."""
_ANSWERS = "answers"

# ── answers ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class KeptAnswer:
    """The answer of a rank for some rows."""

    columns: pa.Table
    failures: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _JournalEntry:
    """A line of the journal."""

    row: int
    n_rows: int
    at: int
    """Where its columns begin in the file of answers."""
    n_bytes: int
    rows_checksum: int
    """Of the rows that were predicted."""
    columns_checksum: int
    """Of its columns in the file, which a crash of the machine may damage."""
    failures: list[dict[str, Any]]


class KeptParts:
    """The kept answers of one run. Not thread-safe.

    Args:
        prints: The run's :mod:`fingerprint <hydrogen_magic.inference.fingerprints>`.
        target: Path of a result of Parquet data.
        resume: Whether to look for an earlier run; raises the errors of :func:`fingerprints.earlier`.
        head: Returns the first rows of the frame, None if it can be read only once.
        until_used: Whether to keep the answers of a run that succeeds until :meth:`delete` is called.
    """

    def __init__(
        self,
        prints: Mapping[str, str],
        target: Path | None = None,
        *,
        resume: bool = False,
        head: Callable[[], Any] = lambda: None,
        until_used: bool = False,
    ) -> None:
        self.prints = prints
        self.until_used = until_used
        self._resume = resume
        is_of_frame = partial(_is_of_frame, cache(head))
        self._begun = earlier(prints, is_of_frame, SETTABLE) if resume else None
        self._target = target
        self._folder: Path | None = None
        """None if nothing is kept."""
        self._files: dict[str, int] = {}
        """Files that the ranks have read in their set-up, with their modification times in ns."""
        self._new_files: dict[str, int] = {}
        """Those that are not in the journal yet."""
        self._entries: dict[int, _JournalEntry] = {}
        self._starts: list[int] = []
        """First rows of the earlier run's answers, sorted."""
        self._end = 0
        self._journal: BinaryIO | None = None
        self._answers: BinaryIO | None = None
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._problem: OSError | None = None
        """Why answers cannot be written any more."""
        self._is_needed = True
        """Whether further answers are written."""
        self._has_succeeded = False

    @property
    def n_rows(self) -> int:
        """Rows whose answers are kept."""
        return sum(entry.n_rows for entry in self._entries.values())

    def open(self, run: Path) -> None:
        """Keep answers in the record of a run, and take over those of the earlier one.

        Raises OSError; the earlier run has its answers then.
        """
        if run.parent != run_log.runs_dir():
            return  # this run has no record
        folder = run_log.kept_dir(run.name)
        if self._begun is not None:
            run_log.kept_dir(self._begun).rename(folder)
            try:
                self._load(folder)
            except BaseException:
                self._close_files()
                folder.rename(run_log.kept_dir(self._begun))
                raise
            run_log.mark_seen(self._begun)
        self._folder = folder

    def _load(self, folder: Path) -> None:
        journal = folder / JOURNAL
        data = journal.read_bytes()
        first, *lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        prints = {**json.loads(first)["fingerprint"], **self.prints}  # some options may be new
        new = journal.with_suffix(".new")
        new.write_bytes(_line({"fingerprint": prints}) + b"".join(lines))
        new.replace(journal)
        self._open_files(folder)
        assert self._answers is not None
        n_bytes = os.fstat(self._answers.fileno()).st_size
        for entry in _entries(lines):
            if entry.at + entry.n_bytes <= n_bytes:
                self._entries[entry.row] = entry  # the last one of these rows counts
                self._end = max(self._end, entry.at + entry.n_bytes)
        self._answers.truncate(self._end)
        self._starts = sorted(self._entries)

    def next_row(self, row: int) -> int | None:
        """Return the first row at or after ``row`` with an answer of the earlier run."""
        place = bisect_left(self._starts, row)
        return self._starts[place] if place < len(self._starts) else None

    def length(self, row: int) -> int:
        """Return the number of rows of the answer that begins with ``row``."""
        return self._entries[row].n_rows

    def read(self, row: int, rows: Any) -> KeptAnswer | None:
        """Return the answer for ``rows``, of which ``row`` is the first; None if the file is damaged.

        Raises InferError if these rows are not those that were predicted.
        """
        entry = self._entries[row]
        assert self._answers is not None
        _check_same(entry, rows)
        data = os.pread(self._answers.fileno(), entry.n_bytes, entry.at)
        if zlib.crc32(data) != entry.columns_checksum:
            return None
        return KeptAnswer(pa.ipc.open_stream(data).read_all(), entry.failures)

    def note_files(self, read: Iterable[str], written: Iterable[str]) -> None:
        """Note what a rank has read in its set-up, before its answers, and what of that the run writes.

        A file that does not exist any more was a temporary one.
        """
        found = {file: modified_ns(file) for file in read if file not in self._files}
        new = {file: time_ns for file, time_ns in found.items() if time_ns}
        new |= dict.fromkeys(written, WRITTEN)
        self._files.update(new)
        self._new_files.update(new)

    def add(self, row: int, rows: Any, data: Any, failures: Sequence[Mapping[str, Any]]) -> None:
        """Keep the answer for ``rows``: ``data`` is an IPC stream.

        Raises OSError if an earlier answer could not be written.
        """
        if self._folder is None or not self._is_needed:
            return
        if self._problem is not None:
            raise self._problem
        if self._thread is None:
            if self._journal is None:
                self._create(self._folder)
            name = "hydrogen_magic kept parts"
            self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)
            self._thread.start()
        with suppress(queue.Full):
            self._waiting.put_nowait(
                partial(self._write, row, rows, data, failures, self._new_files)
            )
            self._new_files = {}

    def _write_all(self) -> None:
        """The thread."""
        for write in iter(self._waiting.get, None):
            if self._is_needed and self._problem is None:
                try:
                    write()
                except Exception as error:  # whatever it is, the run goes on
                    self._problem = OSError(f"{type(error).__name__}: {error}")

    def _write(
        self,
        row: int,
        rows: Any,
        data: Any,
        failures: Sequence[Mapping[str, Any]],
        files: Mapping[str, int],
    ) -> None:
        texts = [dict(each) for each in failures]
        checksums = checksum(rows), zlib.crc32(data)
        entry = _JournalEntry(row, rows.num_rows, self._end, len(data), *checksums, texts)
        if files:
            _append(self._journal, _line({FILES: files}))
        _append(self._answers, data)
        _append(self._journal, _line(asdict(entry)))
        self._end += entry.n_bytes
        self._entries[entry.row] = entry

    def _create(self, folder: Path) -> None:
        if self._target is None:
            folder.mkdir(mode=0o700)
        else:
            beside = self._target.with_name(f".{self._target.name}-{folder.parent.name}.kept")
            beside.mkdir(mode=0o700)
            folder.symlink_to(beside, target_is_directory=True)
        self._open_files(folder)
        _append(self._journal, _line({"fingerprint": self.prints}))

    def _open_files(self, folder: Path) -> None:
        self._answers = (folder / _ANSWERS).open("a+b", buffering=0)
        self._journal = (folder / JOURNAL).open("a+b", buffering=0)

    # ── the end ──

    def close(self) -> None:
        """Write what waits, and leave the answers to a later run."""
        if self._stop_writing():
            self._close_files()

    def _stop_writing(self) -> bool:
        """Write what waits; return False if the disk does not respond."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
        thread.join(_CLOSE_S)
        return not thread.is_alive()

    def _close_files(self) -> None:
        for file in (self._journal, self._answers):
            if file is not None:
                file.close()
        self._journal = self._answers = None

    def give_up(self) -> None:
        """Keep nothing more: the disk is full. Frees its space, except for an earlier run's answers."""
        self._is_needed = False
        self._stop_writing()
        if self._folder is not None and self._begun is None:
            self._close_files()
            run_log.delete_kept(self._folder.parent.name)
            self._folder = None

    def succeed(self) -> None:
        """The kernel has the result: delete the answers, or leave them until it is used."""
        if not self.until_used:
            self.delete()
            return
        self.close()
        self._has_succeeded = True
        if self._folder is not None and self._entries:
            with suppress(OSError):
                run_log.mark_unseen(self._folder.parent)

    def drop_result(self) -> None:
        """Delete the answers if nothing in this kernel can use the result any more."""
        if self._has_succeeded:
            self.delete()

    def delete(self) -> None:
        """Delete these answers: they are not needed. Those of other runs may be of another frame."""
        self._is_needed = False
        self.close()
        self._entries.clear()
        if self._folder is not None:
            run_log.delete_kept(self._folder.parent.name)
            run_log.mark_seen(self._folder.parent.name)

    def start_text(self) -> str:
        """Return what ``--resume`` has found; empty without it."""
        if not self._resume:
            return ""
        if self._begun is None:
            return NOTHING_KEPT
        if self._folder is None:
            return f"run {self._begun} keeps its finished rows; all rows are predicted again"
        return f"resumed run {self._begun}: {counted(self.n_rows, 'row')} finished before"

    def text(self) -> str:
        """Return a sentence about how to continue the run; empty if nothing is kept."""
        if self._folder is None or not self._entries:
            return ""
        rows = counted(self.n_rows, "finished row")
        return f"{rows} kept: run the cell with --resume to continue"


def _entries(lines: Iterable[bytes]) -> Iterator[_JournalEntry]:
    """Yield the answers in lines of a journal, without those that a crash of the machine has damaged."""
    for line in lines:
        with suppress(ValueError, TypeError):
            yield _JournalEntry(**json.loads(line))


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _append(file: BinaryIO | None, data: Any) -> None:
    """Write at once: nothing is in a buffer of this process if it is killed."""
    assert file is not None
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[file.write(rest) :]


# ── rows of the frame ────────────────────────────────────────────────────────────────────────────


def _is_of_frame(head: Callable[[], Any], gang: str) -> bool:
    """Return whether the first rows of a run are those of this frame; True if they cannot be compared."""
    lines = (run_log.kept_dir(gang) / JOURNAL).read_bytes().splitlines()
    entry = {entry.row: entry for entry in _entries(lines)}.get(0)
    rows = None if entry is None else head()
    if entry is None or rows is None or rows.num_rows < entry.n_rows:
        return True
    return checksum(rows.slice(0, entry.n_rows)) == entry.rows_checksum


def _check_same(entry: _JournalEntry, rows: Any) -> None:
    if checksum(rows) != entry.rows_checksum:
        where = rows_text(entry.row, entry.row + entry.n_rows - 1)
        raise InferError(
            f"--resume: the frame's values in {where} have changed since they were predicted: restore them "
            "to continue, or run the cell without --resume to start over"
        )
