"""One cell in a Python worker of Spark: runs once, then predicts for each task.

It is imported from the zip that executors get (see ``inference_task``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.agent.host_task import is_missing
from hydrogen_magic.node.prediction import partition_files
from hydrogen_magic.node.prediction.arrow_types import with_parts, without_nulls
from hydrogen_magic.node.prediction.chunking import ChunkSizer, rebatched, side_by_side
from hydrogen_magic.node.prediction.ddl import spark_schema
from hydrogen_magic.node.prediction.fixed_types import misfit_texts
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.predictor import Predictor, RowFailure, reason_of
from hydrogen_magic.node.prediction.row_labels import rows_text
from hydrogen_magic.node.worker import main_thread, module_importer, namespace, seeding, settings
from hydrogen_magic.node.worker.inference.task_status import TaskCounter
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.closure import unbundle
from hydrogen_magic.serialization.payload import Payload

if TYPE_CHECKING:
    from hydrogen_magic.node.worker.inference.task_reporter import TaskReporter

_MAX_FRAMES = 6
"""Lines of the user's code in a message; more would be a recursion."""
_CHUNK_S = 0.5
"""How long a chunk of several batches may take."""
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d\d))?")
"""A time zone of Java by its distance from UTC: ``GMT+8``, ``UTC+08:00``, ``+8``."""


class CellWorker:
    """A cell that has run."""

    def __init__(
        self, hide: Callable[[set[str]], None], config: Mapping[str, Any], closure: Any
    ) -> None:
        """Run the cell, which defines ``predict``, or the call, which returns it.

        ``hide``: see ``inference_task``. Raises the cell's errors, and InferError for modules that are not
        installed.
        """
        _refuse_missing(config["needs"])
        header, body = unbundle(_received(closure))
        hide({name.partition(".")[0] for name in header.modules})
        module_importer.install(header.modules)
        with _on_device("torch" in config["needs"]):
            loaded = namespace.LoadedClosure(header, sys.modules["__main__"], own_process=False)
            loaded.restore(body)
            self._settings, self._seed = loaded.settings, header.seed
            self._accumulators = list(_registered().values())
            self._has_served = False
            with seeding.seeded(self._seed), settings.apply(self._settings, _print_warning):
                value = loaded.run()
        self._predict = loaded.predict(value)

    def serve(
        self, batches: Iterator[pa.RecordBatch], config: Mapping[str, Any], task: TaskCounter
    ) -> Iterator[Any]:
        """Yield the predictions for ``batches`` of one partition, in order; ``task`` counts their rows.

        If they go to a file, yield the places of its streams.
        """
        self._register_accumulators(is_trial=task.progress.is_trial)
        number = None if self._seed is None else self._seed + task.progress.partition
        predictor = Predictor(self._predict, InferOptions(**config["options"]))
        chunks = _chunks(batches, config["options"]["batch_size"])
        with (
            _on_device("torch" in sys.modules),
            contextlib.closing(predictor),
            seeding.seeded(number),
            settings.apply(self._settings, _print_warning),
        ):
            if config["columns"] is None:
                yield _first_columns(predictor, chunks)
            elif "file" in config:
                yield from partition_files.write(
                    config["file"], _with_own_columns(predictor, chunks, config, task)
                )
            else:
                yield from _predicted(predictor, chunks, config, task)

    def _register_accumulators(self, *, is_trial: bool) -> None:
        """Let Spark add what this task adds; it forgets accumulators after each task.

        The rows of a trial are predicted again.
        """
        known = _registered()
        for each in self._accumulators:
            if self._has_served:
                each._value = each.accum_param.zero(each._value)
            if is_trial:
                known.pop(each.aid, None)
            else:
                known[each.aid] = each
        self._has_served = True


def _registered() -> dict[int, Any]:
    """Return the accumulators of the current task, by their numbers."""
    try:
        from pyspark.accumulators import _accumulatorRegistry
    except ImportError:  # private to pyspark
        return {}
    registered: dict[int, Any] = _accumulatorRegistry
    return registered


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)  # the log of the executor


def _received(content: Any) -> Payload:
    """Return the closure from the content of a broadcast variable, or from the path of a file."""
    if not isinstance(content, str):
        pickled, buffers = content
        return Payload(pickled, tuple(buffers))
    with open(content, "rb") as file:
        return payload.from_memfd(file.fileno())  # all workers of a host read the same pages


