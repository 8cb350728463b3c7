"""One cell in a Python worker of Spark: runs once, then predicts for the tasks that come.

It is imported from the zip that executors get (see ``inference_task``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from hydrogen_magic.core import events as ev
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.chunking import ChunkSizer, rebatched
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.predictor import Predictor, RowFailure
from hydrogen_magic.node.prediction.row_labels import rows_text
from hydrogen_magic.node.worker import main_thread, module_importer, namespace
from hydrogen_magic.node.worker.task_status import TaskProgress
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.closure import unbundle
from hydrogen_magic.serialization.payload import Payload

if TYPE_CHECKING:
    from hydrogen_magic.node.worker.task_reporter import TaskReporter

__all__ = ["CellWorker", "task_of", "told"]

_MOST_FRAMES = 6
"""Lines of the user's own in a message; more is a recursion."""
_CHUNK_S = 0.5
"""How long a chunk may take, if it is more than one batch."""


class CellEnvironment(Protocol):
    """See ``inference_task``."""

    def hide(self, names: set[str]) -> None: ...


class CellWorker:
    """A cell whose set-up has run."""

    def __init__(self, guest: CellEnvironment, boot: Mapping[str, Any], closure: Any) -> None:
        """Run the cell, which defines ``predict``, or the call, which returns it.

        Raises what that raises, and InferError for modules that are not here.
        """
        _refuse_missing(boot["needs"])
        header, body = unbundle(_received(closure))
        guest.hide({name.partition(".")[0] for name in header.modules})
        module_importer.install(header.modules)
        with _on_device("torch" in boot["needs"]):
            loaded = namespace.LoadedClosure(header, sys.modules["__main__"], own_process=False)
            loaded.restore(body)
            value = loaded.run()
        self._predict = loaded.predict(value)

    def serve(
        self, batches: Iterator[pa.RecordBatch], boot: Mapping[str, Any], task: TaskProgress
    ) -> Iterator[pa.RecordBatch]:
        """Yield, for ``batches`` of one partition, what ``boot`` asks for, in their order.

        ``task`` counts what is done.
        """
        predictor = Predictor(self._predict, InferOptions(**boot["options"]))
        chunks = _chunks(batches, boot["options"]["batch_size"])
        with _on_device("torch" in sys.modules), contextlib.closing(predictor):
            if boot["columns"] is None:
                yield _first_columns(predictor, chunks)
            else:
                yield from _predicted(predictor, chunks, boot, task)


def _received(closure: Any) -> Payload:
    """Return what came as a broadcast variable, or as a file of that name."""
    if hasattr(closure, "value"):
        pickled, buffers = closure.value
        vars(closure).pop("_value", None)  # Spark would keep it for as long as this process lives
        return Payload(pickled, tuple(buffers))
    from pyspark import SparkFiles

    fd = os.open(SparkFiles.get(closure), os.O_RDONLY)
    try:
        return payload.from_memfd(fd)  # all workers of a host read the same pages
    finally:
        os.close(fd)


def _refuse_missing(needs: list[str]) -> None:
    missing = [name for name in needs if _is_missing(name)]
    if missing:
        raise InferError(
            f"executors have no module {', '.join(missing)} (Python {platform.python_version()},"
            f" {sys.executable}): install it there, or drop what imports it from the cell"
        )


def _is_missing(name: str) -> bool:
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def _on_device(has_torch: bool) -> contextlib.AbstractContextManager[Any]:
    """Make this task's GPU torch's current one for a while; nothing where there is none."""
    name = os.environ.get("HYDROGEN_MAGIC_DEVICE", "cpu")
    if name != "cpu" and has_torch:
        import torch

        if torch.cuda.is_available():
            chosen: contextlib.AbstractContextManager[Any] = torch.cuda.device(name)
            return chosen
    return contextlib.nullcontext()


# ── reports ──────────────────────────────────────────────────────────────────────────────────────


_reporters: dict[str, TaskReporter] = {}
"""The reporter of the last run by its key; those of earlier runs end by themselves."""


