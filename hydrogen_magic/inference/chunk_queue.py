"""Which chunks are still to be predicted, and the predictions of those that are.

Uses no socket, thread or process. Chunks may be answered in any order. The predicted columns are those of
the first rows, whichever rank is faster, and their types are wide enough for all rows, so a result does not
depend on timing. Answers that an earlier run has kept are used like those of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hydrogen_magic.core.units import counted
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.arrow_types import is_undecided, size_bytes
from hydrogen_magic.node.prediction.block_rows import concatenated
from hydrogen_magic.node.prediction.ddl import parse_schema
from hydrogen_magic.node.prediction.options import ERROR_COLUMN, InferOptions
from hydrogen_magic.node.prediction.row_labels import rows_text
from hydrogen_magic.node.prediction.schema_unify import (
    MisfitError,
    as_text,
    check_columns,
    fit_table,
    has_no_value,
    joined,
    types_of,
    without_marks,
)

if TYPE_CHECKING:
    from hydrogen_magic.inference.kept_parts import KeptAnswer, KeptParts

_SHARES = 3
"""A chunk has at most this part of a rank's share of the remaining rows: chunks get smaller near the end,
and ranks end together. Smaller chunks cost time: with 8, a small model over two million rows took 1.07 of
the time."""
_CHUNK_S = 1.0
"""How long a rank may take for a chunk of more than one batch: it answers at the end, so an end of the run
loses the chunk."""
_GROWTH = 8
"""A chunk has at most this many times the rows of one that was measured: the first rows may be easy ones."""
_CHUNKS_AHEAD = 4
_BYTES_AHEAD = 32 << 20
"""What may be predicted per rank before earlier rows: so many chunks, and more if rows and predictions are
small. A chunk may take many times as long as those after it."""
_MAX_UNDECIDED_BYTES = 256 << 20
"""Rows and predictions of a bounded result that may wait for the type of a column. A column without a
value so far has the type null then; a type that comes later means that files are written again."""
_MAX_FAILURES = 100
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, order=True)
class Chunk:
    """Consecutive rows of the frame."""

    number: int
    first_row: int = field(compare=False)
    table: Any = field(compare=False, repr=False)
    """A ``pyarrow.Table`` or ``BlockRows``, if possible a view of the frame."""
    knows_columns: bool = field(default=False, compare=False)
    """Whether the predicted columns were known when it was handed out."""

    @property
    def n_rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def rows_text(self) -> str:
        return rows_text(self.first_row, self.first_row + self.n_rows - 1)


@dataclass(frozen=True)
class _Answer:
    chunk: Chunk
    columns: Any
    """The predictions; None if all rows failed and the rank did not know the predicted columns."""
    failures: Sequence[Mapping[str, Any]]

    @property
    def nbytes(self) -> int:
        return size_bytes(self.chunk.table) + (
            0 if self.columns is None else size_bytes(self.columns)
        )


class RowLimit:
    """The most rows of a rank's next chunk, from how long the rank took for the last one.

    Only the last one counts, since the first batch takes as long as warming up, and later rows may be harder.
    """

    def __init__(self, batch_size: int) -> None:
        self.rows = batch_size
        """A multiple of the batch size."""
        self._batch_size = batch_size

    def took(self, seconds: float, n_rows: int) -> None:
        """Take note of a chunk that the rank has answered."""
        in_time = int(n_rows * _CHUNK_S / max(seconds, 1e-6))
        rows = min(in_time, max(self.rows, _GROWTH * n_rows))
        self.rows = max(1, rows // self._batch_size) * self._batch_size


class ChunkQueue:
    """``source`` and ``result`` are those of :mod:`hydrogen_magic.inference.sources`.

    ``kept``: answers of an earlier run, if any.
    """

    def __init__(
        self,
        source: Any,
        result: Any,
        options: InferOptions,
        n_ranks: int,
        kept: KeptParts | None = None,
    ) -> None:
        self._kept = kept
        self._options = options
        self._as_text = options.collects and options.schema is None
        self.schema: Any = None
        """The predicted columns, None until the first rows are done."""
        self.n_rows: int | None = source.n_rows
        self.failures: list[Mapping[str, Any]] = []
        """The first hundred, in order of rows."""
        self.n_failed_rows = self.n_failures = 0
        self.widened: dict[str, tuple[str, str]] = {}
        """Columns whose first rows have another type: that type, and the final one."""
        self.n_resumed_rows = 0
        """Rows whose answers an earlier run has kept."""
        self._rows_put = 0
        self._open: set[int] = set()
        """Chunks that were handed out and have no answer yet."""
        self._result = result
        self._batch_size = options.batch_size
        self._n_ranks = n_ranks
        self._source_chunks = source.chunks(options.batch_size)
        self._rest: Any = None
        """The remaining rows of the last chunk of the source, if it was too large."""
        self._n_chunks = self._n_chunk_rows = 0
        self._is_read = False
        """Whether the source has no further rows."""
        self._waiting: list[Chunk] = []
        """A heap of chunks to be handed out."""
        self._answered: dict[int, _Answer] = {}
        """Answers that wait until the predicted columns are known."""
        self._answered_bytes = 0
        self._undecided = 0
        """Number of the first chunk that has not contributed to the predicted columns."""
        self._undecided_bytes = 0
        """Size of the chunks before it."""
        self._seen: Any = None
        """The predicted columns so far; unknown types are null."""

    @property
    def rows(self) -> int:
        """Rows done, whether their columns are known or not."""
        return self._rows_put + sum(answer.chunk.n_rows for answer in self._answered.values())

    @property
    def in_flight(self) -> int:
        """Chunks that were handed out and are not done."""
        return len(self._open)

    # ── handing out ──

    def next(self, most: int = _NO_LIMIT) -> Chunk | None:
        """Return the next chunk; None if there is none, or none now.

        ``most``: how many rows it may have if it is a new one, see :class:`RowLimit`.
        """
        if not self._waiting and not self._is_far_ahead() and self._next_kept_row() != 0:
            self._cut(most)
        return self._handed_out(heapq.heappop(self._waiting)) if self._waiting else None

    @property
    def can_resume(self) -> bool:
        """Whether :meth:`resume` can take an answer now."""
        return self._next_kept_row() == 0 and not self._is_far_ahead()

    def resume(self) -> None:
        """Take the answer that an earlier run has kept for the next rows.

        Raises InferError if these rows are not the same as in that run.
        """
        assert self._kept is not None
        row = self._n_chunk_rows
        chunk = self._chunk(self._exactly(self._kept.length(row)))
        answer = self._kept.read(row, chunk.table)
        columns = None if answer is None else self._as_asked(answer, chunk)
        if answer is None or columns is None:
            heapq.heappush(self._waiting, chunk)
            return
        self._open.add(chunk.number)
        self.n_resumed_rows += chunk.n_rows
        self.answer(chunk, columns, answer.failures)
        if self._next_kept_row() is None:
            self._is_at_end()  # otherwise the run would wait for a rank that asks for more rows

    def _as_asked(self, answer: KeptAnswer, chunk: Chunk) -> Any:
        """Return kept columns in the form of this run's options, None if they do not have it.

        The earlier run may have had neither a schema nor collected errors.
        """
        columns = answer.columns
        if answer.failures and self._options.on_error == "fail":
            return None
        if self._options.collects and ERROR_COLUMN not in columns.column_names:
            reasons: list[str | None] = [None] * columns.num_rows
            for each in answer.failures:
                first, end = (each[name] - chunk.first_row for name in ("first_row", "last_row"))
                reasons[first : end + 1] = [each["reason"]] * (end + 1 - first)
            columns = columns.append_column(ERROR_COLUMN, pa.array(reasons, pa.string()))
        if self._options.schema is None:
            return columns
        declared = self._options.result_schema(parse_schema(self._options.schema))
        try:
            check_columns(declared.names, columns.column_names)
            return fit_table(columns, declared, is_declared=True)
        except MisfitError:
            return None

    def _next_kept_row(self) -> int | None:
        """Return how many rows come before the next ones with a kept answer; None if there are none."""
        row = None if self._kept is None else self._kept.next_row(self._n_chunk_rows)
        return None if row is None else row - self._n_chunk_rows

    def _cut(self, most: int) -> None:
        """Make a chunk of the next rows of the source."""
        if self._is_at_end():
            return
        n_before_kept = self._next_kept_row() or _NO_LIMIT
        table = self._rows(min(most, self._max_rows(), n_before_kept))
        heapq.heappush(self._waiting, self._chunk(table))

    def _is_at_end(self) -> bool:
        """Return whether the source has no further rows; the types of all answers are known then."""
        if self._rest is None:
            self._rest = next(self._source_chunks, None)
        if self._rest is None:
            self._is_read = True
            self._take_answers()
        return self._is_read

    def _chunk(self, table: Any) -> Chunk:
        chunk = Chunk(self._n_chunks, self._n_chunk_rows, table)
        self._n_chunks += 1
        self._n_chunk_rows += chunk.n_rows
        return chunk

    def _handed_out(self, chunk: Chunk) -> Chunk:
        self._open.add(chunk.number)
        return replace(chunk, knows_columns=self.schema is not None)

    def second(self, chunk: Chunk) -> Chunk | None:
        """Return a chunk for another rank as well; None if it is done."""
        return self._handed_out(chunk) if chunk.number in self._open else None

    def _is_far_ahead(self) -> bool:
        """Return whether more answers would only wait for earlier rows."""
        n_chunks, n_bytes = _CHUNKS_AHEAD * self._n_ranks, _BYTES_AHEAD * self._n_ranks
        if self.schema is not None:
            result = self._result
            return result.n_waiting >= n_chunks and bool(result.waiting_bytes >= n_bytes)
        is_before_first = self._n_chunks >= self._undecided + n_chunks
        return is_before_first and self._answered_bytes - self._undecided_bytes >= n_bytes

    def _rows(self, limit: int) -> Any:
        """Return at most ``limit`` rows of the source, None at its end."""
        table, self._rest = self._rest, None
        if table is None:
            table = next(self._source_chunks, None)
        if table is not None and table.num_rows > limit:
            table, self._rest = table.slice(0, limit), table.slice(limit)
        return table

    def _exactly(self, n_rows: int) -> Any:
        """Return the next ``n_rows`` rows, or all that are left."""
        parts = [self._rows(n_rows)]
        while parts[-1] is not None and (n_missing := n_rows - sum(p.num_rows for p in parts)):
            parts.append(self._rows(n_missing))
        if parts[-1] is None:
            expected = counted(n_rows + self._n_chunk_rows, "row")
            raise InferError(
                f"--resume: the frame has fewer than the {expected} that an earlier run predicted: restore "
                "them to continue, or run the cell without --resume to start over"
            )
        return concatenated(parts)

    def _max_rows(self) -> int:
        """Return how many rows the next chunk may have: whole batches, at least one."""
        if self.n_rows is None:
            return _NO_LIMIT
        share = (self.n_rows - self._n_chunk_rows) // (_SHARES * self._n_ranks)
        return max(1, share // self._batch_size) * self._batch_size

    def give_back(self, chunk: Chunk) -> None:
        """Hand out a chunk again that its rank has not done, unless another rank has."""
        if chunk.number in self._open:
            self._open.remove(chunk.number)
            heapq.heappush(self._waiting, chunk)

    # ── answers ──

    def answer(self, chunk: Chunk, columns: Any, failures: Sequence[Mapping[str, Any]]) -> bool:
        """Take the predictions of a chunk; return False if it already has some.

        Raises InferError if the columns differ from those of the first rows.
        """
        if chunk.number not in self._open:
            return False
        self._open.remove(chunk.number)
        answer = self._answered[chunk.number] = _Answer(chunk, columns, failures)
        if self.schema is None:
            self._answered_bytes += answer.nbytes
        self._take_answers()
        return True

    def _take_answers(self) -> None:
        """Set the predicted columns once they are known, and put all answers into the result."""
        while self.schema is None and self._undecided in self._answered:
            self._decide(self._answered[self._undecided])
        if self.schema is None and self._seen is not None and self.is_done:
            self._begin(self._seen)  # columns without a value have the type null
        if self.schema is not None:
            answered, self._answered = self._answered, {}
            for answer in answered.values():
                self._put(answer)

    def _decide(self, answer: _Answer) -> None:
        """Set the predicted columns if these rows, and those before them, show all types."""
        self._undecided += 1
        self._undecided_bytes += answer.nbytes
        if answer.columns is not None:
            self._seen = self._joined_if_same(answer.columns)
        is_full = self._result.is_bounded and self._undecided_bytes >= _MAX_UNDECIDED_BYTES
        if is_full and self._seen is None:
            raise self._all_failed(answer.chunk.first_row + answer.chunk.n_rows)
        is_known = self._seen is not None and not any(map(is_undecided, self._seen.types))
        if is_full or is_known:
            self._begin(self._seen)

    def _joined(self, known: Any, columns: Any) -> Any:
        return joined(known, types_of(columns, known), as_text=self._as_text)

    def _joined_if_same(self, columns: Any) -> Any:
        try:
            return self._joined(self._seen, columns)
        except MisfitError:  # these rows are predicted again
            return self._seen

    def _begin(self, schema: Any) -> None:
        """Set the predicted columns, or wider types.

        If errors are collected, columns whose earlier rows do not fit become text. Raises InferError
        otherwise.
        """
        try:
            self._result.begin(without_marks(schema))
        except MisfitError as misfit:
            self._begin(self._remedied(schema, misfit))
            return
        for known, wide in zip(self.schema or (), schema, strict=False):
            if known.type != wide.type and not has_no_value(known):
                first = self.widened.get(wide.name, (str(known.type), ""))[0]
                self.widened[wide.name] = first, str(wide.type)
        self.schema = schema

    def _remedied(self, schema: Any, misfit: MisfitError) -> Any:
        try:
            if self._as_text:
                return as_text(schema, misfit)
            raise misfit
        except MisfitError as error:
            raise InferError(str(error)) from None

    def _put(self, answer: _Answer) -> None:
        chunk = answer.chunk
        if answer.columns is None:
            self._predict_again(chunk, answer.columns)
            return
        try:
            wide = self._joined(self.schema, answer.columns)
            columns, wide = self._fitted(answer.columns, wide)
        except MisfitError:
            self._predict_again(chunk, answer.columns)
            return
        if wide != self.schema:
            self._begin(wide)
            columns = fit_table(answer.columns, self.schema)
        else:
            self.schema = wide  # its columns may have had NaN alone
        self._result.put(chunk.first_row, columns, chunk.table)
        self._rows_put += chunk.n_rows
        for failure in answer.failures:
            self.n_failures += 1
            self.n_failed_rows += int(failure["last_row"] - failure["first_row"] + 1)
        failures = sorted([*self.failures, *answer.failures], key=lambda each: each["first_row"])
        self.failures = failures[:_MAX_FAILURES]

    def _fitted(self, columns: Any, schema: Any) -> tuple[Any, Any]:
        """Return ``columns`` in the types of ``schema``, and the schema with text where they do not fit.

        Raises MisfitError if errors are not collected.
        """
        try:
            return fit_table(columns, schema), schema
        except MisfitError as misfit:
            if not self._as_text:
                raise
            return self._fitted(columns, as_text(schema, misfit))

    def _predict_again(self, chunk: Chunk, columns: Any) -> None:
        """Return a chunk to the queue, for a rank that knows the predicted columns."""
        if chunk.knows_columns:
            raise InferError(
                f"`predict` returned other columns for {chunk.rows_text} than for the first rows:"
                f" {_described(columns)} instead of {_described(self.schema)}; return the same columns"
                " for every batch, or set them with `--schema`"
            )
        heapq.heappush(self._waiting, chunk)

    # ── the end ──

    @property
    def is_done(self) -> bool:
        """Whether every row has an answer."""
        return self._is_read and not self._waiting and not self._open

    def finish(self) -> Any:
        """Return the frame with its predictions. Raises InferError if all rows failed."""
        if self.schema is None and self._n_chunk_rows:
            raise self._all_failed(self._n_chunk_rows)
        return self._result.finish()

    def _all_failed(self, n_rows: int) -> InferError:
        failures = (f for number in sorted(self._answered) for f in self._answered[number].failures)
        first = next(failures, {"reason": "unknown"})
        return InferError(
            f"`predict` failed for each of the first {counted(n_rows, 'row')}, so the columns that it returns"
            f" are not known; the first failure: {first['reason']}"
        )

    def settle(self) -> None:
        """Put answers that wait for the type of a column: the run has been stopped.

        A column without a value has the type null.
        """
        for number in sorted(self._answered):
            columns = self._answered[number].columns
            if columns is not None:
                self._seen = self._joined_if_same(columns)
        if self.schema is None and self._seen is not None:
            self._begin(self._seen)
        self._take_answers()

    def abandon(self) -> None:
        """Release all data: there will be no result."""
        self._answered.clear()
        self._waiting.clear()
        self._rest = None
        self._source_chunks.close()
        self._result.abort()


def _described(columns: Any) -> str:
    if columns is None:
        return "nothing"
    schema = getattr(columns, "schema", columns)
    return ", ".join(f"{field.name} {field.type}" for field in schema)
