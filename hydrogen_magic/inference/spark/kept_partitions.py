"""Finished partitions of an eager run, on a disk that the kernel and Spark's executors share.

    task ──► runs/<gang>/kept/rows/3.1000.….part ──► the result, read by Spark's tasks from links
                         ▲    earlier/                  in datasets/<id>/data
                         │    journal
                         └─ a task of the resumed run, after it has compared the rows of its partition

Each task writes its partition into the record of the run, under its final name when it is complete. So a
stop or a failure loses the partitions in flight alone, and the types of the result are decided after the last
row, when all of them are known. The next run with the same fingerprint finds the others in ``earlier``, and
never returns one whose rows it has not compared.

Results stay as long as the kernel: Spark reads them again if an executor with cached rows is lost.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from hydrogen_magic.core import run_log
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.driver.datasets.folders import DatasetFolder
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import fingerprints
from hydrogen_magic.node.prediction import partition_files
from hydrogen_magic.node.prediction.arrow_types import without_nulls
from hydrogen_magic.node.prediction.ddl import spark_schema, spark_type
from hydrogen_magic.node.prediction.options import ERROR_COLUMN
from hydrogen_magic.node.prediction.partition_files import PART, Part
from hydrogen_magic.node.prediction.schema_unify import MisfitError, joined

ROWS = "rows"
"""Folder of the partitions of this run's frame."""
_SETTABLE = {"--on-error": ("fail",)}
"""Files have no reasons of an earlier run with ``null``, and no schema but their own."""
EARLIER = "earlier"
"""Folder of those that an earlier run has finished, until a task has compared their rows."""
_results: list[DatasetFolder] = []
"""One for the results of this process, which is deleted with it."""


def _results_folder() -> Path:
    if not any(each.is_there for each in _results):
        _results[:] = [folders.new(None)]
    return Path(_results[0].data)


