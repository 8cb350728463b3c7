"""A Spark DataFrame as Parquet data: written by Spark's tasks, or received by the session.

Spark's tasks write where all machines see the files: to the folder that the user gives, and with a local
master to this machine. Otherwise each partition comes to this process as Arrow batches, one partition after
another.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.datasets import folders, handles, writing
from hydrogen_magic.driver.datasets.folders import DatasetFolder
from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.capacity_check import ONE_TASK, lack_of_slots
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.spark_session import Session, without_pandas_warning
from hydrogen_magic.driver.placements.spark.stage_counts import StageCounts
from hydrogen_magic.errors import HydrogenError, InferError
from hydrogen_magic.inference.spark.prepared import refuse_unsupported, with_arrays
from hydrogen_magic.node import data_files
from hydrogen_magic.node.data_files import AnyPath
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.prediction.column_names import refuse_repeated
from hydrogen_magic.views.row_progress import RowProgress

T = TypeVar("T")

_POLL_S = 0.25
_WRITER_SETTINGS = {
    # By default INT96, which does not tell timestamps of UTC from `timestamp_ntz`.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # By default values of variants are in columns of their own, which ranks would have to put together.
    "spark.sql.variant.writeShredding.enabled": "false",
}
"""Settings of the session, for which a single writer has no option."""
_DATABRICKS = ("/Volumes/", "/Workspace/")
"""Folders that Spark knows by the same path there."""


@dataclass(frozen=True)
class _Key:
    """What a DataFrame has in common with an earlier one whose rows are its rows."""

    application: str
    path: AnyPath | None
    schema: Any
    """Equal plans may differ in the names of their columns."""
    plan_hash: int
    """When the rows were written: later the same DataFrame may be other rows."""


@dataclass(frozen=True)
class _Written:
    """A DataFrame that was written."""

    frame: Any
    key: _Key
    folder: DatasetFolder
    handle: DatasetHandle


_written: list[_Written] = []
_check_wanted: ContextVar[Callable[[], None]] = ContextVar("check_wanted", default=lambda: None)


@contextmanager
def while_wanted(check: Callable[[], None]) -> Iterator[None]:
    """Call ``check`` repeatedly while this thread writes a DataFrame; what it raises cancels Spark's jobs.

    Interrupts are raised in the main thread alone.
    """
    token = _check_wanted.set(check)
    try:
        yield
    finally:
        _check_wanted.reset(token)


def dataset(frame: Any, path: AnyPath | None, *, reuse: bool) -> DatasetHandle:
    """Return the handle of a DataFrame's rows; see :func:`hydrogen_magic.dataset`."""
    _check(frame)
    session = sessions.of(frame).of_this_thread()
    _written[:] = [each for each in _written if each.folder.is_there]
    key = _Key(session.application, path, frame.schema, sessions.plan_hash(frame))
    if reuse:
        for earlier in reversed(_written):  # of several, the last one that was written on request
            if earlier.key == key and _is_same(earlier, frame):
                return earlier.handle.shared()
    session.refuse_if_stopped()
    folder = folders.new(path)
    handle = handles.written(folder, lambda to: _write(frame, session, to, path is not None))
    _written.append(_Written(frame, key, folder, handle))
    return handle


def _check(frame: Any) -> None:
    if frame.isStreaming:
        raise TypeError(
            "hm.dataset() does not support a streaming DataFrame: write the stream to a table, and pass"
            " what spark.read has of it"
        )
    try:
        refuse_repeated(frame.columns, "the DataFrame has", "rename one")
        refuse_unsupported(frame.schema)
    except InferError as error:
        raise TypeError(f"hm.dataset(): {error}") from error


def _is_same(earlier: _Written, frame: Any) -> bool:
    """Return whether these are equal plans, which hashes alone do not say, and the rows are still there."""
    # Its files may have been deleted or, through Spark Connect, a view of its plan.
    with suppress(Exception):
        is_same = earlier.frame.sameSemantics(frame)
        return is_same and handles.of_files(earlier.folder.data).n_rows == earlier.handle.n_rows
    return False


def _write(frame: Any, session: Session, folder: str, is_shared: bool) -> None:
    frame = with_arrays(frame, session)
    tag = f"hydrogen_magic-dataset-{secrets.token_hex(4)}"
    try:
        with RowProgress(None) as progress:
            if is_shared or session.where.startswith("local"):
                _by_tasks(frame, session, folder, tag, progress)
            else:
                _by_session(frame, session, folder, tag, progress)
    except SparkJobError as error:
        raise HydrogenError(f"hm.dataset(): {error}") from error


# ── by Spark's tasks ─────────────────────────────────────────────────────────────────────────────