@contextlib.contextmanager
def task_of(boot: Mapping[str, Any]) -> Iterator[TaskProgress]:
    """Return the progress of the current task, which is reported if the kernel asks for reports.

    A thread reports it a few times a second. If the kernel cannot be reached, or does not wait any more,
    the task goes on without reports.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    ids = context.stageId(), context.partitionId(), context.taskAttemptId()
    task = TaskProgress(*ids, is_trial=boot["columns"] is None)
    reporter = _reporter_for(boot.get("report_to"))
    with contextlib.nullcontext() if reporter is None else reporter.reporting(task):
        yield task


def _reporter_for(report_to: Mapping[str, Any] | None) -> TaskReporter | None:
    if report_to is None:
        return None
    reporter = _reporters.get(report_to["key"])
    if reporter is None:
        try:
            from hydrogen_magic.node.worker.task_reporter import TaskReporter

            reporter = TaskReporter(report_to)
        except (ImportError, RuntimeError):  # no pyzmq, or too many threads
            return None
        _reporters.clear()
        _reporters[reporter.key] = reporter
    return None if reporter.is_closed else reporter


class _TimedChunkSizer(ChunkSizer):
    """Makes chunks of a slow ``predict`` smaller: rows count as done by the chunk."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self._before: tuple[float, int] | None = None
        """When the last chunk was handed out, and its rows."""

    def saw(self, table: pa.Table) -> None:
        super().saw(table)
        now_s = time.monotonic()
        if self._before is None:
            self.rows = self._batch_size  # again, until it is known how long one takes
        else:
            began_s, n_rows = self._before
            in_time = int(n_rows * _CHUNK_S / max(now_s - began_s, 1e-6))
            self.rows = min(self.rows, max(1, in_time // self._batch_size) * self._batch_size)
        self._before = now_s, table.num_rows


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def _chunks(batches: Iterator[pa.RecordBatch], batch_size: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield a partition's rows, whole batches at a time, each with the number of its first row."""
    first = next(batches)
    everything = (batch for part in ((first,), batches) for batch in part)
    first_row = 0
    for chunk in rebatched(everything, first.schema, _TimedChunkSizer(batch_size)):
        yield first_row, chunk
        first_row += chunk.num_rows


def _first_columns(predictor: Predictor, chunks: Iterator[tuple[int, pa.Table]]) -> pa.RecordBatch:
    """Return the types of what is predicted for the first rows, as a schema in one binary value."""
    for first_row, chunk in chunks:
        output = predictor.run(chunk, first_row)
        if predictor.schema is not None:
            found = predictor.schema.serialize().to_pybytes()
            return pa.RecordBatch.from_pydict({"o": pa.array([found], pa.binary())})
    said = _line(output.failures[0])
    raise InferError(
        f"predict failed for every batch, so nothing says which columns it returns: {said}; name"
        ' them with --schema, such as --schema "score double"'
    )


def _predicted(
    predictor: Predictor,
    chunks: Iterator[tuple[int, pa.Table]],
    boot: Mapping[str, Any],
    task: TaskProgress,
) -> Iterator[pa.RecordBatch]:
    """Yield the columns that are kept and those that are predicted."""
    kept, of_spark = list(boot["kept"]), pa.ipc.read_schema(pa.py_buffer(boot["of_spark"]))
    if boot["columns"]:
        predictor.adopt(pa.ipc.read_schema(pa.py_buffer(boot["columns"])))
    for first_row, chunk in chunks:
        output = predictor.run(chunk, first_row)
        said = [f"partition {task.partition}: {_line(failure)}" for failure in output.failures]
        for line in said:
            print(line, file=sys.stderr)  # of the executor: its log keeps it
        task.count(chunk.num_rows, sum(map(_n_rows, output.failures)), said)
        added = _as_spark_has_it(output.columns, of_spark)
        together = chunk.select(kept)
        for name, column in zip(added.column_names, added.columns, strict=True):
            together = together.append_column(name, column)
        yield from together.to_batches()


def _as_spark_has_it(columns: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return ``columns`` in the types of ``schema``; the JVM reads them as nothing else."""
    arrays = []
    for field, column in zip(schema, columns.columns, strict=True):
        whole = column.combine_chunks()
        arrays.append(whole if whole.type == field.type else _cast(whole, field))
    return pa.Table.from_arrays(arrays, schema=schema)


def _cast(column: Any, field: pa.Field) -> Any:
    values = column.storage if isinstance(column.type, pa.BaseExtensionType) else column
    try:
        return values.cast(field.type)
    except pa.ArrowException as error:
        raise InferError(
            f"column {field.name!r} is {column.type}, and Spark would have it as {field.type}, which"
            f" cannot hold it ({error}): let predict return another type"
        ) from None


# ── words ────────────────────────────────────────────────────────────────────────────────────────


def told(error: BaseException, boot: Mapping[str, Any]) -> str:
    """Return what the user is told of ``error``: what and where, then the notebook's own lines."""
    from pyspark import TaskContext

    context = TaskContext.get()
    where = "" if context is None else f"partition {context.partitionId()}: "
    cause = error.__cause__ if isinstance(error, InferError) else error
    said = str(error) if isinstance(error, InferError) else _said(error)
    return "\n".join([f"{where}{said}", *(_frames(cause, boot["cells"]) if cause else ())])


def _line(failure: RowFailure) -> str:
    rows = rows_text(failure.first_row, failure.last_row)
    return f"predict failed on {rows}: {failure.reason} ({failure.row})"


def _n_rows(failure: RowFailure) -> int:
    return failure.last_row - failure.first_row + 1


def _said(error: BaseException) -> str:
    report = main_thread.report_exception(error)
    return f"the cell failed: {report.type}: {report.message}"


def _frames(error: BaseException, cells: Mapping[str, str]) -> list[str]:
    frames = main_thread.report_exception(error).frames
    own = [frame for frame in frames if _is_own(frame, cells)][-_MOST_FRAMES:]
    shown = own if own[-1:] == list(frames[-1:]) else [*own, *frames[-1:]]
    return [line for frame in shown for line in _lines(frame, cells)]


def _is_own(frame: ev.Frame, cells: Mapping[str, str]) -> bool:
    return frame.file in cells or not ("-packages" in frame.file or "/lib/python" in frame.file)


def _lines(frame: ev.Frame, cells: Mapping[str, str]) -> list[str]:
    place = cells.get(frame.file) or f"File {frame.file}"
    where = f"  {place}, line {frame.line}, in {frame.function}"
    return [where, *([f"      {frame.text}"] if frame.text else [])]