class KeptPartitions:
    """The parts of one run. ``resume``: look for an earlier one; raises InferError with what changed."""

    def __init__(self, prints: Mapping[str, str], *, resume: bool) -> None:
        self._prints = prints
        self._resume = resume
        self._begun = fingerprints.earlier(prints, settable=_SETTABLE) if resume else None
        self._used: set[str] = set()
        self._inherited: set[str] = set()
        self.folder = Path()
        self._journal = ""
        """That of the earlier run."""

    def open(self, gang: str) -> None:
        """Keep parts in the record of a run, and take over those of the earlier one. Raises OSError."""
        folder = run_log.kept_dir(gang)
        if self._begun is None:
            folder.mkdir(mode=0o700)
        else:
            run_log.kept_dir(self._begun).rename(folder)
            self._journal = (folder / fingerprints.JOURNAL).read_text()
        _replace(folder, json.dumps({"fingerprint": dict(self._prints)}) + "\n")
        (folder / EARLIER).mkdir(mode=0o700, exist_ok=True)
        _move_parts(folder / ROWS, folder / EARLIER)
        # Second files of partitions, and incomplete ones. NFS keeps a folder with a file that is open.
        shutil.rmtree(folder / ROWS, ignore_errors=True)
        (folder / ROWS).mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self._inherited = {part.path.name for part in self.earlier()}

    def instructions(self) -> dict[str, Any]:
        """Return what tasks need to write their parts; see ``inference_task.serve_partition``."""
        return {
            "folder": str(self.folder),
            "journal": (self.folder / fingerprints.JOURNAL).read_text(),
            "rows": ROWS,
            "earlier": EARLIER,
            "done": {part.number: part.path.name for part in self.earlier()},
            "suffix": PART,
        }

    def use(self, names: Iterable[str]) -> None:
        """Take note of the files of all partitions: a task that Spark repeated may have left another."""
        self._used = set(names)

    def parts(self) -> list[Part]:
        """Return the finished partitions of this run's frame in order."""
        return partition_files.found(self.folder / ROWS, self._used or None)

    def earlier(self) -> list[Part]:
        """Return the finished partitions of the earlier run that no task has compared yet."""
        return partition_files.found(self.folder / EARLIER)

    def undo(self) -> None:
        """Restore what the earlier run left: this run's frame has other rows.

        Tasks that still run find no folder for their rows.
        """
        changed = self.folder / "changed"
        (self.folder / ROWS).rename(changed)
        _move_parts(changed, self.folder / EARLIER, self._inherited)
        shutil.rmtree(changed, ignore_errors=True)
        _replace(self.folder, self._journal)

    def schemas(self, kept: list[str]) -> list[Any]:
        """Return the predicted columns of each part with rows. ``kept``: the columns of the frame."""
        parts = [part.schema for part in [*self.parts(), *self.earlier()] if part.n_rows]
        return [pa.schema([field for field in part if field.name not in kept]) for part in parts]

    def predicted(self, kept: list[str], *, as_text: bool) -> Any:
        """Return the predicted columns in types for all rows, None if there is no row yet.

        ``as_text``: columns are text if their types have no common one, if Spark lacks it, or if it cannot
        hold a value, and the column of errors, which those of an earlier run may lack, is the last. Otherwise
        raises InferError for types without a common one.
        """
        known = None
        for schema in self.schemas([*kept, ERROR_COLUMN] if as_text else kept):
            try:
                known = joined(known, schema, as_text=as_text)
            except MisfitError as error:
                remedy = "return one type for all batches"
                if self._prints["--on-error"] in _SETTABLE["--on-error"]:
                    remedy += (
                        ", or continue with --resume and --on-error collect, which makes it text"
                    )
                raise InferError(f"{error.fact}: {remedy}") from None
        if not as_text or known is None:
            return known
        return self._held(known).append(pa.field(ERROR_COLUMN, pa.string()))

    def _held(self, columns: pa.Schema) -> pa.Schema:
        """Return ``columns`` with text for those whose values Spark cannot hold in their type."""
        known = without_nulls(columns)
        unfit = {field.name for field in known if spark_type(field.type) is None}
        of_spark = spark_schema(known, as_text=True)
        for part in [*self.parts(), *self.earlier()]:
            if part.n_rows:
                unfit |= partition_files.unfit_columns(part.path, of_spark)
        texts = (
            field.with_type(pa.string()) if field.name in unfit else field for field in columns
        )
        return pa.schema(texts)

    def linked(self) -> list[str]:
        """Return paths of the present parts that exist as long as this kernel."""
        folder = _results_folder() / secrets.token_hex(8)
        folder.mkdir(mode=0o700, parents=True)
        parts = self.parts()
        for part in parts:
            try:
                os.link(part.path, folder / part.path.name)
            except OSError:  # a file system without links
                shutil.copy(part.path, folder)
        return [str(folder / part.path.name) for part in parts]

    def delete(self) -> None:
        """Delete the parts: they are not needed. Those of other runs may be of another frame."""
        run_log.delete_kept(self.folder.parent.name)

    def give_up(self) -> None:
        """Keep nothing of this run: executors do not share the disk, or it is full."""
        if self.folder != Path() and not self._inherited:
            run_log.delete_kept(self.folder.parent.name)

    def start_text(self) -> str:
        """Return what ``--resume`` has found; empty without it."""
        if not self._resume:
            return ""
        if self._begun is None:
            return fingerprints.NOTHING_KEPT
        return f"resumed run {self._begun}: {_amount(self.earlier())} were finished before"

    def end_text(self) -> str:
        """Return what a run that did not succeed has left; empty if that is nothing."""
        earlier = self.earlier()
        parts = [*self.parts(), *earlier]
        if not parts:
            return ""
        text = f"{_amount(parts)} are finished and kept: run the cell with --resume to continue"
        if earlier:
            text += f" ({_amount(earlier)} were not yet compared with this frame and are not in the result)"
        return text


def _amount(parts: list[Part]) -> str:
    n_rows = sum(part.n_rows for part in parts)
    return f"{counted(n_rows, 'row')} in {counted(len(parts), 'partition')}"


def _replace(folder: Path, journal: str) -> None:
    """Write the journal, whole or not at all."""
    new = folder / "new"
    new.write_text(journal)
    new.replace(folder / fingerprints.JOURNAL)


def _move_parts(source: Path, target: Path, names: Container[str] | None = None) -> None:
    """Move complete parts; ``names``: only these."""
    for part in partition_files.found(source, names):
        part.path.rename(target / part.path.name)