def _refuse_missing(needs: list[str]) -> None:
    missing = [name for name in needs if is_missing(name)]
    if missing:
        raise InferError(
            f"executors have no module {', '.join(missing)} (Python {platform.python_version()},"
            f" {sys.executable}): install it there, or remove the import from the cell"
        )


def _on_device(has_torch: bool) -> contextlib.AbstractContextManager[Any]:
    """Make this task's GPU the current one of torch, if it has one."""
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
def task_of(config: Mapping[str, Any]) -> Iterator[TaskCounter]:
    """Return the progress of the current task, which is reported if the kernel asks for reports.

    A thread reports it a few times a second. If the kernel cannot be reached, or does not wait any more,
    the task goes on without reports.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    ids = context.stageId(), context.partitionId(), context.taskAttemptId()
    task = TaskCounter(msg.TaskProgress(*ids, is_trial=config["columns"] is None))
    reporter = _reporter_for(config.get("report_to"))
    with contextlib.nullcontext() if reporter is None else reporter.reporting(task):
        yield task


def _reporter_for(report_to: Mapping[str, Any] | None) -> TaskReporter | None:
    if report_to is None:
        return None
    reporter = _reporters.get(report_to["key"])
    if reporter is None:
        try:
            from hydrogen_magic.node.worker.inference.task_reporter import TaskReporter

            reporter = TaskReporter(report_to)
        except (ImportError, RuntimeError):  # no pyzmq, or too many threads
            return None
        _reporters.clear()
        _reporters[reporter.key] = reporter
    return None if reporter.is_closed else reporter


class _TimedChunkSizer(ChunkSizer):
    """Makes smaller chunks for a slow ``predict``, since progress is counted by chunks."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self._before: tuple[float, int] | None = None
        """When the last chunk was handed out, and its number of rows."""

    def saw(self, table: pa.Table) -> None:
        super().saw(table)
        now_s = time.monotonic()
        if self._before is None:
            self.rows = self._batch_size  # one batch, until its time is known
        else:
            began_s, n_rows = self._before
            in_time = int(n_rows * _CHUNK_S / max(now_s - began_s, 1e-6))
            self.rows = min(self.rows, max(1, in_time // self._batch_size) * self._batch_size)
        self._before = now_s, table.num_rows


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def _chunks(batches: Iterator[pa.RecordBatch], batch_size: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield the chunks of a partition, each with the number of its first row."""
    first = next(batches)
    batches = itertools.chain([first], batches)
    schema = pa.schema([field.with_type(_in_known_zone(field.type)) for field in first.schema])
    if schema != first.schema:
        batches = (pa.Table.from_batches([batch]).cast(schema) for batch in batches)
    sizer, first_row = _TimedChunkSizer(batch_size), 0
    for chunk in rebatched(batches, schema, sizer):
        yield first_row, chunk
        first_row += chunk.num_rows


def _in_known_zone(kind: pa.DataType) -> pa.DataType:
    """Return the type for the same times in the same zone by a name that Python knows, at any depth."""
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        offset = _OFFSET.fullmatch(kind.tz)
        if offset is not None:
            return pa.timestamp(kind.unit, f"{offset[1]}{offset[2]:0>2}:{offset[3] or '00'}")
        return pa.timestamp(kind.unit, "UTC") if kind.tz == "Z" else kind
    return with_parts(kind, _in_known_zone) or kind


def _first_columns(predictor: Predictor, chunks: Iterator[tuple[int, pa.Table]]) -> pa.RecordBatch:
    """Return the predicted columns of the first rows, as a schema in one binary value.

    Those of a batch without rows if the frame has none.
    """
    for first_row, chunk in chunks:
        if not chunk.num_rows:
            _find_columns(predictor, chunk.schema)
        else:
            output = predictor.run(chunk, first_row)
        if predictor.schema is not None:
            found = predictor.schema.serialize().to_pybytes()
            return pa.RecordBatch.from_pydict({"o": pa.array([found], pa.binary())})
    raise InferError(
        "predict failed for every batch, so the columns that it returns are not known:"
        f" {_failure_text(output.failures[0])}; set them with --schema, for example --schema"
        ' "score double"'
    )


def _find_columns(predictor: Predictor, schema: pa.Schema) -> None:
    try:
        predictor.find_columns(schema)
    except Exception as error:
        raise InferError(
            "the DataFrame has no rows, and predict failed for a batch without rows"
            f" ({reason_of(error)}), so the columns that it returns are not known: set them with"
            ' --schema, for example --schema "score double"'
        ) from error


def _predicted(
    predictor: Predictor,
    chunks: Iterator[tuple[int, pa.Table]],
    config: Mapping[str, Any],
    task: TaskCounter,
) -> Iterator[pa.RecordBatch]:
    """Yield the kept and the predicted columns."""
    _adopt(predictor, config)
    predictor.target = pa.ipc.read_schema(pa.py_buffer(config["of_spark"]))
    for first_row, chunk in chunks:
        output = predictor.run(chunk, first_row)
        texts = list(misfit_texts(output.misfits, first_row))
        if texts and config["options"]["on_error"] == "fail":
            raise InferError(f"{texts[0]}; a lazy Spark DataFrame has the types of its first batch")
        _count(task, chunk.num_rows, output.failures, texts)
        yield from side_by_side(chunk.select(config["kept"]), output.columns).to_batches()


def _with_own_columns(
    predictor: Predictor,
    chunks: Iterator[tuple[int, pa.Table]],
    config: Mapping[str, Any],
    task: TaskCounter,
) -> Iterator[pa.Table]:
    """Yield the kept and the predicted columns, in the types that these have so far."""
    _adopt(predictor, config)
    for first_row, chunk in chunks:
        output = predictor.run(chunk, first_row)
        if config["options"]["on_error"] != "collect":  # otherwise they become text at the end
            spark_schema(without_nulls(output.columns.schema))  # raises for types that Spark lacks
        _count(task, chunk.num_rows, output.failures)
        yield side_by_side(chunk.select(config["kept"]), output.columns)


def _adopt(predictor: Predictor, config: Mapping[str, Any]) -> None:
    if config["columns"]:
        predictor.adopt(pa.ipc.read_schema(pa.py_buffer(config["columns"])))


def _count(
    task: TaskCounter, n_rows: int, failures: Sequence[RowFailure], more: Sequence[str] = ()
) -> None:
    """Count the rows of a chunk; ``more``: values that are missing, one text for each row."""
    partition = task.progress.partition
    texts = [f"partition {partition}: {text}" for text in (*map(_failure_text, failures), *more)]
    for text in texts:
        print(text, file=sys.stderr)  # the log of the executor
    n_failed = sum(each.last_row - each.first_row + 1 for each in failures)
    task.count(n_rows, n_failed + len(more), texts)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def message_of(error: BaseException, config: Mapping[str, Any]) -> str:
    """Return a message for the user: the error and its partition, then lines of the notebook."""
    from pyspark import TaskContext

    context = TaskContext.get()
    where = "" if context is None else f"partition {context.partitionId()}: "
    if isinstance(error, InferError):
        cause, text = error.__cause__, str(error)
    else:
        report = main_thread.report_exception(error)
        cause, text = error, f"the cell failed: {report.type}: {report.message}"
    if config.get("of_structs"):  # hm.udf has an argument of this name
        text = text.replace("--schema", "schema")
    return "\n".join([f"{where}{text}", *(_frames(cause, config["cells"]) if cause else ())])


def _failure_text(failure: RowFailure) -> str:
    rows = rows_text(failure.first_row, failure.last_row)
    return f"predict failed on {rows}: {failure.reason} ({failure.row})"


def _frames(error: BaseException, cells: Mapping[str, str]) -> list[str]:
    frames = main_thread.report_exception(error).frames
    own = [frame for frame in frames if _is_own(frame, cells)][-_MAX_FRAMES:]
    shown = own if own[-1:] == list(frames[-1:]) else [*own, *frames[-1:]]
    return [line for frame in shown for line in _lines(frame, cells)]


def _is_own(frame: ev.Frame, cells: Mapping[str, str]) -> bool:
    return frame.file in cells or not ("-packages" in frame.file or "/lib/python" in frame.file)


def _lines(frame: ev.Frame, cells: Mapping[str, str]) -> list[str]:
    place = cells.get(frame.file) or f"File {frame.file}"
    where = f"  {place}, line {frame.line}, in {frame.function}"
    return [where, *([f"      {frame.text}"] if frame.text else [])]
