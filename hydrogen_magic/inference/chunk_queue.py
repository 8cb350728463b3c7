"""Which rows are still to be done, and what came of those that are: the feeder's book.

Knows no socket, thread or process. Chunks may be answered in any order; the columns are those that the
first rows got, whichever rank was faster, so that a run does not depend on who that was.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.arrow_types import has_null_type
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.schema_unify import fit_table, merge_types

__all__ = ["Chunk", "ChunkQueue"]

_SHARES = 3
"""A chunk is at most this part of a rank's share of what is left: near the end they get smaller, and
ranks that began together end together. Not smaller than that takes: with 8 in place of 3, a small
model over two million rows took 1.07 of the time."""
_AHEAD = 4
"""Chunks per rank that may be done before earlier ones are: 16 MB of predictions as large as the rows."""
_MOST_WAITING_BYTES = 256 << 20
"""Rows and predictions that may wait for the type of a column, where the result is to stay small. What has
no value by then is taken to have none."""
_MOST_FAILURES = 100
"""Whose reasons are kept."""


@dataclass(frozen=True, order=True)
class Chunk:
    """Some consecutive rows of the frame."""

    number: int
    first_row: int = field(compare=False)
    table: Any = field(compare=False, repr=False)
    """A ``pyarrow.Table``; of a frame in memory a view where that is possible."""
    knows_columns: bool = field(default=False, compare=False)
    """Whether it was handed out by somebody who could tell which columns there are."""

    @property
    def n_rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def rows_text(self) -> str:
        return f"rows {self.first_row} to {self.first_row + self.n_rows - 1}"


@dataclass(frozen=True)
class _Answer:
    chunk: Chunk
    columns: Any
    """What was predicted; None while whoever answered did not know which columns there are."""
    failures: Sequence[Mapping[str, Any]]

    @property
    def nbytes(self) -> int:
        return int(self.chunk.table.nbytes + (0 if self.columns is None else self.columns.nbytes))


class ChunkQueue:
    """``source`` and ``result`` are of :mod:`hydrogen_magic.inference.sources`."""

    def __init__(self, source: Any, result: Any, options: InferOptions, n_ranks: int) -> None:
        self.schema: Any = None
        """Of the predicted columns, None until the first rows are done."""
        self.n_rows: int | None = source.n_rows
        self.failures: list[Mapping[str, Any]] = []
        """The first hundred by their rows."""
        self.n_failed_rows = self.n_failed_places = 0
        self._rows_put = 0
        self._open: set[int] = set()
        """Numbers of those without an answer: only the first one counts."""
        self._result = result
        self._batch_size = options.batch_size
        self._n_ranks = n_ranks
        self._fresh = source.chunks(options.batch_size)
        self._rest: Any = None
        """Of a chunk of the source's that was too large to be handed out at once."""
        self._numbered = self._cut_rows = 0
        self._is_cut = False
        """Whether all rows of the source are numbered."""
        self._again: list[Chunk] = []
        """A heap of what was given back."""
        self._answered: dict[int, _Answer] = {}
        """By chunk, what cannot be put anywhere yet: the first rows' columns are not known."""
        self._undecided_bytes = 0
        """Of what has been looked at without telling."""
        self._undecided = 0
        """Number of the first chunk that has not been looked at for what columns there are."""
        self._seen: Any = None
        """The columns of those before, types unknown as null."""

    @property
    def rows(self) -> int:
        """Rows done, whether their columns are known or not."""
        return self._rows_put + sum(each.chunk.n_rows for each in self._answered.values())

    @property
    def in_flight(self) -> int:
        """Chunks handed out and not done."""
        return len(self._open)

    # ── out ──

    def next(self) -> Chunk | None:
        """Return what to do next; None when there is nothing, or nothing now."""
        if self._again:
            return self._out(heapq.heappop(self._again))
        if self._is_far_ahead():
            return None
        table = self._next_rows()
        if table is None:
            self._is_cut = True
            self._settle()
            return self._out(heapq.heappop(self._again)) if self._again else None
        chunk = Chunk(self._numbered, self._cut_rows, table)
        self._numbered += 1
        self._cut_rows += chunk.n_rows
        return self._out(chunk)

    def _out(self, chunk: Chunk) -> Chunk:
        self._open.add(chunk.number)
        return replace(chunk, knows_columns=self.schema is not None)

    def second(self, chunk: Chunk) -> Chunk | None:
        """Return a chunk that somebody has, for somebody else as well; None when it is done."""
        if chunk.number not in self._open:
            return None
        return replace(chunk, knows_columns=self.schema is not None)

    def _is_far_ahead(self) -> bool:
        """Whether more answers would only pile up behind rows that somebody is not done with."""
        ahead = _AHEAD * self._n_ranks
        before_first = self.schema is None and self._numbered >= self._undecided + ahead
        return before_first or self._result.n_waiting >= ahead

    def _next_rows(self) -> Any:
        table, self._rest = self._rest, None
        if table is None:
            table = next(self._fresh, None)
        most = self._most_rows()
        if table is not None and table.num_rows > most:
            table, self._rest = table.slice(0, most), table.slice(most)
        return table

    def _most_rows(self) -> int:
        """Return how many rows the next chunk may have: whole batches, one at least."""
        if self.n_rows is None:
            return 1 << 62
        share = (self.n_rows - self._cut_rows) // (_SHARES * self._n_ranks)
        return max(1, share // self._batch_size) * self._batch_size

    def give_back(self, chunk: Chunk) -> None:
        """Whoever had it did not do it; nothing is to do if it is done, or was given back before."""
        if chunk.number in self._open:
            self._open.remove(chunk.number)
            heapq.heappush(self._again, chunk)

    # ── in ──

    def answer(self, chunk: Chunk, columns: Any, failures: Sequence[Mapping[str, Any]]) -> bool:
        """Take a chunk's predictions; False when somebody else's came before.

        Raises InferError where they differ from the first rows'.
        """
        if chunk.number not in self._open:
            return False
        self._open.remove(chunk.number)
        self._answered[chunk.number] = _Answer(chunk, columns, failures)
        if self.schema is None:
            self._agree()
        self._settle()
        self._put_all()
        return True

    def _settle(self) -> None:
        """Take what is known once all rows have been tried: columns without a single value have none."""
        if self.schema is None and self._seen is not None and self.is_done:
            self._begin(self._seen)
            self._put_all()

    def _put_all(self) -> None:
        if self.schema is not None:
            answered, self._answered = self._answered, {}
            for each in answered.values():
                self._put(each)

    def _agree(self) -> None:
        """Take the columns of the first rows as everybody's; a type that they do not show is a later's."""
        while self.schema is None and self._undecided in self._answered:
            answer = self._answered[self._undecided]
            self._undecided += 1
            self._undecided_bytes += answer.nbytes
            if answer.columns is not None:
                self._seen = _completed(self._seen, answer.columns.schema)
            waits = self._result.is_bounded and self._undecided_bytes >= _MOST_WAITING_BYTES
            if self._seen is None:
                if waits:
                    raise self._all_failed(answer.chunk.first_row + answer.chunk.n_rows)
            elif waits or not any(has_null_type(column.type) for column in self._seen):
                self._begin(self._seen)

    def _begin(self, schema: Any) -> None:
        self.schema = schema
        self._result.begin(schema)

    def _put(self, answer: _Answer) -> None:
        chunk, columns = answer.chunk, _typed(answer.columns, self.schema)
        if columns is None:
            self._refuse(chunk, answer.columns)
            return
        self._result.put(chunk.first_row, columns, chunk.table)
        self._rows_put += chunk.n_rows
        self._note(answer.failures)

    def _note(self, failures: Sequence[Mapping[str, Any]]) -> None:
        if failures:
            self.n_failed_places += len(failures)
            self.n_failed_rows += sum(int(f["last_row"] - f["first_row"] + 1) for f in failures)
            both = sorted([*self.failures, *failures], key=lambda f: int(f["first_row"]))
            self.failures = both[:_MOST_FAILURES]

    def _refuse(self, chunk: Chunk, columns: Any) -> None:
        """Have it made again, by a rank that has been told which columns there are."""
        if chunk.knows_columns:
            raise InferError(
                f"`predict` returned other columns for {chunk.rows_text} than for the first rows:"
                f" {_described(columns)} instead of {_described(self.schema)}; have it return the"
                " same for every batch, or say what they are with `--schema`"
            )
        heapq.heappush(self._again, chunk)

    # ── the end ──

    @property
    def is_done(self) -> bool:
        """Whether every row has an answer."""
        return self._is_cut and not self._again and not self._open

    def finish(self) -> Any:
        """Return the frame with its predictions. Raises InferError when there are none at all."""
        if self.schema is None and self._cut_rows:
            raise self._all_failed(self._cut_rows)
        return self._result.finish()

    def _all_failed(self, n_rows: int) -> InferError:
        failures = (f for number in sorted(self._answered) for f in self._answered[number].failures)
        first = next(failures, None)
        return InferError(
            f"`predict` failed for each of the first {n_rows:,} rows, so nothing says which columns it"
            f" returns; the first failure: {first['reason'] if first else 'unknown'}"
        )

    def abandon(self) -> None:
        """There will be no result: let go of frame and answers."""
        self._answered.clear()
        self._again.clear()
        self._rest = None
        self._fresh.close()
        self._result.abort()


def _completed(first: Any, later: Any) -> Any:
    """Return the schema ``first`` with types, and parts of types, that only ``later`` knows."""
    if first is None or first.names != later.names:
        return later if first is None else first
    for place, column in enumerate(later):
        known = first.field(place)
        first = first.set(place, known.with_type(merge_types(known.type, column.type)))
    return first


def _typed(columns: Any, schema: Any) -> Any:
    """Return ``columns`` with nulls of the types in ``schema``, None if they are other columns."""
    if columns is None or columns.schema.equals(schema):
        return columns
    completed = _completed(columns.schema, schema)
    return fit_table(columns, schema) if completed.equals(schema) else None


def _described(what: Any) -> str:
    if what is None:
        return "nothing"
    schema = getattr(what, "schema", what)
    return ", ".join(f"{column.name} {column.type}" for column in schema)