def _by_tasks(frame: Any, session: Session, folder: str, tag: str, progress: RowProgress) -> None:
    functions = session.sql_module("functions")
    counted = session.sql_module("observation").Observation()
    rows = frame.observe(counted, functions.count(functions.lit(1)).alias("n"))
    writer = rows.write.option("parquet.block.size", writing.GROUP_BYTES)
    with _with_settings(session.spark.conf):
        _run(session, lambda: writer.parquet(_path_for_spark(folder)), tag, progress)
    _check_visible(folder, int(counted.get["n"]))


@contextmanager
def _with_settings(conf: Any) -> Iterator[None]:
    """Let Spark write with :data:`_WRITER_SETTINGS`."""
    before: dict[str, str] = {}
    for name, value in _WRITER_SETTINGS.items():
        with suppress(Exception):  # a server of Spark Connect may refuse it, or not know it
            before[name] = conf.get(name)
            conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            with suppress(Exception):
                conf.set(name, value)


def _path_for_spark(folder: str) -> str:
    if data_files.is_url(folder) or folder.startswith(_DATABRICKS):
        return folder
    if folder.startswith("/dbfs/"):
        return f"dbfs:{folder.removeprefix('/dbfs')}"
    # A path alone may be one of HDFS. Hadoop decodes no URL: %20 would be part of the folder's name.
    return f"file://{folder}"


def _check_visible(folder: str, n_rows: int) -> None:
    """Raise HydrogenError if executors have written files to disks of their own."""
    try:
        visible = handles.of_files(folder).n_rows
    except FileNotFoundError:
        visible = 0
    if visible != n_rows:
        raise HydrogenError(
            f"hm.dataset(): Spark has written {counted(n_rows, 'row')} to {folder}, but this machine sees "
            f"{visible:,} there: path= has to be a folder or URL that Spark's executors, this machine and "
            "all ranks share; without path= the rows come to this machine, which sends them to hosts with "
            "ranks. Files on the executors' own disks have to be deleted there"
        )


# ── by the session ───────────────────────────────────────────────────────────────────────────────


def _by_session(frame: Any, session: Session, folder: str, tag: str, progress: RowProgress) -> None:
    with without_pandas_warning():
        packed = sessions.numbered(frame).mapInArrow(_packer(), "rows binary")

    def receive() -> bool:
        tables = _unpacked(packed.toLocalIterator(), frame.columns)
        first = next(tables, None)
        if first is not None:
            progress.hide_tasks()  # Spark runs the next partition's only when its rows are fetched
            writing.write(chain([first], tables), first.schema, folder, progress.add)
        return first is not None

    if not _run(session, receive, tag, progress):
        raise ValueError(handles.NO_ROWS)


def _packer() -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function that is pickled by value, since executors do not have this package."""

    def hydrogen_magic_dataset(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        for batch in batches:
            if batch.num_rows:
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
                    stream.write_batch(batch)
                packed = pyarrow.array([sink.getvalue().to_pybytes()], pyarrow.binary())
                yield pyarrow.RecordBatch.from_arrays([packed], ["rows"])

    return hydrogen_magic_dataset


def _unpacked(rows: Iterator[Any], names: list[str]) -> Iterator[Any]:
    import pyarrow as pa

    for row in rows:
        yield pa.ipc.open_stream(bytes(row[0])).read_all().rename_columns(names)


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────


def _run(session: Session, action: Callable[[], T], tag: str, progress: RowProgress) -> T:
    """Run ``action``, which makes Spark run jobs, in a thread; show its progress and return its value.

    After an interrupt, or if the check of :func:`while_wanted` raises, the jobs are cancelled. It returns
    when they have ended: until then their tasks may write.
    """
    stages = StageCounts(session, tag)
    with ThreadPoolExecutor(1, "hydrogen_magic-dataset") as thread, stages.followed():
        job = thread.submit(session.run, action, tag, "hydrogen_magic: hm.dataset()")
        try:
            while not job.done():
                wait([job], _POLL_S)
                _check_wanted.get()()
                progress.waits_for(lack_of_slots(session, ONE_TASK, tag))
                _report(session, stages, tag, progress)
            found = job.result()
        except BaseException:
            session.cancel(tag)
            raise
        stages.complete()
        _report(session, stages, tag, progress)
        return found


def _report(session: Session, stages: StageCounts, tag: str, progress: RowProgress) -> None:
    counts = stages.counts().values()
    if counts:
        rows = None if session.is_connect else private_calls.rows_written(session, tag)
        progress.tasks(sum(done for done, _ in counts), sum(total for _, total in counts), rows)
